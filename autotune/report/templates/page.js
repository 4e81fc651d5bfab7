"use strict";
// Tables are sorted by a click on a column's name: ascending, descending, as written.
const SCALES = {B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, us: 1e-6, "\u00b5s": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600};
const valueOf = cell => {
  const text = cell ? cell.textContent.trim() : "";
  // No versions, dates or times: they are compared as texts.
  const found = text.match(/^([+\u2212-]?)(\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(?![\d.:-])\s*([A-Za-z\u00b5]*)/);
  if (!found) return [Infinity, text];
  const size = Number(found[2].replace(/,/g, "")) * (Object.hasOwn(SCALES, found[3]) ? SCALES[found[3]] : 1);
  return [found[1] && found[1] !== "+" ? -size : size, text];
};
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], written = [...body.rows], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    if (written.length < 2 || !head.textContent.trim()) return;
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = {ascending: "descending", descending: null}[head.getAttribute("aria-sort")];
      for (const other of heads) other.removeAttribute("aria-sort");
      if (next === null) return body.append(...written);
      const order = next ?? "ascending", sign = order === "ascending" ? 1 : -1;
      head.setAttribute("aria-sort", order);
      const rows = written.map(row => [valueOf(row.cells[column]), row]);
      // What is no number comes last in both orders.
      rows.sort(([[a, one]], [[b, other]]) => a === b ? sign * one.localeCompare(other, undefined, {numeric: true}) * (a === Infinity)
        : a === Infinity ? 1 : b === Infinity ? -1 : sign * (a - b));
      body.append(...rows.map(([, row]) => row));
    });
  });
}
// Arrow keys go through the marks of a figure, as the pointer does, and show what each one is.
for (const figure of document.querySelectorAll("figure")) {
  const told = document.createElement("output");
  figure.querySelector("figcaption").before(told);
  for (const drawing of figure.querySelectorAll(":scope > svg")) {
    const marks = [...drawing.querySelectorAll("g > title")].map(title => title.parentNode);
    if (!marks.length) continue;
    let at = -1;
    const go = to => {
      marks[at]?.classList.remove("chosen");
      at = to;
      marks[at]?.classList.add("chosen");
      told.textContent = at < 0 ? "" : marks[at].querySelector("title").textContent;
    };
    drawing.setAttribute("tabindex", "0");
    drawing.addEventListener("focus", () => { told.textContent = "Arrow keys: what each mark is."; });
    drawing.addEventListener("blur", () => go(-1));
    drawing.addEventListener("keydown", event => {
      const to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: marks.length - 1}[event.key];
      if (to === undefined) return;
      event.preventDefault();
      go(Math.min(Math.max(to, 0), marks.length - 1));
    });
  }
}

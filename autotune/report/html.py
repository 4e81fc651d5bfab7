"""Be the shell of every report: one page, no script, nothing that is fetched, light or dark as the reader has it.

Text is escaped where it enters; what is ``Html`` already is left as it is.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --card: #f6f8fa; --ink: #1f2328; --faint: #57606a; --rule: #d0d7de;
  --one: #0072b2; --two: #b84a00; --warn: #b35900; --bad: #cf222e; --good: #116329; --kept: #0072b2; --again: #e8a33d;
  --fixed: #c4cad1; --grid: #e4e8ec; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --card: #161b22; --ink: #e6edf3; --faint: #9ea7b3;
  --rule: #30363d; --one: #58b4ee; --two: #ff9b57; --warn: #e3b341; --bad: #ff7b72; --good: #56d364; --kept: #388bd6;
  --again: #d9932f; --fixed: #484f58; --grid: #21262d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1480px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p, li { max-width: 75ch; }
.meta, figcaption, .note { color: var(--faint); font-size: .9rem; }
.meta, .note { overflow-wrap: anywhere; }
.verdict { font-size: 1.1rem; border-left: .3rem solid var(--good); padding: .3rem 0 .3rem .9rem; margin: 1.2rem 0; }
.verdict.warn { border-color: var(--warn); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0;
  padding: 0; }
.cards div { background: var(--card); border: 1px solid var(--rule); border-radius: .4rem; padding: .5rem .7rem; }
.cards dt { color: var(--faint); font-size: .85rem; }
.cards dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.figures { display: grid; gap: 1.2rem; }
@media (min-width: 1080px) { .figures { grid-template-columns: 1fr 1fr; } }
figure { margin: 0; min-width: 0; max-width: 52rem; }
h3 { font-size: 1rem; margin: 0 0 .3rem; }
figcaption { margin-top: .3rem; max-width: 75ch; }
svg { display: block; width: 100%; height: auto; }
svg.wide { display: none; }
@media (min-width: 640px) { svg.wide { display: block; } svg.narrow { display: none; } }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; margin: 0 0 .4rem; padding: 0;
  font-size: .9rem; }
.key li { display: flex; align-items: center; gap: .4rem; }
.key svg { width: 26px; height: 12px; flex: none; }
.scroll { overflow-x: auto; border: 1px solid var(--rule); border-radius: .4rem; }
.scroll:focus-visible, summary:focus-visible { outline: 3px solid var(--one); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--rule); vertical-align: top; }
thead th { background: var(--card); white-space: nowrap; }
tbody tr:last-child > * { border-bottom: 0; }
tbody th { font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
tbody td { white-space: nowrap; }
tbody td.text { min-width: 16rem; white-space: normal; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .3rem 0; }
code, pre { font: .9rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: .4rem; padding: .6rem .8rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { .scroll { overflow: visible; } }
"""
# Rules of what is drawn; the same in a file of its own.
_FIGURES = """
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--faint); }
svg .name { fill: var(--ink); }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--rule); }
svg .line { fill: none; stroke-width: 2; }
svg .line.one { stroke: var(--one); } svg .line.two { stroke: var(--two); stroke-dasharray: 2 2; }
svg .line.limit { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 7 4; }
svg .dot.one { fill: var(--one); } svg .dot.two { fill: var(--two); } svg .dot.limit { fill: var(--ink); }
svg .switch { fill: var(--good); } svg .refused { stroke: var(--warn); stroke-width: 1.6; fill: none; }
svg .trip { stroke: var(--bad); stroke-width: 2; }
svg .kept { fill: var(--kept); } svg .again { fill: var(--again); } svg .fixed { fill: var(--fixed); }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def _in_light(rules: str) -> str:
    """Return rules with the light colours in place of their names, which few other programs than browsers know."""
    light = dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", _STYLE[: _STYLE.index("@media")]))
    return re.sub(r"var\(--([a-z0-9]+)\)", lambda name: light[name[1]], rules)


FIGURE_STYLE = _in_light(_FIGURES)


class Html(str):
    """Be text that is markup already."""

    __slots__ = ()


def escape(text: object) -> Html:
    """Return text as markup; markup stays what it is."""
    return text if isinstance(text, Html) else Html(html.escape(str(text)))


def element(name: str, *content: object, **attributes: object) -> Html:
    """Return an element.

    Args:
        name: its tag.
        *content: what is in it; text is escaped.
        **attributes: its attributes; a trailing ``_`` is dropped, others become ``-``, and ``None`` leaves one out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{join(content)}</{name}>")


def join(parts: Iterable[object]) -> Html:
    """Return parts one after the other."""
    return Html("".join(escape(part) for part in parts))


def section(title: str, *content: object) -> Html:
    """Return a section with its heading; nothing if nothing is in it."""
    if not any(content):
        return Html("")
    return element("section", element("h2", title), "\n", *content)


def cards(values: Sequence[tuple[str, str]]) -> Html:
    """Return figures side by side, each under its name."""
    return element(
        "dl", *(element("div", element("dt", name), element("dd", value)) for name, value in values), class_="cards"
    )


def table(label: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[int] = ()) -> Html:
    """Return a table that scrolls sideways by itself, with the keyboard too.

    Args:
        label: what it holds, for who cannot see it.
        columns: names of its columns.
        rows: its cells; the first of each row is its heading.
        numbers: columns whose cells stand on the right.
    """

    def kind(number: int) -> str | None:
        return "number" if number in numbers else "text" if number == len(columns) - 1 else None

    head = element("tr", *(element("th", name, scope="col", class_=kind(i)) for i, name in enumerate(columns)))
    body = []
    for row in rows:
        first, *rest = row
        cells = [element("td", cell, class_=kind(number)) for number, cell in enumerate(rest, 1)]
        body.append(element("tr", element("th", first, scope="row", class_=kind(0)), *cells))
    inner = element("table", element("thead", head), element("tbody", *body))
    return element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=label)


def page(title: str, *content: object) -> str:
    """Return a whole page."""
    head = join(
        [
            Html('<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY)}">\n'),
            element("title", title),
            Html(f"\n<style>{_STYLE}{_FIGURES}</style>\n"),
        ]
    )
    body = element("body", element("main", *content))
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}</head>\n{body}\n</html>\n'

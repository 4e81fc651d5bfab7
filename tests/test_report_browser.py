"""Tests of reports in headless Chromium, at two widths, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import BINARY, Chromium, chromium
from test_live import Wanders
from test_report_attached import attach_and_train

from autotune.budget import MemoryBudget
from autotune.cli.main import run as run_command
from autotune.report.plot import Axis, Layer, Plot, Shape, axis_around
from autotune.report.rendering import Table, environment
from autotune.report.svg import figure_of

pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium on this machine")
SIZES = [(400, False), (400, True), (1600, False), (1600, True)]

# Text that overlaps other text or lies outside its drawing, in the visible part of every figure.
CLASHES = """
(() => {
  const found = [];
  for (const svg of document.querySelectorAll('figure > svg')) {
    const frame = svg.getBoundingClientRect();
    if (!frame.width) continue;
    const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    for (const [name, b] of boxes)
      if (b.left < frame.left - 2 || b.right > frame.right + 2 || b.bottom > frame.bottom + 2)
        found.push(`outside: ${name}`);
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
      const [a, b] = [boxes[i][1], boxes[j][1]];
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
          Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
        found.push(`${boxes[i][0]} on ${boxes[j][0]} in ${svg.getAttribute('aria-label').slice(0, 40)}`);
    }
  }
  return found;
})()
"""
# Text with too little contrast to its background.
FAINT = """
(() => {
  const light = rgb => {
    const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const parts = text => text.match(/[0-9.]+/g).map(Number);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const colour = parts(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll('h1,h2,h3,p,li,dt,dd,td,th,span,summary,figcaption,pre,svg text')) {
    if (!e.getBoundingClientRect().width || !e.textContent.trim()) continue;
    const style = getComputedStyle(e);
    const [a, b] = [light(parts(e.tagName === 'text' ? style.fill : style.color).slice(0, 3)), light(behind(e))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.push(`${contrast.toFixed(2)} ${e.tagName} ${e.textContent.slice(0, 30)}`);
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = attach_and_train(tmp_path_factory.mktemp("attached"), Wanders())
    assert run_command(["report", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module", params=["compared", "tuned", "attached"])
def report(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder / "report.html"


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_report_opens_from_disk_without_console_messages_and_fits_the_window(
    report: Path, width: int, dark: bool, browser: Chromium
) -> None:
    browser.open(report, width=width, dark=dark)
    assert browser.said == []
    assert browser.asked == [report.absolute().as_uri()]
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(CLASHES) == []
    assert browser.value(FAINT) == []
    paper = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (not dark)


@pytest.mark.parametrize("width", [400, 1600])
def test_values_of_any_width_do_not_overlap_other_text(tmp_path: Path, width: int, browser: Chromium) -> None:
    drawn = [
        Plot(
            title=f"From {low} to {high}",
            described="A line.",
            x=Axis(name="real steps", low=0.0, high=1.03 * largest),
            y=axis_around("cost, of the baseline's", [low, high]),
            layers=[Layer(name="a line", look="a1", shape=Shape.LINE, points=[(0, low), (largest, high)])],
        )
        for low, high in [(1.17, 1.18), (0.99999, 1.0), (1e-7, 3e-7), (-123456.0, 1e6), (0.0, 1.0)]
        for largest in (3, 1e6)
    ]
    page = tmp_path / "page.html"
    template = environment().from_string(
        '{% extends "page.html.j2" %}{% import "parts.html.j2" as parts %}'
        "{% block content %}{{ parts.figures(figures) }}{% endblock %}"
    )
    page.write_text(template.render(title="figures", figures=[figure_of(plot) for plot in drawn]))
    browser.open(page, width=width)
    assert browser.value(CLASHES) == []


@pytest.mark.parametrize("width", [400, 1600])
def test_verdict_plan_and_reason_for_one_layer_need_at_most_one_scroll(
    compared: Path,
    tuned: Path,
    width: int,
    browser: Chromium,
) -> None:
    height = 900
    for folder in (compared, tuned):
        browser.open(folder / "report.html", width=width, height=height)
        ends = [
            browser.value(f"document.querySelector('{what}').getBoundingClientRect().bottom")
            for what in (".verdict", ".units", ".units li:nth-child(3) .other")
        ]
        assert ends[0] <= height
        # The end of the second screen: one scroll.
        assert ends[2] <= 2 * height


def press(browser: Chromium, key: str) -> None:
    codes = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37}
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])


def test_tables_are_sorted_by_a_columns_name(compared: Path, browser: Chromium) -> None:
    browser.open(compared / "report.html", width=1600)
    cells = "[...document.querySelector('table').tBodies[0].rows].map(row => row.cells[{}].textContent)"
    heads = browser.value("[...document.querySelector('table').tHead.rows[0].cells].map(cell => cell.textContent)")
    column = next(number for number, name in enumerate(heads) if "peak" in name)
    written = browser.value(cells.format(column))
    orders = []
    for _ in range(3):
        browser.value(f"document.querySelectorAll('table')[0].querySelectorAll('th button')[{column}].click()")
        orders.append(browser.value(cells.format(column)))
    # "632.1 KiB (58%)"
    sizes = [[MemoryBudget.parse("".join(text.split()[:2])).size_bytes for text in order] for order in orders]
    assert len(written) > 1
    assert sizes[0] == sorted(sizes[0])
    assert sizes[1] == sorted(sizes[1], reverse=True)
    assert orders[2] == written


def test_sizes_versions_and_names_are_sorted_as_what_they_are(tmp_path: Path, browser: Chromium) -> None:
    rows = [
        ("blocks.10", "1.1 TiB (3%)"),
        ("blocks.2", "900.0 GiB"),
        ("blocks.0", "3.11.7"),
        ("head", "3 constructor"),
        ("k=16", "-2 ms"),
        ("k=2", "1,024 ms"),
        ("z", "2.4.6"),
    ]
    page = tmp_path / "page.html"
    template = environment().from_string(
        '{% extends "page.html.j2" %}{% import "parts.html.j2" as parts %}'
        "{% block content %}{{ parts.table(found) }}{% endblock %}"
    )
    page.write_text(template.render(title="t", found=Table(label="t", columns=["unit", "value"], rows=rows)))
    browser.open(page, width=800)
    cells = "[...document.querySelector('table').tBodies[0].rows].map(row => row.cells[{}].textContent)"
    orders = []
    for column in (0, 1):
        browser.value(f"document.querySelectorAll('th button')[{column}].click()")
        orders.append(browser.value(cells.format(column)))
    assert orders[0] == ["blocks.0", "blocks.2", "blocks.10", "head", "k=2", "k=16", "z"]
    assert orders[1] == ["-2 ms", "1,024 ms", "3 constructor", "900.0 GiB", "1.1 TiB (3%)", "2.4.6", "3.11.7"]


def test_marks_of_a_figure_are_told_by_arrow_keys(compared: Path, browser: Chromium) -> None:
    browser.open(compared / "report.html", width=1600)
    browser.value(
        "[...document.querySelectorAll('svg[tabindex]')].find(one => one.getBoundingClientRect().width).focus()"
    )
    told = "document.activeElement.closest('figure').querySelector('output').textContent"
    titles = browser.value("[...document.activeElement.querySelectorAll('g > title')].map(one => one.textContent)")
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        press(browser, key)
        seen.append(browser.value(told))
    assert seen == [titles[0], titles[1], titles[0]]
    assert browser.value("document.querySelectorAll('.chosen').length") == 1


def test_scrollable_list_is_reachable_by_keyboard(compared: Path, browser: Chromium) -> None:
    browser.open(compared / "report.html", width=400)
    for _ in range(60):
        press(browser, "Tab")
        if browser.value("document.activeElement.className") == "scroll tall":
            return
    raise AssertionError("the list of units is never in focus")

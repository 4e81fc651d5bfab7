"""Draw figures as SVG that stands in a page: lines over steps with marks, and a plan unit by unit.

Colours are classes of the page's style, so that a figure is light or dark with it. Each figure comes in two widths, of
which the page shows the one that can be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autotune.report.html import Html, element, join

Point = tuple[float, float | None]
WIDTHS = {"wide": 720, "narrow": 360}
_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 300, 52, 12, 10, 44
# The marks' lane, above the axis.
_LANE = 16
_POINTS = 300
_COLUMNS = 240
_ROWS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Hold what is drawn in one colour.

    Attributes:
        name: for the key.
        style: ``one``, ``two`` or ``limit``.
        points: x and y, by x; a y of ``None`` is a gap.
        dots: whether points are dots; else a line that steps.
    """

    name: str
    style: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Hold what happened at a step.

    Attributes:
        x: the step.
        kind: ``switch``, ``refused`` or ``trip``.
        text: what happened.
    """

    x: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class _Frame:
    width: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    height: int = field(default=_HEIGHT)

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        bottom = self.height - _BOTTOM - _LANE
        return bottom - (value - low) / (high - low) * (bottom - _TOP)


def chart(title: str, described: str, series: Sequence[Series], marks: Sequence[Mark], *, unit: str, end: int) -> Html:
    """Return a figure of values over the steps of a run, from 0.

    Args:
        title: what it shows.
        described: the same in a sentence or two, for who cannot see it.
        series: what is drawn.
        marks: what happened.
        unit: of the values.
        end: the last step.
    """
    top = max((y for one in series for _, y in one.points if y is not None), default=1.0) or 1.0
    x_range, y_range = (0.0, float(max(end, 1))), (0.0, top * 1.06)
    drawn = [
        _svg(name, title, described, _drawn(_Frame(width, x_range, y_range), series, marks, unit), width, _HEIGHT)
        for name, width in WIDTHS.items()
    ]
    kinds = {mark.kind: _KEYS[mark.kind] for mark in marks}
    key = [_key(*_sample(one), one.name) for one in series] + [_key(*drawing) for drawing in kinds.values()]
    return _figure(title, key, drawn, described)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return round values between two, about so many."""
    raw = (high - low) / max(count, 1)
    scale = 10 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw * 0.999)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step * (1 + 1e-9)) + 1)]


def _drawn(frame: _Frame, series: Sequence[Series], marks: Sequence[Mark], unit: str) -> Html:
    parts = [*_axes(frame, unit)]
    for one in series:
        points = list(_thinned(one.points))
        parts.append(_dots(frame, one.style, points) if one.dots else _line(frame, one.style, points))
    return join([*parts, *_marks(frame, marks)])


def _axes(frame: _Frame, unit: str) -> Iterator[Html]:
    bottom, right = frame.height - _BOTTOM, frame.width - _RIGHT
    for value in ticks(*frame.y_range, 6):
        y = f"{frame.y(value):.1f}"
        yield element("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid")
        yield element("text", f"{value:,.6g}", x=_LEFT - 6, y=y, text_anchor="end", dominant_baseline="middle")
    yield element("line", x1=_LEFT, x2=right, y1=bottom, y2=bottom, class_="axis")
    for value in ticks(*frame.x_range, frame.width // 90):
        if value == int(value):
            yield element("text", f"{value:,.0f}", x=f"{frame.x(value):.1f}", y=bottom + 16, text_anchor="middle")
    yield element("text", "step", x=(right + _LEFT) / 2, y=frame.height - 6, text_anchor="middle", class_="name")
    middle = (_TOP + bottom - _LANE) / 2
    turned = f"rotate(-90 12 {middle})"
    yield element("text", unit, x=12, y=middle, text_anchor="middle", transform=turned, class_="name")


def _line(frame: _Frame, style: str, points: Sequence[Point]) -> Html:
    path, alone, before = [], [], None
    for number, (x, y) in enumerate(points):
        if y is not None:
            place = f"{frame.x(x):.1f}"
            path.append(f"M{place} {frame.y(y):.1f}" if before is None else f"H{place}V{frame.y(y):.1f}")
            follows = number + 1 < len(points) and points[number + 1][1] is not None
            if before is None and not follows:
                alone.append((x, y))
        before = y
    drawn = element("path", d="".join(path), class_=f"line {style}")
    return join([drawn, _dots(frame, style, alone)])


def _dots(frame: _Frame, style: str, points: Sequence[Point]) -> Html:
    return join(
        element("circle", cx=f"{frame.x(x):.1f}", cy=f"{frame.y(y):.1f}", r=3, class_=f"dot {style}")
        for x, y in points
        if y is not None
    )


def _marks(frame: _Frame, marks: Sequence[Mark]) -> Iterator[Html]:
    lane = frame.height - _BOTTOM - _LANE / 2
    # As many as can be told apart; the page's tables hold them all.
    seen: set[tuple[str, int]] = set()
    for mark in marks:
        x = frame.x(mark.x)
        if (mark.kind, int(x / 3)) in seen:
            continue
        seen.add((mark.kind, int(x / 3)))
        yield element("g", element("title", mark.text), _SHAPES[mark.kind](x, lane))


def _switch(x: float, y: float) -> Html:
    return element("path", d=f"M{x:.1f} {y - 5:.1f}l5 9h-10z", class_="switch")


def _refused(x: float, y: float) -> Html:
    return element("path", d=f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6", class_="refused")


def _trip(x: float, y: float) -> Html:
    return element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=_TOP, y2=y + _LANE / 2, class_="trip")


_SHAPES: dict[str, Callable[[float, float], Html]] = {"switch": _switch, "refused": _refused, "trip": _trip}
_KEYS = {
    "switch": (_switch(13, 7), "switched"),
    "refused": (_refused(13, 6), "a rule refused"),
    "trip": (element("line", x1=13, x2=13, y1=0, y2=12, class_="trip"), "tripped"),
}


def _sample(series: Series) -> tuple[Html]:
    if series.dots:
        return (element("circle", cx=13, cy=6, r=4, class_=f"dot {series.style}"),)
    return (element("path", d="M0 6H26", class_=f"line {series.style}"),)


def _key(drawing: Html, name: str) -> Html:
    return element("li", element("svg", drawing, viewBox="0 0 26 12", aria_hidden="true"), name)


def _svg(name: str, title: str, described: str, content: Html, width: int, height: int) -> Html:
    head = [element("title", title), element("desc", described)]
    return element(
        "svg",
        *head,
        content,
        viewBox=f"0 0 {width} {height}",
        class_=name,
        role="img",
        aria_label=f"{title}: {described}",
    )


def _thinned(points: Sequence[Point]) -> Iterator[Point]:
    """Yield points as they are or, where there are too many, the lowest and the highest of each few neighbours."""
    each = -(-len(points) // _POINTS)
    if each <= 2:
        yield from points
        return
    for start in range(0, len(points), each):
        few = points[start : start + each]
        known = [point for point in few if point[1] is not None]
        if not known:
            yield few[0]
            continue
        lowest, highest = (extreme(known, key=lambda point: point[1] or 0.0) for extreme in (min, max))
        yield from sorted({lowest, highest})


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Hold how the units of a plan were stored over a run.

    Attributes:
        units: their names.
        fixed: those whose storage cannot be chosen.
        recomputed: names of the recomputed ones, by the step from which that held, ascending.
        end: the last step.
    """

    units: Sequence[str]
    fixed: frozenset[str]
    recomputed: Sequence[tuple[int, frozenset[str]]]
    end: int

    def at(self, step: float) -> frozenset[str]:
        """Return what was recomputed at a step."""
        return next((names for begins, names in reversed(self.recomputed) if begins <= step), frozenset())


def strip(title: str, described: str, course: Course) -> Html:
    """Return a figure with a row per unit and the run from left to right; many units share rows."""
    each = max(-(-len(course.units) // _ROWS), 1)
    rows = [course.units[start : start + each] for start in range(0, len(course.units), each)]
    tall = 16 if len(rows) <= 24 else 8
    columns = max(min(_COLUMNS, course.end), 1)
    sampled = [course.at((number + 0.5) * course.end / columns) for number in range(columns)]
    height = tall * len(rows) + 40
    drawn = [
        _svg(name, title, described, _strip_rows(course, rows, sampled, width, tall), width, height)
        for name, width in WIDTHS.items()
    ]
    names = {"kept": "kept for backward", "again": "recomputed", "fixed": "no choice"}
    used = [name for name in names if name != "fixed" or course.fixed]
    key = [_key(element("rect", width=26, height=12, class_=name), names[name]) for name in used]
    return _figure(title, key, drawn, described)


def _figure(title: str, key: Sequence[Html], drawn: Sequence[Html], described: str) -> Html:
    caption = element("figcaption", described)
    return element("figure", element("h3", title), element("ul", *key, class_="key"), *drawn, caption)


def _strip_rows(
    course: Course, rows: Sequence[Sequence[str]], sampled: Sequence[frozenset[str]], width: int, tall: int
) -> Html:
    left = 96 if width < 500 else 150
    wide = (width - left - _RIGHT) / len(sampled)
    parts = []
    for number, names in enumerate(rows):
        y = number * tall
        if tall > 10 or number % 4 == 0:
            parts.append(_row_name(names[0], left, y + tall / 2))
        for first, last, kind in _runs([_kind(course, names, there) for there in sampled]):
            place = {"x": f"{left + first * wide:.1f}", "width": f"{(last - first) * wide:.1f}"}
            parts.append(element("rect", **place, y=y + 1, height=tall - 2, class_=kind))
    bottom = len(rows) * tall + 16
    for value in ticks(0, course.end, width // 120):
        x = left + value / max(course.end, 1) * wide * len(sampled)
        anchor = "end" if value == course.end else "middle"
        parts.append(element("text", f"{value:,.0f}", x=f"{x:.1f}", y=bottom, text_anchor=anchor))
    middle = (width + left - _RIGHT) / 2
    return join([*parts, element("text", "step", x=middle, y=bottom + 18, text_anchor="middle", class_="name")])


def _row_name(name: str, left: int, y: float) -> Html:
    room = left // 7
    short = name if len(name) <= room else "…" + name[-room + 1 :]
    return element("text", short, x=left - 6, y=y, text_anchor="end", dominant_baseline="middle", class_="name")


def _kind(course: Course, names: Sequence[str], recomputed: frozenset[str]) -> str:
    chosen = [name for name in names if name not in course.fixed]
    if not chosen:
        return "fixed"
    return "again" if 2 * sum(name in recomputed for name in chosen) >= len(chosen) else "kept"


def _runs(kinds: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yield first and last-but-one position and kind of each run of equal ones."""
    first = 0
    for number in range(1, len(kinds) + 1):
        if number == len(kinds) or kinds[number] != kinds[first]:
            yield first, number, kinds[first]
            first = number

"""Draw values over the steps of a run: lines and dots, with marks for what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autotune.report.html import Html, element, join
from autotune.report.svg import BOTTOM, TOP, Figure, Frame, Key

Point = tuple[float, float | None]
_HEIGHT = 300
# The marks' lane, above the axis.
_LANE = 16
_POINTS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What is drawn in one colour.

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
    """What happened at a step.

    Attributes:
        x: the step.
        kind: ``switch``, ``refused`` or ``trip``.
        text: what happened.
    """

    x: float
    kind: str
    text: str


def chart(
    title: str,
    described: str,
    series: Sequence[Series],
    marks: Sequence[Mark],
    *,
    unit: str,
    end: int,
    height: int = _HEIGHT,
) -> Figure:
    """Return a figure of values over the steps of a run, from 0.

    Args:
        title: what it shows.
        described: the same in a sentence or two, for who cannot see it.
        series: what is drawn.
        marks: what happened.
        unit: of the values.
        end: the last step.
        height: of the figure.
    """
    top = max((y for one in series for _, y in one.points if y is not None), default=1.0) or 1.0
    x_range, y_range = (0.0, float(max(end, 1))), (0.0, top * 1.06)

    def draw(width: int) -> tuple[Html, int]:
        frame = Frame(width=width, height=height, x_range=x_range, y_range=y_range, lane=_LANE)
        return _drawn(frame, series, marks, unit), height

    kinds = dict.fromkeys(mark.kind for mark in marks)
    key = [Key(sample=_sample(one), name=one.name) for one in series] + [_KEYS[kind] for kind in kinds]
    return Figure(title=title, described=described, key=key, draw=draw)


def _drawn(frame: Frame, series: Sequence[Series], marks: Sequence[Mark], unit: str) -> Html:
    parts = [*frame.axes("step", unit, whole=True)]
    for one in series:
        points = list(_thinned(one.points))
        parts.append(_dots(frame, one.style, points) if one.dots else _line(frame, one.style, points))
    return join([*parts, *_marks(frame, marks)])


def _line(frame: Frame, style: str, points: Sequence[Point]) -> Html:
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


def _dots(frame: Frame, style: str, points: Sequence[Point]) -> Html:
    return join(
        element("circle", cx=f"{frame.x(x):.1f}", cy=f"{frame.y(y):.1f}", r=3, class_=f"dot {style}")
        for x, y in points
        if y is not None
    )


def _marks(frame: Frame, marks: Sequence[Mark]) -> Iterator[Html]:
    lane = frame.height - BOTTOM - _LANE / 2
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
    return element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=TOP, y2=y + _LANE / 2, class_="trip")


_SHAPES: dict[str, Callable[[float, float], Html]] = {"switch": _switch, "refused": _refused, "trip": _trip}
_KEYS = {
    "switch": Key(sample=_switch(13, 7), name="switched"),
    "refused": Key(sample=_refused(13, 6), name="a rule refused"),
    "trip": Key(sample=element("line", x1=13, x2=13, y1=0, y2=12, class_="trip"), name="tripped"),
}


def _sample(series: Series) -> Html:
    if series.dots:
        return element("circle", cx=13, cy=6, r=4, class_=f"dot {series.style}")
    return element("path", d="M0 6H26", class_=f"line {series.style}")


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

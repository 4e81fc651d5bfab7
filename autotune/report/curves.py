"""Draw how a metric went with time, a line per arm, up to a target."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.report.html import Html, element, join
from autotune.report.svg import RIGHT, Figure, Frame, Key, arm_style, marker

_HEIGHT = 380
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One arm's course.

    Attributes:
        number: of the arm, which gives its colour.
        name: of the arm.
        points: x and y, by x.
    """

    number: int
    name: str
    points: Sequence[Point]


def curves(
    title: str,
    described: str,
    lines: Sequence[Line],
    *,
    target: float | None,
    edge: float | None,
    x_name: str,
    y_name: str,
) -> Figure:
    """Return a figure of courses.

    Args:
        title: what it shows.
        described: the same in a sentence or two, for who cannot see it.
        lines: what is drawn; at least one point.
        target: the y to arrive at; ``None`` for none.
        edge: the y at which the picture begins, where the first steep part would flatten the rest; ``None`` for all.
        x_name: what the horizontal axis shows.
        y_name: what the other one shows.
    """
    shown = [_from_edge(line, edge, target) for line in lines]
    values = [y for line in shown for _, y in line.points] + ([] if target is None else [target])
    room = (max(values) - min(values) or abs(max(values)) or 1.0) * 0.06
    y_range = (min(values) - room, max(values) + room)
    end = max((x for line in shown for x, _ in line.points), default=1.0) or 1.0

    def draw(width: int) -> tuple[Html, int]:
        frame = Frame(width=width, height=_HEIGHT, x_range=(0.0, end * 1.03), y_range=y_range)
        return join([*frame.axes(x_name, y_name), *_target(frame, target), *_lines(frame, shown)]), _HEIGHT

    key = [Key(sample=_sample(line.number), name=line.name) for line in shown]
    if target is not None:
        key.append(Key(sample=element("path", d="M0 6H26", class_="line limit"), name=f"target {target:g}"))
    return Figure(title=title, described=described, key=key, draw=draw)


def mean_curve(runs: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return the mean over seeds of seconds and metric at each evaluation of ``comparison.json``'s runs."""
    evaluations = zip(*(run["curve"] for run in runs), strict=False)
    return [
        (statistics.fmean(point[0] for point in points), statistics.fmean(point[2] for point in points))
        for points in evaluations
    ]


def edge_of(baseline: Sequence[Point], target: float) -> float | None:
    """Return the metric after the first sixth of the baseline's run, if it lies on the way from start to target."""
    if not baseline:
        return None
    start, edge = baseline[0][1], baseline[len(baseline) // 6][1]
    return edge if start < edge < target or target < edge < start else None


def _from_edge(line: Line, edge: float | None, target: float | None) -> Line:
    if edge is None or target is None:
        return line
    kept = [(x, y) for x, y in line.points if (y >= edge if target > edge else y <= edge)]
    return Line(number=line.number, name=line.name, points=kept or line.points[-1:])


def _sample(number: int) -> Html:
    return join([element("path", d="M0 6H26", class_=f"course {arm_style(number)}"), marker(number, 13, 6)])


def _target(frame: Frame, target: float | None) -> Iterator[Html]:
    if target is not None:
        y = f"{frame.y(target):.1f}"
        yield element("line", x1=frame.left, x2=frame.width - RIGHT, y1=y, y2=y, class_="line limit")


def _lines(frame: Frame, lines: Sequence[Line]) -> Iterator[Html]:
    for line in lines:
        places = [f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in line.points]
        if places:
            course = element("path", d=f"M{'L'.join(places)}", class_=f"course {arm_style(line.number)}")
            yield element("g", element("title", line.name), course)
    for line in lines:
        if line.points:
            x, y = line.points[-1]
            yield marker(line.number, frame.x(x), frame.y(y), f"{line.name}: {y:.4g} after {x:.4g} s")

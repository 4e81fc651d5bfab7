"""Descriptions of plots in data units. ``svg`` draws them in pages, ``png_figures`` in PNG files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

Point = tuple[float, float | None]
# Layers with more points than twice this number are thinned.
_POINTS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a plot.

    Attributes:
        name: label with the unit; empty for a vertical axis whose marks name the rows of the plot.
        low: value at the start.
        high: value at the end.
        scale: ``linear`` or ``log``; in PNG files also ``asinh``, which is linear near 0 and logarithmic beyond.
        linear_width: width of the linear part of ``asinh``.
        marks: values with their labels; ``None`` for round values.
        whole: whether only whole numbers are labelled.
    """

    name: str
    low: float
    high: float
    scale: str = "linear"
    linear_width: float = 1.0
    marks: Sequence[tuple[float, str]] | None = None
    whole: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value between the start (0) and the end (1)."""
        low, high, there = (self._scaled(one) for one in (self.low, self.high, value))
        return (there - low) / (high - low)

    def labels(self, count: int) -> list[tuple[float, str]]:
        """Return the values to label, with their labels.

        Args:
            count: approximate number of labels; ignored if the axis has ``marks``.
        """
        if self.marks is not None:
            return list(self.marks)
        values = ticks(self.low, self.high, count)
        return [(value, f"{value:,.6g}") for value in values if not self.whole or value == int(value)]

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.scale == "log" else value


class Shape(StrEnum):
    """The way the points of a layer are drawn."""

    LINE = "line"
    STEPS = "steps"
    DOTS = "dots"
    ARM = "arm"
    ACROSS = "across"
    UPRIGHT = "upright"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Points that share one look.

    Attributes:
        name: name in the key; empty to leave the layer out of the key.
        look: one of ``palette.LOOKS``.
        shape: ``LINE`` and ``STEPS`` join the points, ``DOTS`` and ``ARM`` mark them (the shape of an arm's
            mark depends on ``number``), ``ACROSS`` and ``UPRIGHT`` draw a line over the whole plot at the first point.
        points: x and y; a y of ``None`` is a gap.
        number: number of the arm.
        spread: lowest and highest value around each point, along ``spread_axis``; empty for none.
        spread_axis: ``x`` or ``y``.
        told: one tooltip per point; empty for none.
        label: text next to the first point, shown if there is room.
    """

    name: str = ""
    look: str
    shape: Shape
    points: Sequence[Point]
    number: int = 0
    spread: Sequence[tuple[float, float]] = ()
    spread_axis: str = "y"
    told: Sequence[str] = ()
    label: str = ""

    @property
    def known(self) -> list[tuple[float, float]]:
        """Return the points that are not gaps."""
        return [(x, y) for x, y in self.points if y is not None]

    def thinned(self) -> Iterator[Point]:
        """Yield the points; of a course with too many, the lowest and the highest of each group of neighbours.

        A cloud, whose points are not in order of x, has no neighbours and is yielded whole.
        """
        each = -(-len(self.points) // _POINTS)
        if each <= 2 or any(x > later for (x, _), (later, _) in itertools.pairwise(self.points)):
            yield from self.points
            return
        for start in range(0, len(self.points), each):
            few = self.points[start : start + each]
            known = [point for point in few if point[1] is not None]
            yield from sorted({pick(known, key=lambda one: one[1] or 0.0) for pick in (min, max)} if known else few[:1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event at a step of a run.

    Attributes:
        x: the step.
        kind: ``switch``, ``refused`` or ``trip``.
        text: what happened.
    """

    x: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot.

    Attributes:
        title: title of the plot.
        described: description in one or two sentences, also for screen readers.
        x: the horizontal axis.
        y: the vertical axis.
        layers: layers to draw, in the order of the key.
        marks: events, drawn in a lane above the horizontal axis.
        height: height in a page, in pixels.
    """

    title: str
    described: str
    x: Axis
    y: Axis
    layers: Sequence[Layer]
    marks: Sequence[Mark] = ()
    height: int = 380


def run_plot(
    title: str, described: str, layers: Sequence[Layer], marks: Sequence[Mark], *, unit: str, end: int, height: int
) -> Plot:
    """Return a plot of values over the steps of a run; both axes begin at 0.

    Args:
        title: title of the plot.
        described: description in one or two sentences.
        layers: layers to draw.
        marks: events to mark.
        unit: unit of the values.
        end: last step of the run.
        height: height in a page, in pixels.
    """
    top = max((y for layer in layers for _, y in layer.known), default=1.0) or 1.0
    x = Axis(name="step", low=0.0, high=float(max(end, 1)), whole=True)
    y = Axis(name=unit, low=0.0, high=top * 1.06)
    return Plot(title=title, described=described, x=x, y=y, layers=layers, marks=marks, height=height)


def axis_around(name: str, values: Sequence[float], room: float = 0.08, *, least: float = -math.inf) -> Axis:
    """Return an axis that includes some values, with room around them.

    Args:
        name: label of the axis.
        values: the values to include; at least one.
        room: share of the values' range to leave free on both sides.
        least: value that the axis does not go below.
    """
    low, high = min(values), max(values)
    margin = (high - low or abs(high) or 1.0) * room
    return Axis(name=name, low=max(low - margin, least), high=high + margin)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round values between two values."""
    raw = (high - low) / max(count, 1)
    scale = 10 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw * 0.999)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step * (1 + 1e-9)) + 1)]

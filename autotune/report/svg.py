"""Figures as SVG: inline in pages, in two widths of which the browser shows one, and as separate files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from autotune.report.plot import Layer, Mark, Plot, Shape
from autotune.report.rendering import element, join, render

WIDTHS = {"wide": 720, "narrow": 360}
RIGHT = 12
_LEFT, _TOP, _BOTTOM = 52, 10, 44
# Height of the lane of marks, above the horizontal axis.
_LANE = 16
# Mean width of a letter in pixels, used to keep texts from overlapping.
_LETTER = 6.7
_LINE = 14
_SAMPLE = 26
# Circle, square, diamond, two triangles, cross and hourglass, about 10 pixels wide, drawn from their centres.
_ARMS = (
    "m-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z",
    "m-4.5-4.5h9v9h-9z",
    "m0-6.2l6.2 6.2l-6.2 6.2l-6.2-6.2z",
    "m0-6l5.8 10.2h-11.6z",
    "m0 6l5.8-10.2h-11.6z",
    "m-1.8-5.5h3.6v3.7h3.7v3.6h-3.7v3.7h-3.6v-3.7h-3.7v-3.6h3.7z",
    "m-5-5.5h10l-10 11h10z",
)
_STAR = "m0-8l2.1 5.3l5.7.4l-4.4 3.6l1.4 5.5l-4.8-3.1l-4.8 3.1l1.4-5.5l-4.4-3.6l5.7-.4z"
_MARKS = {"switch": "m0-5l5 9h-10z", "refused": "m-3-3l6 6m0-6l-6 6", "trip": "m0-6v12"}
_MARK_NAMES = {"switch": "switched", "refused": "a rule refused", "trip": "tripped"}
# Left edge, upper edge, width and height.
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One entry of a figure's key: a sample of 26 x 12 pixels, and its name."""

    sample: Markup
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a page.

    Attributes:
        title: title of the figure.
        described: description in one or two sentences, also for screen readers.
        key: meaning of the colours and shapes.
        draw: function that takes one of ``WIDTHS`` and returns the drawing and its height.
    """

    title: str
    described: str
    key: Sequence[Key]
    draw: Callable[[int], tuple[Markup, int]]

    @property
    def name(self) -> str:
        """Return the name of the figure's file, without extension and short enough for every file system."""
        words = "".join(c if c.isalnum() else " " for c in self.title.lower()).split()
        return "-".join(words)[:60].rstrip("-")

    @property
    def drawings(self) -> list[tuple[str, int, Markup, int]]:
        """Return name, width, drawing and height for each of ``WIDTHS``."""
        return [(name, width, *self.draw(width)) for name, width in WIDTHS.items()]

    @property
    def file(self) -> str:
        """Return the figure as a standalone SVG file in light colours, with its key above it."""
        width = WIDTHS["wide"]
        content, height = self.draw(width)
        key, below = _key_above(self.key, width)
        return render("figure.svg.j2", figure=self, key=key, below=below, content=content, width=width, height=height)


def _key_above(key: Sequence[Key], width: int) -> tuple[Markup, int]:
    """Return the entries of a key side by side, and the height that they need."""
    parts, x, y = [], 8.0, 6
    for one in key:
        wide = _SAMPLE + 6 + text_width(one.name) + 18
        if x > 8 and x + wide > width:
            x, y = 8.0, y + 18
        parts.append(element("g", one.sample, transform=f"translate({x:.1f} {y})"))
        parts.append(text(one.name, x + _SAMPLE + 6, y + 10, class_="name"))
        x += wide
    return join(parts), y + 22


def figure_of(plot: Plot) -> Figure:
    """Return a plot as a figure."""
    key = [Key(sample=_sample(layer), name=layer.name) for layer in plot.layers if layer.name]
    for kind in dict.fromkeys(mark.kind for mark in plot.marks):
        key.append(Key(sample=_path(13, 6, _MARKS[kind], kind), name=_MARK_NAMES[kind]))
    return Figure(
        title=plot.title,
        described=plot.described,
        key=key,
        draw=lambda width: (join(_Canvas(plot, width).drawn()), plot.height),
    )


def _sample(layer: Layer) -> Markup:
    line = element("path", d="M0 6H26", class_=f"line {layer.look}")
    if layer.shape is Shape.ARM:
        return _arm(layer, 13, 6)
    if layer.shape is Shape.DOTS:
        return _dot(layer, 13, 6)
    return join([line, _arm(layer, 13, 6)]) if layer.shape is Shape.LINE else line


class _Canvas:
    """A plot drawn at one width."""

    def __init__(self, plot: Plot, width: int) -> None:
        self._plot = plot
        self._rows = not plot.y.name
        self._lane = _LANE if plot.marks else 0
        self._bottom = plot.height - _BOTTOM
        self._y_labels = plot.y.labels(max(plot.height // 50, 3))
        widest = max((text_width(label) for _, label in self._y_labels), default=0.0)
        self._left = min(widest + 12, width / 3) if self._rows else max(_LEFT, widest + 24)
        self._right = width - RIGHT
        self._width = width

    def _x(self, value: float) -> float:
        return self._left + min(max(self._plot.x.share(value), 0.0), 1.0) * (self._right - self._left)

    def _y(self, value: float) -> float:
        bottom = self._bottom - self._lane
        return bottom - self._plot.y.share(value) * (bottom - _TOP)

    def drawn(self) -> Iterator[Markup]:
        """Yield all parts from back to front."""
        yield from self._axes()
        layers = self._plot.layers
        for shapes in ((Shape.ACROSS, Shape.UPRIGHT), (Shape.LINE, Shape.STEPS), (Shape.DOTS,)):
            yield from (part for layer in layers if layer.shape in shapes for part in self._layer(layer))
        yield from (part for layer in layers for part in self._spreads(layer))
        yield from (part for layer in layers if layer.shape is Shape.ARM for part in self._layer(layer))
        yield from self._labels()
        yield from self._marks()

    def _axes(self) -> Iterator[Markup]:
        plot, left, right, bottom = self._plot, self._left, self._right, self._bottom
        for value, label in self._y_labels:
            y = self._y(value)
            if not self._rows:
                yield _line(left, y, right, y, "grid")
            style = "name" if self._rows else None
            room = max(int((left - 8) / _LETTER), 4)
            shown = label if len(label) <= room or not self._rows else f"{label[: room - 1]}…"
            yield text(shown, left - 6, y, text_anchor="end", dominant_baseline="middle", class_=style)
        labels = plot.x.labels(self._width // 90)
        if self._rows:
            yield from (_line(self._x(value), _TOP, self._x(value), bottom, "grid") for value, _ in labels)
        yield _line(left, bottom, right, bottom, "axis")
        yield from labels_below([(self._x(value), label) for value, label in labels], bottom + 16, self._width)
        yield text(plot.x.name, (left + right) / 2, plot.height - 6, text_anchor="middle", class_="name")
        if plot.y.name:
            middle = (_TOP + bottom - self._lane) / 2
            turned = f"rotate(-90 12 {middle:.1f})"
            yield text(plot.y.name, 12, middle, text_anchor="middle", transform=turned, class_="name")

    def _layer(self, layer: Layer) -> Iterator[Markup]:
        if layer.shape is Shape.UPRIGHT:
            x = self._x(layer.points[0][0])
            yield _line(x, _TOP, x, self._bottom, f"line {layer.look}")
        elif layer.shape is Shape.ACROSS:
            y = self._y(layer.known[0][1])
            yield _line(self._left, y, self._right, y, f"line {layer.look}")
        elif layer.shape in (Shape.LINE, Shape.STEPS):
            yield from self._joined(layer)
        else:
            draw = _arm if layer.shape is Shape.ARM else _dot
            points = layer.known if layer.told else [(x, y) for x, y in layer.thinned() if y is not None]
            told = layer.told or [""] * len(points)
            yield from (_titled(draw(layer, self._x(x), self._y(y)), t) for (x, y), t in zip(points, told, strict=True))

    def _joined(self, layer: Layer) -> Iterator[Markup]:
        """Yield a line, with ``STEPS`` also its isolated points, with ``LINE`` also a mark at its end."""
        path, alone, before = [], [], None
        points = list(layer.thinned())
        for number, (x, y) in enumerate(points):
            if y is not None:
                across, up = f"{self._x(x):.1f}", f"{self._y(y):.1f}"
                joint = f"L{across} {up}" if layer.shape is Shape.LINE else f"H{across}V{up}"
                path.append(f"M{across} {up}" if before is None else joint)
                if before is None and (number + 1 == len(points) or points[number + 1][1] is None):
                    alone.append(_dot(layer, self._x(x), self._y(y)))
            before = y
        if not path:
            return
        drawn = element("path", d="".join(path), class_=f"line {layer.look}")
        if layer.shape is Shape.STEPS:
            yield from (drawn, *alone)
        elif layer.known:
            yield _titled(drawn, layer.name)
            x, y = layer.known[-1]
            yield _titled(_arm(layer, self._x(x), self._y(y)), layer.told[-1] if layer.told else "")

    def _spreads(self, layer: Layer) -> Iterator[Markup]:
        for (low, high), (x, y) in zip(layer.spread, layer.known, strict=bool(layer.spread)):
            if layer.spread_axis == "y":
                yield from [_line(self._x(x), self._y(low), self._x(x), self._y(high), "spread")] if low != high else []
                continue
            yield from [_line(self._x(low), self._y(y), self._x(high), self._y(y), "spread")] if low != high else []
            # An interval that extends beyond the axis ends in an arrow.
            if low < self._plot.x.low:
                yield _path(self._x(low), self._y(y), "l7-4.5v9z", f"mark {layer.look}")
            if high > self._plot.x.high:
                yield _path(self._x(high), self._y(y), "l-7-4.5v9z", f"mark {layer.look}")

    def _labels(self) -> Iterator[Markup]:
        """Yield the labels of points that fit without an overlap; the key lists all of them."""
        taken = list(self._taken())
        for layer in self._plot.layers:
            if not layer.label:
                continue
            wide, (x, y) = text_width(layer.label), (self._x(layer.known[0][0]), self._y(layer.known[0][1]))
            beside = [(left, y - _LINE / 2) for left in (x + 12, x - 12 - wide)]
            corners = [(left, above) for left in (x - wide / 2, x + 8, x - 8 - wide) for above in (y - 24, y + 10)]
            for left, above in (*beside, *corners):
                box = (left - 3, above, wide + 6, float(_LINE))
                inside = left >= self._left + 2 and left + wide <= self._width and above >= 0
                if inside and above + _LINE <= self._bottom and not any(_overlap(box, other) for other in taken):
                    taken.append(box)
                    yield text(layer.label, left, above + 11, class_="name")
                    break

    def _taken(self) -> Iterator[Box]:
        """Yield the boxes that labels must not overlap: arms with their spreads, stars and upright lines."""
        for layer in self._plot.layers:
            if layer.shape is Shape.UPRIGHT:
                yield self._x(layer.points[0][0]) - 2, 0.0, 4.0, float(self._plot.height)
            if layer.shape is Shape.ARM or layer.look == "star":
                yield from ((self._x(x) - 9, self._y(y) - 9, 18.0, 18.0) for x, y in layer.known)
            for (low, high), (x, _) in zip(layer.spread, layer.known, strict=bool(layer.spread)):
                yield self._x(x) - 2, self._y(high), 4.0, self._y(low) - self._y(high)

    def _marks(self) -> Iterator[Markup]:
        # One mark of each kind per 3 pixels: closer marks could not be distinguished.
        seen: dict[tuple[str, int], Mark] = {}
        for mark in self._plot.marks:
            seen.setdefault((mark.kind, int(self._x(mark.x) / 3)), mark)
        lane = self._bottom - _LANE / 2
        for mark in seen.values():
            x = self._x(mark.x)
            trip = _line(x, _TOP, x, self._bottom, "trip")
            yield _titled(trip if mark.kind == "trip" else _path(x, lane, _MARKS[mark.kind], mark.kind), mark.text)


def text_width(shown: str) -> float:
    """Return the approximate width of a text in pixels."""
    return _LETTER * len(shown)


def text(shown: str, x: float, y: float, **attributes: object) -> Markup:
    """Return a text at a position."""
    return element("text", shown, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)


def labels_below(labels: Iterable[tuple[float, str]], y: float, width: float) -> Iterator[Markup]:
    """Yield the labels of a horizontal axis that fit next to each other.

    Args:
        labels: x of the middle and text of each label, from left to right.
        y: baseline of the labels.
        width: width of the figure.
    """
    free = -6.0
    for x, label in labels:
        half = text_width(label) / 2
        middle = min(x, width - half)
        if middle - half >= free + 6:
            at_end = middle < x
            yield text(label, width if at_end else x, y, text_anchor="end" if at_end else "middle")
            free = middle + half


def _overlap(one: Box, other: Box) -> bool:
    apart = one[0] + one[2] <= other[0] or other[0] + other[2] <= one[0]
    return not (apart or one[1] + one[3] <= other[1] or other[1] + other[3] <= one[1])


def _titled(drawn: Markup, told: str) -> Markup:
    """Return a drawing with a tooltip."""
    return element("g", element("title", told), drawn) if told else drawn


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    return element("line", **ends, class_=style)


def _path(x: float, y: float, shape: str, style: str) -> Markup:
    return element("path", d=f"M{x:.1f} {y:.1f}{shape}", class_=style)


def _arm(layer: Layer, x: float, y: float) -> Markup:
    return _path(x, y, _ARMS[layer.number % len(_ARMS)], f"mark {layer.look}")


def _dot(layer: Layer, x: float, y: float) -> Markup:
    if layer.look == "star":
        return _path(x, y, _STAR, "star")
    return element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, class_=f"dot {layer.look}")

"""Draw measured points between two axes, with what was predicted beside them: a trade and its limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.report.html import Html, element, join
from autotune.report.svg import BOTTOM, RIGHT, TOP, Figure, Frame, Key, marker, text_width

# Left, upper edge, width and height.
Box = tuple[float, float, float, float]
_HEIGHT = 380
_TEXT = 14
_STAR = "m0-8l2.1 5.3l5.7.4l-4.4 3.6l1.4 5.5l-4.8-3.1l-4.8 3.1l1.4-5.5l-4.4-3.6l5.7-.4z"
_PAD = 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A measured point.

    Attributes:
        number: of its arm, which gives its shape and colour.
        name: the label beside it.
        x: its x.
        y: its y.
        spread: lowest and highest y of what it is the mean of; the same number twice for a single one.
        told: what it stands for, in a sentence.
    """

    number: int
    name: str
    x: float
    y: float
    spread: tuple[float, float]
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trade:
    """What a picture of two costs shows.

    Attributes:
        dots: measured points with names.
        faint: measured points without.
        front: predicted: the smallest y of every x, by x.
        best: the predicted optimum; ``None`` without one.
        limit: the largest x allowed and its name; ``None`` for none.
        x_name: what the horizontal axis shows.
        y_name: what the other one shows.
    """

    dots: Sequence[Dot]
    x_name: str
    y_name: str
    faint: Sequence[tuple[float, float]] = ()
    front: Sequence[tuple[float, float]] = ()
    best: tuple[float, float] | None = None
    limit: tuple[float, str] | None = None

    def points(self) -> list[tuple[float, float]]:
        """Return every point that must lie in the picture."""
        ends = [(dot.x, y) for dot in self.dots for y in (dot.y, *dot.spread)]
        return [*ends, *self.faint, *self.front, *([] if self.best is None else [self.best])]


def scatter(title: str, described: str, trade: Trade) -> Figure:
    """Return a figure of a trade.

    Args:
        title: what it shows.
        described: the same in a sentence or two, for who cannot see it.
        trade: what is drawn; at least one point.
    """
    xs = [x for x, _ in trade.points()] + ([] if trade.limit is None else [trade.limit[0]])
    x_range, y_range = _around(xs), _around([y for _, y in trade.points()])

    def draw(width: int) -> tuple[Html, int]:
        frame = Frame(width=width, height=_HEIGHT, x_range=x_range, y_range=y_range)
        layers = [*frame.axes(trade.x_name, trade.y_name), *_behind(frame, trade)]
        layers += [*_predicted(frame, trade), *_measured(frame, trade)]
        return join(layers), _HEIGHT

    return Figure(title=title, described=described, key=_key(trade), draw=draw)


def _key(trade: Trade) -> list[Key]:
    key = [Key(sample=marker(dot.number, 13, 6), name=dot.name) for dot in trade.dots]
    if trade.faint:
        key.append(Key(sample=element("circle", cx=13, cy=6, r=3, class_="trial"), name="measured while tuning"))
    if trade.front:
        key.append(
            Key(sample=element("path", d="M0 6H26", class_="line front"), name="predicted: best of every budget")
        )
    if trade.best is not None:
        star = element("path", d=f"M13 6.5{_STAR}", class_="star")
        key.append(Key(sample=star, name="predicted: exact optimum within the budget"))
    if trade.limit is not None:
        key.append(Key(sample=element("path", d="M0 6H26", class_="line limit"), name=trade.limit[1]))
    return key


def _around(values: Sequence[float]) -> tuple[float, float]:
    """Return a range with room around the values, never below 0."""
    low, high = min(values), max(values)
    room = (high - low or high or 1.0) * _PAD
    return max(low - room, 0.0), high + room


def _predicted(frame: Frame, trade: Trade) -> Iterator[Html]:
    if trade.limit is not None:
        across = f"{frame.x(trade.limit[0]):.1f}"
        yield element("line", x1=across, x2=across, y1=TOP, y2=frame.height - BOTTOM, class_="line limit")
    if trade.front:
        (x, y), *others = trade.front
        path = [f"M{frame.x(x):.1f} {TOP}V{frame.y(y):.1f}"]
        path += [f"H{frame.x(x):.1f}V{frame.y(y):.1f}" for x, y in others]
        yield element("path", d=f"{''.join(path)}H{frame.width - RIGHT}", class_="line front")
    if trade.best is not None:
        x, y = trade.best
        yield element("path", d=f"M{frame.x(x):.1f} {frame.y(y):.1f}{_STAR}", class_="star")


def _behind(frame: Frame, trade: Trade) -> Iterator[Html]:
    for x, y in trade.faint:
        yield element("circle", cx=f"{frame.x(x):.1f}", cy=f"{frame.y(y):.1f}", r=3, class_="trial")
    for dot in trade.dots:
        across, (low, high) = f"{frame.x(dot.x):.1f}", dot.spread
        if low != high:
            ends = {"y1": f"{frame.y(low):.1f}", "y2": f"{frame.y(high):.1f}"}
            yield element("line", x1=across, x2=across, **ends, class_="spread")


def _measured(frame: Frame, trade: Trade) -> Iterator[Html]:
    for dot in trade.dots:
        yield marker(dot.number, frame.x(dot.x), frame.y(dot.y), dot.told)
    taken = list(_taken(frame, trade))
    for dot in trade.dots:
        yield from _label(frame, dot, taken)


def _taken(frame: Frame, trade: Trade) -> Iterator[Box]:
    """Yield where no name may stand: marks, the optimum, bars and the limit."""
    for dot in trade.dots:
        x, (low, high) = frame.x(dot.x), dot.spread
        yield x - 8, frame.y(dot.y) - 8, 16.0, 16.0
        yield x - 2, frame.y(high), 4.0, frame.y(low) - frame.y(high)
    if trade.best is not None:
        yield frame.x(trade.best[0]) - 9, frame.y(trade.best[1]) - 9, 18.0, 18.0
    if trade.limit is not None:
        yield frame.x(trade.limit[0]) - 2, 0.0, 4.0, float(frame.height)


def _label(frame: Frame, dot: Dot, taken: list[Box]) -> Iterator[Html]:
    """Yield a dot's name where it lies on nothing else; nothing where there is no such place: the key has it too."""
    wide, x, y = text_width(dot.name), frame.x(dot.x), frame.y(dot.y)
    for left, above in (
        (x + 12, y - _TEXT / 2),
        (x - 12 - wide, y - _TEXT / 2),
        (x - wide / 2, y - 10 - _TEXT),
        (x - wide / 2, y + 10),
        (x + 8, y - 10 - _TEXT),
        (x + 8, y + 10),
        (x - 8 - wide, y - 10 - _TEXT),
        (x - 8 - wide, y + 10),
    ):
        box = (left - 3, above, wide + 6, float(_TEXT))
        inside = left >= 54 and left + wide <= frame.width and above >= 0 and above + _TEXT <= frame.height - BOTTOM
        if inside and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            yield element("text", dot.name, x=f"{left:.1f}", y=f"{above + 11:.1f}", class_="name")
            return


def _overlap(one: Box, other: Box) -> bool:
    apart = one[0] + one[2] <= other[0] or other[0] + other[2] <= one[0]
    return not (apart or one[1] + one[3] <= other[1] or other[1] + other[3] <= one[1])

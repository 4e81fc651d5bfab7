"""Draw ratios with their intervals, a row per arm, on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autotune.report.html import Html, element, join
from autotune.report.svg import RIGHT, Figure, Key, arm_style, marker, text_width

_ROW = 30
_WIDEST = 6.0
_MARKS = (1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One arm's ratio.

    Attributes:
        number: of the arm, which gives its shape and colour.
        name: of the arm.
        middle: the ratio; ``None`` where there is none.
        low: the interval's lower end.
        high: its upper end.
        reason: why there is none.
    """

    number: int
    name: str
    middle: float | None = None
    low: float = 1.0
    high: float = 1.0
    reason: str = ""

    @property
    def told(self) -> str:
        """Return it in words."""
        if self.middle is None:
            return f"{self.name}: {self.reason}"
        return f"{self.name} {self.middle:.2f}x ({self.low:.2f} to {self.high:.2f})"


def forest(title: str, described: str, rows: Sequence[Interval]) -> Figure:
    """Return a figure of ratios; intervals that reach beyond it end in an arrow.

    Args:
        title: what it shows.
        described: the same in a sentence or two, for who cannot see it.
        rows: what is drawn.
    """
    ends = [abs(math.log(end)) for row in rows if row.middle for end in (row.low, row.middle, row.high)]
    reach = min(max([*ends, math.log(1.25)]) * 1.05, math.log(_WIDEST))
    height = _ROW * len(rows) + 48

    def draw(width: int) -> tuple[Html, int]:
        side = min(max((text_width(row.name) for row in rows), default=0) + 12, width / 3)
        return join(_drawn(rows, width, side, reach)), height

    return Figure(title=title, described=described, key=_key(), draw=draw)


def _key() -> list[Key]:
    bar = element("line", x1=0, x2=26, y1=6, y2=6, class_="spread")
    return [
        Key(sample=bar, name="95 % interval"),
        Key(sample=element("path", d="M0 6H26", class_="line limit"), name="baseline"),
    ]


def _drawn(rows: Sequence[Interval], width: int, side: float, reach: float) -> Iterator[Html]:
    bottom = _ROW * len(rows) + 6

    def x(ratio: float) -> float:
        share = (math.log(ratio) + reach) / (2 * reach)
        return side + min(max(share, 0.0), 1.0) * (width - side - RIGHT)

    last = -math.inf
    for value in (value for value in _MARKS if abs(math.log(value)) <= reach):
        yield element("line", x1=f"{x(value):.1f}", x2=f"{x(value):.1f}", y1=4, y2=bottom, class_="grid")
        text = f"{value:.2g}x"
        if x(value) - text_width(text) / 2 > last + 6 and x(value) + text_width(text) / 2 <= width:
            yield element("text", text, x=f"{x(value):.1f}", y=bottom + 16, text_anchor="middle")
            last = x(value) + text_width(text) / 2
    yield element("line", x1=f"{x(1):.1f}", x2=f"{x(1):.1f}", y1=4, y2=bottom, class_="line limit")
    middle = (side + width - RIGHT) / 2
    yield element(
        "text", "as fast as the baseline", x=f"{middle:.1f}", y=bottom + 34, text_anchor="middle", class_="name"
    )
    for number, row in enumerate(rows):
        yield from _row(row, 4 + (number + 0.5) * _ROW, side, x, math.exp(reach))


def _row(row: Interval, y: float, side: float, x: Callable[[float], float], reach: float) -> Iterator[Html]:
    room = max(int(side / 6.7) - 1, 4)
    name = row.name if len(row.name) <= room else f"{row.name[: room - 1]}…"
    yield element(
        "text", name, x=f"{side - 8:.1f}", y=f"{y:.1f}", text_anchor="end", dominant_baseline="middle", class_="name"
    )
    if row.middle is None:
        yield element("text", "no ratio", x=f"{side + 8:.1f}", y=f"{y:.1f}", dominant_baseline="middle")
        return
    low, high = x(row.low), x(row.high)
    yield element("line", x1=f"{low:.1f}", x2=f"{high:.1f}", y1=f"{y:.1f}", y2=f"{y:.1f}", class_="spread")
    if row.low < 1 / reach:
        yield element("path", d=f"M{low:.1f} {y:.1f}l7-4.5v9z", class_=f"arm {arm_style(row.number)}")
    if row.high > reach:
        yield element("path", d=f"M{high:.1f} {y:.1f}l-7-4.5v9z", class_=f"arm {arm_style(row.number)}")
    yield marker(row.number, x(row.middle), y, row.told)

"""The canvas of figures: a frame with axes, a key, and two widths of which a page shows one.

Colours are classes of the page's style, so that a figure is light or dark with it. On its own, in a file, a figure has
the light colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autotune.report.html import Html, element
from autotune.report.style import FIGURE_STYLE

WIDTHS = {"wide": 720, "narrow": 360}
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 44
# Widths of a letter, for what must not lie on other text.
_LETTER = 6.7
_SAMPLE = 26
# What the vertical axis' name takes, and what lies between a value and its line.
_NAME, _GAP = 18, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One line of a figure's key: a sample, drawn in 26 x 12, and its name."""

    sample: Html
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure.

    Attributes:
        title: what it shows.
        described: the same in a sentence or two, for who cannot see it.
        key: what its colours and shapes mean.
        draw: draws it in a width of ``WIDTHS``; returns what is drawn and its height.
    """

    title: str
    described: str
    key: Sequence[Key]
    draw: Callable[[int], tuple[Html, int]]

    @property
    def name(self) -> str:
        """Return the name of the figure's file, without an ending; of a long title, what every disk takes."""
        words = "".join(c if c.isalnum() else " " for c in self.title.lower()).split()
        return "-".join(words)[:60].rstrip("-")

    @property
    def html(self) -> Html:
        """Return the figure as it stands in a page, in both widths."""
        drawn = [self._svg(width, class_=name) for name, width in WIDTHS.items()]
        key = [
            element("li", element("svg", one.sample, viewBox="0 0 26 12", aria_hidden="true"), one.name)
            for one in self.key
        ]
        caption = element("figcaption", self.described)
        return element("figure", element("h3", self.title), element("ul", *key, class_="key"), *drawn, caption)

    @property
    def file(self) -> str:
        """Return the figure as an SVG file of its own, light, with its key above it."""
        width = WIDTHS["wide"]
        content, height = self.draw(width)
        key, below = _key_above(self.key, width)
        moved = element("g", content, transform=f"translate(0 {below})")
        style = element("style", FIGURE_STYLE)
        named = (element("title", self.title), element("desc", self.described), style)
        drawn = element(
            "svg",
            *named,
            element("rect", width=width, height=height + below, fill="#ffffff"),
            *key,
            moved,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width} {height + below}",
            width=width,
            height=height + below,
        )
        return f"{drawn}\n"

    def _svg(self, width: int, **attributes: object) -> Html:
        content, height = self.draw(width)
        return element(
            "svg",
            element("title", self.title),
            element("desc", self.described),
            content,
            viewBox=f"0 0 {width} {height}",
            role="img",
            aria_label=f"{self.title}: {self.described}",
            **attributes,
        )


def _key_above(key: Sequence[Key], width: int) -> tuple[list[Html], int]:
    """Return a key's lines side by side, and the height that they take."""
    parts, x, y = [], 8.0, 6
    for one in key:
        wide = _SAMPLE + 6 + text_width(one.name) + 18
        if x > 8 and x + wide > width:
            x, y = 8.0, y + 18
        sample = element("g", one.sample, transform=f"translate({x:.1f} {y})")
        name = element("text", one.name, x=f"{x + _SAMPLE + 6:.1f}", y=y + 10, class_="name")
        parts += [sample, name]
        x += wide
    return parts, y + 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where values lie in a figure.

    Attributes:
        width: of the figure.
        height: of the figure.
        x_range: lowest and highest x.
        y_range: the same of y.
        lane: height of a lane above the horizontal axis that values keep out of.
    """

    width: int
    height: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    lane: int = 0

    @property
    def left(self) -> float:
        """Return where the vertical axis lies: as far right as its values are wide."""
        return max(LEFT, _NAME + _GAP + max(text_width(_told(value)) for value in [*self._levels(), 0.0]))

    def x(self, value: float) -> float:
        """Return where a value lies from the left."""
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.width - self.left - RIGHT)

    def y(self, value: float) -> float:
        """Return where a value lies from above."""
        low, high = self.y_range
        bottom = self.height - BOTTOM - self.lane
        return bottom - (value - low) / (high - low) * (bottom - TOP)

    def axes(self, x_name: str, y_name: str, *, whole: bool = False) -> Iterator[Html]:
        """Yield the axes with their values and names.

        Args:
            x_name: what the horizontal one shows.
            y_name: what the other one shows.
            whole: whether the horizontal one has whole numbers alone.
        """
        bottom, left, right = self.height - BOTTOM, self.left, self.width - RIGHT
        for value in self._levels():
            y = f"{self.y(value):.1f}"
            yield element("line", x1=left, x2=right, y1=y, y2=y, class_="grid")
            yield element("text", _told(value), x=left - _GAP, y=y, text_anchor="end", dominant_baseline="middle")
        yield element("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis")
        for value in ticks(*self.x_range, self.width // 90):
            if not whole or value == int(value):
                x = self.x(value)
                anchor = "end" if x + text_width(_told(value)) / 2 > self.width else "middle"
                yield element("text", _told(value), x=f"{x:.1f}", y=bottom + 16, text_anchor=anchor)
        yield element("text", x_name, x=(right + left) / 2, y=self.height - 6, text_anchor="middle", class_="name")
        middle = (TOP + bottom - self.lane) / 2
        turned = f"rotate(-90 12 {middle})"
        yield element("text", y_name, x=12, y=middle, text_anchor="middle", transform=turned, class_="name")

    def _levels(self) -> list[float]:
        return ticks(*self.y_range, max(self.height // 50, 3))


def text_width(text: str) -> float:
    """Return about how wide a text is."""
    return _LETTER * len(text)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return round values between two, about so many."""
    raw = (high - low) / max(count, 1)
    scale = 10 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw * 0.999)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step * (1 + 1e-9)) + 1)]


def _told(value: float) -> str:
    return f"{value:,.6g}"


def marker(number: int, x: float, y: float, told: str = "") -> Html:
    """Return the mark of the arm of a number, told from the others by its shape and its colour.

    Args:
        number: from 0; the baseline's.
        x: its middle, from the left.
        y: its middle, from above.
        told: what it stands for, shown where a pointer rests on it.
    """
    shape = _SHAPES[number % len(_SHAPES)]
    path = element("path", d=f"M{x:.1f} {y:.1f}{shape}", class_=f"arm {arm_style(number)}")
    return element("g", element("title", told), path) if told else path


def arm_style(number: int) -> str:
    """Return the class that has the colour of the arm of a number."""
    return f"a{number % _COLOURS}"


_COLOURS = 8
# A circle, a square, a diamond, two triangles, a cross and an hourglass, about 10 wide, from their middle.
_SHAPES = (
    "m-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z",
    "m-4.5-4.5h9v9h-9z",
    "m0-6.2l6.2 6.2l-6.2 6.2l-6.2-6.2z",
    "m0-6l5.8 10.2h-11.6z",
    "m0 6l5.8-10.2h-11.6z",
    "m-1.8-5.5h3.6v3.7h3.7v3.6h-3.7v3.7h-3.6v-3.7h-3.7v-3.6h3.7z",
    "m-5-5.5h10l-10 11h10z",
)

"""Draw how the units of a plan were stored over a run: a row per unit, the run from left to right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.report.html import Html, element, join
from autotune.report.svg import RIGHT, Figure, Key, ticks

_COLUMNS = 240
_ROWS = 60


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


def strip(title: str, described: str, course: Course) -> Figure:
    """Return a figure with a row per unit and the run from left to right; many units share rows."""
    each = max(-(-len(course.units) // _ROWS), 1)
    rows = [course.units[start : start + each] for start in range(0, len(course.units), each)]
    tall = 16 if len(rows) <= 24 else 8
    columns = max(min(_COLUMNS, course.end), 1)
    sampled = [course.at((number + 0.5) * course.end / columns) for number in range(columns)]
    height = tall * len(rows) + 40

    def draw(width: int) -> tuple[Html, int]:
        return _strip_rows(course, rows, sampled, width, tall), height

    names = {"kept": "kept for backward", "again": "recomputed", "fixed": "no choice"}
    used = [name for name in names if name != "fixed" or course.fixed]
    key = [Key(sample=element("rect", width=26, height=12, class_=name), name=names[name]) for name in used]
    return Figure(title=title, described=described, key=key, draw=draw)


def _strip_rows(
    course: Course, rows: Sequence[Sequence[str]], sampled: Sequence[frozenset[str]], width: int, tall: int
) -> Html:
    left = 96 if width < 500 else 150
    wide = (width - left - RIGHT) / len(sampled)
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
    middle = (width + left - RIGHT) / 2
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

"""Draw how the units of a plan were stored over a run: a row per unit, the run from left to right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.report.html import Html, element, join
from autotune.report.svg import RIGHT, Figure, Key, text_width, ticks

_COLUMNS = 240
_ROWS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How the units of a plan were stored over a run.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What a plan chose for one unit.

    Attributes:
        unit: its name.
        precision: its precision.
        storage: ``kept``, ``again`` or ``fixed``.
    """

    unit: str
    precision: str
    storage: str


def plan_strip(title: str, described: str, cells: Sequence[Cell]) -> Figure:
    """Return a figure with the units from left to right: how each is stored, and below it how it computes."""
    storages = [name for name in _STORAGES if any(cell.storage == name for cell in cells)]
    precisions = dict.fromkeys(cell.precision for cell in cells)

    def draw(width: int) -> tuple[Html, int]:
        wide = (width - _SIDE) / max(len(cells), 1)
        gap = 1.0 if wide > 4 else 0.0
        parts = [
            element("text", "storage", x=0, y=18, class_="name"),
            element("text", "precision", x=0, y=42, class_="name"),
        ]
        for number, cell in enumerate(cells):
            place = {"x": f"{_SIDE + number * wide:.1f}", "width": f"{max(wide - gap, 0.5):.1f}", "height": 20}
            told = element("title", f"{cell.unit}: {cell.precision}, {_STORAGES[cell.storage]}")
            drawn = [
                element("rect", **place, y=4, class_=cell.storage),
                element("rect", **place, y=28, class_=f"of-{cell.precision}"),
            ]
            parts.append(element("g", told, *drawn))
        return join([*parts, *_unit_names(cells, wide)]), 68

    key = [_patch(name, _STORAGES[name]) for name in storages]
    key += [_patch(f"of-{name}", name) for name in precisions]
    return Figure(title=title, described=described, key=key, draw=draw)


_STORAGES = {"kept": "kept for backward", "again": "recomputed", "fixed": "no choice of storage"}
_SIDE = 64


def _patch(style: str, name: str) -> Key:
    return Key(sample=element("rect", width=26, height=12, class_=style), name=name)


def _unit_names(cells: Sequence[Cell], wide: float) -> Iterator[Html]:
    """Yield the names of as many units as have room for theirs."""
    free = 0.0
    for number, cell in enumerate(cells):
        middle = _SIDE + (number + 0.5) * wide
        half = text_width(cell.unit) / 2
        last = number == len(cells) - 1
        if middle - half >= free and (last or middle + half <= _SIDE + len(cells) * wide):
            yield element(
                "text", cell.unit, x=f"{middle:.1f}", y=62, text_anchor="end" if last and half > wide / 2 else "middle"
            )
            free = middle + half + 8

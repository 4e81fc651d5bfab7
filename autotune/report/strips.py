"""Figures of the choices for each unit: over the steps of a run, or in one plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from autotune.choices import STORAGES
from autotune.plan import Plan, Storage
from autotune.report.plot import ticks
from autotune.report.rendering import element, join
from autotune.report.svg import RIGHT, Figure, Key, labels_below, text

# The looks of cells. If half of some units are recomputed, they look recomputed.
_LOOKS = ("again", "other", "kept")
_KEPT, _FIXED = ("kept", "kept for backward"), ("fixed", "no choice of storage")
_COLUMNS = 240
_ROWS = 60
_SIDE = 64


def storage_look(plan: Plan, unit: str) -> str:
    """Return the look of a unit under a plan: ``kept``, ``again`` (recomputed), ``other`` or ``fixed``."""
    return _shown(plan, unit)[0]


def _shown(plan: Plan, unit: str) -> tuple[str, str]:
    """Return the look and the description of a unit."""
    return _of(plan.storage_of(unit)) if unit in plan.storage else _FIXED


def _of(storage: Storage) -> tuple[str, str]:
    """Return the look and the description of a storage."""
    return _KEPT if storage is Storage.SAVE else ("again" if storage.recomputes else "other", storage.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The storage of units over a run.

    Attributes:
        units: names of the units.
        fixed: units whose storage cannot be chosen.
        plans: steps, ascending, with the plan from that step on.
        end: last step of the run.
    """

    units: Sequence[str]
    fixed: frozenset[str]
    plans: Sequence[tuple[int, Plan]]
    end: int

    def looks(self, names: Sequence[str], steps: Sequence[float]) -> list[str]:
        """Return for each step the look that most of the named units have."""
        chosen = [name for name in names if name not in self.fixed]
        if not chosen:
            return ["fixed"] * len(steps)
        found = []
        for step in steps:
            plan = next((plan for begins, plan in reversed(self.plans) if begins <= step), Plan())
            looks = [_of(plan.storage_of(name))[0] for name in chosen]
            found.append(max(_LOOKS, key=looks.count))
        return found


def course_strip(title: str, described: str, course: Course) -> Figure:
    """Return a figure with a row per unit and the run from left to right; in large models, units share rows.

    Args:
        title: title of the figure.
        described: description in one or two sentences.
        course: the storage to draw.
    """
    each = max(-(-len(course.units) // _ROWS), 1)
    names = [course.units[start : start + each] for start in range(0, len(course.units), each)]
    columns = max(min(_COLUMNS, course.end), 1)
    steps = [(number + 0.5) * course.end / columns for number in range(columns)]
    rows = [(some[0], list(_runs(course.looks(some, steps)))) for some in names]
    tall = 16 if len(rows) <= 24 else 8

    def draw(width: int) -> tuple[Markup, int]:
        left = 96 if width < 500 else 150
        wide = (width - left - RIGHT) / columns
        parts = []
        for number, (name, runs) in enumerate(rows):
            if tall > 10 or number % 4 == 0:
                parts.append(_row_name(name, left, (number + 0.5) * tall))
            parts += [_cell(left + a * wide, number * tall + 1, (b - a) * wide, tall - 2, kind) for a, b, kind in runs]
        below = len(rows) * tall + 16
        values = ticks(0, course.end, width // 120)
        scale = wide * columns / max(course.end, 1)
        parts += labels_below([(left + value * scale, f"{value:,.0f}") for value in values], below, width)
        middle = (width + left - RIGHT) / 2
        parts.append(text("step", middle, below + 18, text_anchor="middle", class_="name"))
        return join(parts), len(rows) * tall + 40

    used = {storage for _, plan in course.plans for storage in plan.by_storage}
    shown = [_of(storage) for storage in STORAGES if storage in used or storage.recomputes]
    key = _key([_KEPT, *shown, *([_FIXED] if course.fixed else [])])
    return Figure(title=title, described=described, key=key, draw=draw)


def plan_strip(title: str, plan: Plan) -> Figure:
    """Return a figure with the units of a plan from left to right: the storage of each, and its precision below.

    Args:
        title: title of the figure.
        plan: the plan.
    """
    units = list(dict.fromkeys([*plan.precision, *plan.storage]))
    shown = [_shown(plan, unit) for unit in units]
    precisions = [str(plan.precision_of(unit)) for unit in units]
    described = (
        f"{len(units)} units in the order of the forward pass; {plan.told_storage}; k = {plan.accumulation_steps}."
    )

    def draw(width: int) -> tuple[Markup, int]:
        wide = (width - _SIDE) / max(len(units), 1)
        drawn = max(wide - (1.0 if wide > 4 else 0.0), 0.5)
        parts = [text("storage", 0, 18, class_="name"), text("precision", 0, 42, class_="name")]
        for number, (unit, (look, told), precision) in enumerate(zip(units, shown, precisions, strict=True)):
            x = _SIDE + number * wide
            tip = element("title", f"{unit}: {precision}, {told}")
            parts.append(element("g", tip, _cell(x, 4, drawn, 20, look), _cell(x, 28, drawn, 20, f"of-{precision}")))
        middles = ((_SIDE + (number + 0.5) * wide, unit) for number, unit in enumerate(units))
        return join([*parts, *labels_below(middles, 62, width)]), 68

    known = [*map(_of, STORAGES), _FIXED]
    key = _key([*sorted(set(shown), key=known.index), *((f"of-{name}", name) for name in precisions)])
    return Figure(title=title, described=described, key=key, draw=draw)


def _key(pairs: Sequence[tuple[str, str]]) -> list[Key]:
    """Return a key with each look and its name once."""
    return [Key(sample=_cell(0, 0, 26, 12, look), name=name) for look, name in dict.fromkeys(pairs)]


def _cell(x: float, y: float, width: float, height: float, style: str) -> Markup:
    return element("rect", x=f"{x:.1f}", y=y, width=f"{width:.1f}", height=height, class_=style)


def _row_name(name: str, left: int, y: float) -> Markup:
    room = left // 7
    short = name if len(name) <= room else "…" + name[-room + 1 :]
    return text(short, left - 6, y, text_anchor="end", dominant_baseline="middle", class_="name")


def _runs(kinds: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yield the beginning, the end (excluded) and the kind of each run of equal kinds."""
    first = 0
    for number in range(1, len(kinds) + 1):
        if number == len(kinds) or kinds[number] != kinds[first]:
            yield first, number, kinds[first]
            first = number

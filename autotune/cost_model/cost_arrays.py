"""The memory model and the time model on arrays, for many plans of many jobs at once.

Predictions equal those of :mod:`autotune.cost_model.memory_model` and :mod:`autotune.cost_model.time_model`, and a
thousand plans take about as long as one. Jobs are padded to the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.choices import DEFAULT_STORAGES, STORAGES
from autotune.cost_model.memory_model import levels
from autotune.cost_model.profile import FIXED, Profile, Segment, StepTable, choice_name
from autotune.errors import InputError, ProfileError
from autotune.plan import Plan, Storage

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
# Lower than every level, so that padded segments never determine the peak.
_NEVER = -1e18


@dataclass(frozen=True, slots=True)
class Numbering:
    """How the choices of a unit are numbered: by precision, and within a precision by storage.

    Attributes:
        storages: the storages that some of the jobs have, from the fastest to the leanest; ``save`` (the first) and
            ``recompute`` in any case.
    """

    storages: tuple[Storage, ...]

    def number(self, precision: int, storage: Storage) -> int:
        """Return the number of a choice, given the precision's index among those of the job."""
        return len(self.storages) * precision + self.storages.index(storage)

    def precision(self, choices: Indices) -> Indices:
        """Return the index of each choice's precision among those of the job."""
        return choices // len(self.storages)

    def storage(self, choices: Indices) -> Indices:
        """Return the index of each choice's storage among :attr:`storages`."""
        return choices % len(self.storages)

    def recomputes(self, choices: Indices) -> NDArray[np.bool_]:
        """Return whether each choice recomputes."""
        return np.array([storage.recomputes for storage in self.storages])[self.storage(choices)]


@dataclass(frozen=True, slots=True)
class Plans:
    """One plan for each of n lanes.

    Attributes:
        job: shape (n,), number of the job.
        k: shape (n,), index of k among the job's accumulation choices.
        choices: shape (n, max_units), number of each unit's choice; see :class:`Numbering`.
    """

    job: Indices
    k: Indices
    choices: Indices


@dataclass(frozen=True, slots=True)
class _Needs:
    """What the peaks of n plans consist of, at the profiled length; segments have shape (n, segments).

    Attributes:
        saved: bytes that each segment saves.
        forward: bytes of boundaries before each segment's forward pass, and its own growing and constant bytes.
        backward: the same for its backward pass.
        update_peak: shape (n,), peak of the update.
        static: shape (n,), bytes that are always there.
    """

    saved: Floats
    forward: tuple[Floats, Floats, Floats]
    backward: tuple[Floats, Floats, Floats]
    update_peak: Floats
    static: Floats


def _highest(needs: _Needs, factor: Floats | float) -> Floats:
    """Return the peaks, shape (n,), at a factor on all activations, a number or one per lane, shape (n, 1)."""
    saved = needs.saved * factor
    # Level before each segment: bytes saved by earlier ones, and boundaries allocated before it.
    earlier = np.cumsum(saved, axis=1) - saved
    peak = needs.update_peak
    for boundaries, growing, constant in (needs.forward, needs.backward):
        level = earlier + boundaries * factor + growing * factor + constant
        peak = np.maximum(peak, level.max(axis=1))
    return np.asarray(peak + needs.static)


class CostArrays:
    """The profiles of many jobs as arrays.

    Attributes:
        profiles: the profiles of the jobs.
        max_units: largest number of units of a job.
        max_k: largest number of accumulation choices of a job.
        variants: number of cost sets of a job: one per k for mixed precisions and, if a profile has them, one per k and
            16-bit precision for plans that use it everywhere. The index of a set is regime x max_k + k.
        numbering: how the choices of a unit are numbered.
        max_precisions: largest number of precisions of a job.
        max_choices: choices per unit: the largest number of precisions times the number of storages.
        num_units: shape (jobs,), number of units.
        num_k: shape (jobs,), number of accumulation choices.
        num_precisions: shape (jobs,), number of precisions.
        recomputable: shape (jobs, max_units), whether a unit can be recomputed.
        accumulation_steps: shape (jobs, max_k), values of k; the last one is repeated.
        unit_seconds: shape (jobs, variants, max_units, max_choices), calibrated seconds; those of saving for a choice
            that a unit lacks.
        between_seconds: shape (jobs, variants), calibrated seconds of the code between units.
        constant_seconds: shape (jobs, variants), seconds that do not depend on the sequence length.
        missing: shape of ``unit_seconds``, whether the choice could not be profiled.
        unit_kept_bytes: shape of ``unit_seconds``, bytes that the unit keeps until backward, boundaries included.

    Raises:
        InputError: if a profile is of a pipeline.
    """

    def __init__(self, profiles: Sequence[Profile], *, max_units: int | None = None) -> None:
        if any(one.pipeline for one in profiles):
            problem = "plans of a pipeline cannot be priced at once"
            raise InputError(problem, where="--engine pipeline", allowed="--method exact")
        self.profiles = tuple(profiles)
        jobs = len(self.profiles)
        self.max_units = max(max(len(p.units) for p in profiles), max_units or 0)
        self.max_k = max(len(p.tables) for p in profiles)
        self.max_precisions = max(len(p.precisions) for p in profiles)
        known = {*DEFAULT_STORAGES, *(storage for profile in self.profiles for storage in profile.space.storages)}
        self.numbering = Numbering(tuple(storage for storage in STORAGES if storage in known))
        self.max_choices = len(self.numbering.storages) * self.max_precisions
        self.regimes = self.max_precisions if any(p.uniform_tables for p in profiles) else 1
        self.variants = self.regimes * self.max_k
        tables = [table for p in profiles for table in (*p.tables, *(t for u in p.uniform_tables.values() for t in u))]
        self._segments = max(len(table.segments) for table in tables)
        self._boundaries = max(1, *(len(table.boundaries) for table in tables))
        keepers = [len(b.keepers) for table in tables for b in table.boundaries]
        self._keepers = max([1, *keepers])
        self.num_units = np.array([len(p.units) for p in profiles])
        self.num_k = np.array([len(p.tables) for p in profiles])
        self.num_precisions = np.array([len(p.precisions) for p in profiles])
        self.recomputable = np.zeros((jobs, self.max_units), dtype=bool)
        self.accumulation_steps = np.ones((jobs, self.max_k), dtype=np.int64)
        self._make()
        for index, profile in enumerate(self.profiles):
            self._load(index, profile)

    def _make(self) -> None:
        shape = (len(self.profiles), self.variants)
        per_choice = (*shape, self._segments, self.max_choices)
        self._saved = np.zeros(per_choice)
        # A pass needs constant + length x activation bytes above what earlier segments keep.
        self._forward, self._backward = np.zeros(per_choice), np.zeros(per_choice)
        self._forward_constant = np.full(per_choice, _NEVER)
        self._backward_constant = np.full(per_choice, _NEVER)
        self._unit_of = np.full((*shape, self._segments), self.max_units, dtype=np.int64)
        per_boundary = (*shape, self._boundaries)
        self._size = np.zeros(per_boundary)
        self._born, self._last = np.zeros(per_boundary, dtype=np.int64), np.zeros(per_boundary, dtype=np.int64)
        self._passes = np.zeros(per_boundary, dtype=bool)
        self._held = np.zeros(per_boundary, dtype=bool)
        self._keeper = np.zeros((self._keepers, *per_boundary), dtype=np.int64)
        self._keeper_bits = np.zeros((self._keepers, *per_boundary), dtype=np.int64)
        self._static = np.zeros(shape)
        self._update_peak = np.zeros(shape)
        self.between_seconds, self.constant_seconds = np.zeros(shape), np.zeros(shape)
        units = (*shape, self.max_units, self.max_choices)
        self.unit_seconds, self.unit_kept_bytes = np.zeros(units), np.zeros(units)
        self.missing = np.zeros(units, dtype=bool)

    def _load(self, job: int, profile: Profile) -> None:
        numbers = {unit.name: number for number, unit in enumerate(profile.units)}
        self.recomputable[job, : len(profile.units)] = [unit.recomputable for unit in profile.units]
        for k in range(self.max_k):
            mixed = profile.tables[min(k, len(profile.tables) - 1)]
            self.accumulation_steps[job, k] = mixed.accumulation_steps
            for regime in range(self.regimes):
                self._load_table((job, regime * self.max_k + k), profile, _table(profile, regime, mixed), numbers)

    def _load_table(self, where: tuple[int, int], profile: Profile, table: StepTable, numbers: dict[str, int]) -> None:
        calibration = profile.calibration
        added = calibration.micro_batch_s * table.accumulation_steps + calibration.constant_s
        self._static[where] = profile.static_bytes + table.batch_bytes
        self._update_peak[where] = table.update_peak_bytes
        self.constant_seconds[where] = calibration.scale * table.update_s + added
        self._load_segments(where, profile, table, numbers)
        self._load_boundaries(where, profile, table, numbers)

    def _load_segments(
        self, where: tuple[int, int], profile: Profile, table: StepTable, numbers: dict[str, int]
    ) -> None:
        gradients = [segment.gradient_bytes for segment in table.segments]
        around = levels(gradients, [0] * len(gradients), (), ())
        later = table.accumulation_steps > 1
        for index, segment in enumerate(table.segments):
            if segment.unit is not None:
                self._unit_of[(*where, index)] = numbers[segment.unit]
            for choice, name in enumerate(self._names(profile, segment)):
                at = (*where, index, choice)
                if name not in segment.costs:
                    # A choice that could not be profiled never fits.
                    self._forward_constant[at] = -_NEVER
                    if segment.unit is not None:
                        self.missing[(*where, numbers[segment.unit], choice)] = True
                    continue
                cost = segment.costs[name]
                self._saved[at] = cost.saved_bytes
                self._forward_constant[at], self._forward[at] = _larger(
                    (0, cost.forward_peak_bytes[0]), (around.gradients_before, cost.forward_peak_bytes[1]), later=later
                )
                self._backward_constant[at], self._backward[at] = _larger(
                    (around.gradients_after[index], cost.backward_peak_bytes[0]),
                    (around.gradients_before, cost.backward_peak_bytes[1]),
                    later=later,
                )
                if segment.unit is not None:
                    unit = (*where, numbers[segment.unit], choice)
                    self.unit_seconds[unit] += cost.seconds * profile.calibration.scale
                    self.unit_kept_bytes[unit] += cost.saved_bytes
            if segment.unit is None:
                self.between_seconds[where] += segment.costs[FIXED].seconds * profile.calibration.scale

    def _load_boundaries(
        self, where: tuple[int, int], profile: Profile, table: StepTable, numbers: dict[str, int]
    ) -> None:
        for index, boundary in enumerate(table.boundaries):
            at = (*where, index)
            self._size[at], self._held[at] = boundary.size_bytes, boundary.held
            self._born[at] = boundary.born
            self._last[at] = min(boundary.last_use, len(table.segments) - 1)
            self._passes[at] = boundary.last_use > boundary.born
            for number, (segment, names) in enumerate(boundary.keepers.items()):
                own = self._names(profile, table.segments[segment])
                self._keeper[(number, *at)] = segment
                keeps = [name in names for name in own]
                self._keeper_bits[(number, *at)] = sum(1 << choice for choice, kept in enumerate(keeps) if kept)
                unit = table.segments[segment].unit
                if unit is not None and not boundary.held:
                    self.unit_kept_bytes[(*where, numbers[unit])] += np.array(keeps) * boundary.size_bytes

    def _names(self, profile: Profile, segment: Segment) -> list[str]:
        """Return the name of each choice of a segment; saving replaces a storage that the segment cannot have."""
        if segment.unit is None:
            return [FIXED] * self.max_choices
        storages, last = self.numbering.storages, len(profile.precisions) - 1
        if not profile.unit(segment.unit).recomputable:
            storages = (Storage.SAVE,) * len(storages)
        return [
            choice_name(profile.precisions[min(precision, last)], storage)
            for precision in range(self.max_precisions)
            for storage in storages
        ]

    def encode(self, job: int, plan: Plan) -> tuple[int, Indices]:
        """Return the index of a plan's k, and its units' choices, shape (max_units,).

        Raises:
            ProfileError: if the plan's k, a precision or a storage is not in the job's profile.
        """
        profile = self.profiles[job]
        k = profile.tables.index(profile.table(plan.accumulation_steps))
        choices = np.zeros(self.max_units, dtype=np.int64)
        for number, unit in enumerate(profile.units):
            precision = plan.precision_of(unit.name)
            if precision not in profile.precisions:
                raise ProfileError(
                    f"precision of {unit.name!r} is {str(precision)!r}, which was not profiled",
                    where=f"profile of {profile.job}",
                    allowed=profile.precisions,
                )
            storage = plan.storage_of(unit.name)
            if storage not in self.numbering.storages:
                raise ProfileError(
                    f"storage of {unit.name!r} is {str(storage)!r}, which was not profiled",
                    where=f"profile of {profile.job}",
                    allowed=self.numbering.storages,
                )
            choices[number] = self.numbering.number(profile.precisions.index(precision), storage)
        return k, choices

    def decode(self, job: int, k: int, choices: Indices) -> Plan:
        """Return the plan with a k index and unit choices; the inverse of :meth:`encode`."""
        profile, storages = self.profiles[job], self.numbering.storages
        pairs = list(zip(profile.units, choices.tolist(), strict=False))
        return Plan(
            accumulation_steps=profile.tables[k].accumulation_steps,
            precision={unit.name: profile.precisions[choice // len(storages)] for unit, choice in pairs},
            storage={unit.name: storages[choice % len(storages)] for unit, choice in pairs if unit.recomputable},
        )

    def variant(self, plans: Plans) -> Indices:
        """Return the index of each plan's cost set, shape (n,)."""
        if self.regimes == 1:
            return plans.k
        precision = self.numbering.precision(plans.choices)
        first = precision[:, :1]
        there = np.arange(self.max_units)[None, :] < self.num_units[plans.job][:, None]
        uniform = ((precision == first) | ~there).all(axis=1)
        return np.asarray(plans.k + self.max_k * np.where(uniform, first[:, 0], 0))

    def peak_bytes(self, plans: Plans, length: Floats | float = 1.0) -> Floats:
        """Return predicted peaks, shape (n,).

        Args:
            plans: one plan per lane.
            length: factor on all activations, shape (n,), for sequences longer or shorter than the profiled ones.
        """
        factor = np.broadcast_to(np.asarray(length, dtype=np.float64), plans.job.shape)[:, None]
        return _highest(self._needs(plans), factor)

    def peaks_by_length(self, plans: Plans, lengths: Floats) -> Floats:
        """Return predicted peaks of every plan at every length, shape (n, lengths).

        Args:
            plans: one plan per lane.
            lengths: factors on all activations.
        """
        needs = self._needs(plans)
        return np.stack([_highest(needs, length) for length in lengths.tolist()], axis=1)

    def _needs(self, plans: Plans) -> _Needs:
        row, cell = self._cells(plans)
        all_born, kept_born = self._boundary_changes(plans, row, cell)

        def of(array: Floats) -> Floats:
            return np.take(array.reshape(-1), cell)

        return _Needs(
            saved=of(self._saved),
            forward=(np.cumsum(all_born, axis=1)[:, :-1], of(self._forward), of(self._forward_constant)),
            backward=(np.cumsum(kept_born, axis=1)[:, :-1], of(self._backward), of(self._backward_constant)),
            update_peak=np.take(self._update_peak.reshape(-1), row),
            static=np.take(self._static.reshape(-1), row),
        )

    def seconds_per_step(
        self, plans: Plans, length: Floats | float = 1.0, unit_seconds: Floats | None = None
    ) -> Floats:
        """Return predicted seconds per step, shape (n,).

        Args:
            plans: one plan per lane.
            length: factor on all seconds that grow with the sequences, as for :meth:`peak_bytes`.
            unit_seconds: shape (n, max_units, max_choices), seconds of the units in the variant of each lane's plan;
                ``None`` takes the profiles.
        """
        row = plans.job * self.variants + self.variant(plans)
        if unit_seconds is None:
            units = row[:, None] * self.max_units + np.arange(self.max_units)
            chosen = np.take(self.unit_seconds.reshape(-1), units * self.max_choices + plans.choices)
        else:
            chosen = np.take_along_axis(unit_seconds, plans.choices[:, :, None], axis=2)[:, :, 0]
        growing = chosen.sum(axis=1) + np.take(self.between_seconds.reshape(-1), row)
        return np.asarray(growing * length + np.take(self.constant_seconds.reshape(-1), row))

    def _cells(self, plans: Plans) -> tuple[Indices, Indices]:
        """Return the flat index of each lane's job and cost set, and of each of its segments' choices."""
        row = plans.job * self.variants + self.variant(plans)
        unit_of = np.take(self._unit_of.reshape(-1, self._segments), row, axis=0)
        padded = np.concatenate([plans.choices, np.zeros((len(row), 1), dtype=np.int64)], axis=1)
        choice = np.take_along_axis(padded, unit_of, axis=1)
        segment = row[:, None] * self._segments + np.arange(self._segments)
        return row, segment * self.max_choices + choice

    def _boundary_changes(self, plans: Plans, row: Indices, cell: Indices) -> tuple[Floats, Floats]:
        """Return the level's change at each segment due to all boundaries, and due to those kept until backward."""

        def of(array: NDArray[Any]) -> NDArray[Any]:
            return np.take(array.reshape(-1, self._boundaries), row, axis=0)

        lanes, width = len(row), self._segments + 1
        choice = cell % self.max_choices
        kept = of(self._held)
        for keeper, bits in zip(self._keeper, self._keeper_bits, strict=True):
            kept |= (of(bits) >> np.take_along_axis(choice, of(keeper), axis=1)) & 1 == 1
        size, start = of(self._size), np.arange(lanes)[:, None] * width
        born, gone = start + of(self._born) + 1, start + of(self._last) + 1
        passing = np.where(kept, 0.0, size * of(self._passes))

        def spread(where: Indices, values: Floats) -> Floats:
            flat = np.bincount(where.reshape(-1), values.reshape(-1), minlength=lanes * width)
            return np.asarray(flat, dtype=np.float64).reshape(lanes, width)

        staying = spread(born, np.where(kept, size, 0.0))
        return staying + spread(born, passing) - spread(np.minimum(gone, start + width - 1), passing), staying


def _table(profile: Profile, regime: int, mixed: StepTable) -> StepTable:
    """Return the costs of plans with one 16-bit precision everywhere; without such costs, those of mixed plans."""
    if not 0 < regime < len(profile.precisions):
        return mixed
    tables = profile.uniform_tables.get(str(profile.precisions[regime]), ())
    return next((table for table in tables if table.accumulation_steps == mixed.accumulation_steps), mixed)


def _larger(first: tuple[int, int], later_one: tuple[int, int], *, later: bool) -> tuple[int, int]:
    """Return the larger of two needs, as constant and activation bytes; the second applies only if k > 1."""
    return later_one if later and sum(later_one) > sum(first) else first

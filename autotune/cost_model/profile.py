"""The profile of a job on a device: the measured cost of its parts, from which all predictions are made.

A step is a chain of *segments*: the calls of units, and the code between them. A segment of a unit has one cost per
choice of precision and storage; code between units has a single cost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from autotune.choices import REDUCED_PRECISIONS, STORAGES
from autotune.errors import ProfileError
from autotune.io.documents import STRICT, Bytes, Count, Level, Quantity, Seconds, shown, validated
from autotune.pipeline import Pipeline, is_pipeline
from autotune.plan import Plan, PlanSpace, Precision, Storage
from autotune.units import Unit

PROFILE_VERSION = 3
# The only choice of a segment without a unit.
FIXED = "fixed"


def choice_name(precision: Precision, storage: Storage) -> str:
    """Return the name of a choice in a profile, for example ``bf16/recompute``."""
    return f"{precision}/{storage}"


# Limit on the number of segments that a step's boundaries pass in total; the solver has a term for each.
_MOST_PASSED = 2**20
_CHOICES = frozenset(choice_name(precision, storage) for precision in Precision for storage in Storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one segment in a step under one choice.

    Attributes:
        forward_s: seconds in all forward passes of a step.
        backward_s: seconds in all backward passes of a step, recomputation included.
        saved_bytes: bytes that stay allocated from forward until backward, without boundaries.
        forward_peak_bytes: highest level within the forward pass above what earlier segments keep, in the first
            micro-batch and in later ones (0 if there are none).
        backward_peak_bytes: the same for the backward pass.
    """

    __pydantic_config__ = STRICT

    forward_s: Quantity
    backward_s: Quantity
    saved_bytes: Level
    forward_peak_bytes: tuple[Level, Level]
    backward_peak_bytes: tuple[Level, Level]

    @property
    def seconds(self) -> float:
        """The seconds of the segment in a step."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One call of a unit, or the code between two calls.

    Attributes:
        unit: name of the unit; ``None`` for code between units.
        gradient_bytes: bytes of parameter gradients that its first backward pass allocates.
        costs: costs by choice; code between units has the one choice ``fixed``.
    """

    __pydantic_config__ = STRICT

    unit: str | None
    gradient_bytes: Bytes
    costs: Mapping[str, Cost]

    def cost(self, choice: str) -> Cost:
        """Return the cost of a choice.

        Raises:
            ProfileError: if the choice could not be profiled.
        """
        if choice not in self.costs:
            raise ProfileError(
                f"{choice} of unit {self.unit!r} could not be profiled", where="profile", allowed=list(self.costs)
            )
        return self.costs[choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A tensor that passes from one segment to others.

    Attributes:
        born: the segment that allocates it.
        last_use: the last segment whose forward pass needs it.
        size_bytes: size of the tensor.
        held: whether it stays until backward under every plan.
        keepers: segments that keep it until their backward pass, with the choices under which they do.
    """

    __pydantic_config__ = STRICT

    born: Count
    last_use: Count
    size_bytes: Bytes
    held: bool
    keepers: Mapping[Count, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """The costs of a step at one k.

    Attributes:
        accumulation_steps: k.
        micro_batch: samples in the largest micro-batch.
        segments: segments in forward order.
        boundaries: tensors that pass between segments.
        update_peak_bytes: highest level outside forward and backward: all gradients and the memory of the update.
        update_s: seconds of a step outside forward and backward.
        batch_bytes: bytes of the batches in a step; under adaptive batching there is one per micro-batch.
    """

    __pydantic_config__ = STRICT

    accumulation_steps: Count
    micro_batch: Count
    segments: tuple[Segment, ...]
    boundaries: tuple[Boundary, ...]
    update_peak_bytes: Level
    update_s: Quantity
    batch_bytes: Bytes

    @property
    def least_s(self) -> float:
        """Return the seconds of a step under the fastest choices, as the sum of its parts, without calibration."""
        return self.update_s + sum(min(cost.seconds for cost in segment.costs.values()) for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A correction from the sum of parts to the seconds of a step: scale x sum + micro_batch_s x k + constant_s.

    Attributes:
        scale: factor on the sum.
        micro_batch_s: seconds per micro-batch.
        constant_s: seconds per step.
        plans: number of measured plans in the fit; 0 without a fit.
        error_frac: median relative error on those plans after the fit.
        plans_needed: number of plans that suffice for at most 1.1 times that error; 0 if the plain sum does.
    """

    __pydantic_config__ = STRICT

    scale: Quantity = 1.0
    micro_batch_s: Quantity = 0.0
    constant_s: Quantity = 0.0
    plans: Count = 0
    error_frac: Quantity = 0.0
    plans_needed: Count = 0

    def seconds(self, summed: float, accumulation_steps: int) -> float:
        """Return the seconds of a step.

        Args:
            summed: the sum of its parts, in seconds.
            accumulation_steps: k.
        """
        return self.scale * summed + self.micro_batch_s * accumulation_steps + self.constant_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All measurements of a job on a device.

    Attributes:
        job: name of the job.
        device: name of the device.
        fingerprint: SHA-256 of model structure, shapes, device and library versions.
        batching: ``fixed`` or ``adaptive``.
        batch_size: samples in one batch.
        units: the units, in forward order.
        accumulation_choices: allowed k.
        precisions: allowed precisions.
        static_bytes: model and optimizer state.
        tables: one per profiled k, ascending.
        uniform_tables: tables per k by 16-bit precision, for plans that use it for all units. Their costs differ, since
            tensors then pass between units in 16 bits.
        calibration: calibration of the time model.
        noise_frac: median relative difference between two median times of the same plan.
        switch_s: median extra seconds of the first step after a switch.
        seconds: seconds that profiling took.
        steps: real optimizer steps that profiling took.
        length_spread: standard deviation of the logarithm of a batch's bytes, over the job's first batches; 0 if all
            batches are equal.
        fragments_bytes: largest difference between peak reserved and peak allocated memory of a step; 0 on a CPU.
        warnings: warnings for readers of the profile.
        estimated: whether the costs were estimated for an absent device instead of measured.
        locked: precisions and storages that put a unit's gradient too far off, by unit; it has no costs of them.
        unit_bytes: bytes of the parameters that a unit has for itself and of their optimizer state, by unit; empty if
            they are not known.
        shared_bytes: bytes of the gradients of parameters that a unit shares, as with a tied head, by unit.
        given_bytes: bytes of the gradients that a unit's operations with weights are given in the backward passes of a
            step, by unit and precision. A pipeline keeps them while weights' gradients wait.
        pipeline: the layout of the pipeline that predictions are of, such as ``pipe=2,units=3/5``; empty for one
            process, which is what all costs are of.
    """

    __pydantic_config__ = STRICT

    job: str
    device: str
    fingerprint: str
    batching: str
    batch_size: Count
    units: tuple[Unit, ...]
    accumulation_choices: tuple[Count, ...]
    precisions: tuple[Precision, ...]
    static_bytes: Bytes
    tables: tuple[StepTable, ...]
    uniform_tables: Mapping[str, tuple[StepTable, ...]]
    calibration: Calibration
    noise_frac: Quantity
    switch_s: Quantity
    seconds: Seconds
    steps: Count
    length_spread: Quantity = 0.0
    fragments_bytes: Bytes = 0
    warnings: tuple[str, ...] = ()
    estimated: bool = False
    locked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unit_bytes: Mapping[str, Bytes] = field(default_factory=dict)
    shared_bytes: Mapping[str, Bytes] = field(default_factory=dict)
    given_bytes: Mapping[str, Mapping[Precision, Bytes]] = field(default_factory=dict)
    pipeline: str = ""

    @property
    def space(self) -> PlanSpace:
        """The plans that the profile can predict."""
        return PlanSpace(
            units=self.units,
            accumulation_choices=self.accumulation_choices,
            precisions=self.precisions,
            k_splits=self.batching == "fixed",
            storages=tuple(one for one in STORAGES if one is Storage.SAVE or one in self._storages),
            locked=self.locked,
        )

    def locking(self, locks: Mapping[str, Collection[str]]) -> Profile:
        """Return the profile with more locked choices, without their costs; see :meth:`PlanSpace.locking`."""
        space = self.space.locking(locks)

        def kept(unit: str, choice: str) -> bool:
            precision, _, storage = choice.partition("/")
            return precision in space.precisions_of(unit) and storage in space.storages_of(unit)

        return replace(self.offering(kept), precisions=space.precisions, locked=space.locked)

    def offering(self, kept: Callable[[str, str], bool]) -> Profile:
        """Return the profile without some costs.

        Args:
            kept: whether a choice of a unit, given both names, keeps its cost.
        """

        def table(one: StepTable) -> StepTable:
            segments = (
                part
                if (unit := part.unit) is None
                else replace(part, costs={name: cost for name, cost in part.costs.items() if kept(unit, name)})
                for part in one.segments
            )
            return replace(one, segments=tuple(segments))

        return replace(
            self,
            tables=tuple(map(table, self.tables)),
            uniform_tables={name: tuple(map(table, tables)) for name, tables in self.uniform_tables.items()},
        )

    @property
    def _storages(self) -> frozenset[str]:
        """The names of the storages that have a cost in some table."""
        choices = set[str]().union(*(segment.costs for table in self.tables for segment in table.segments))
        return frozenset(name.partition("/")[2] for name in choices)

    def unit(self, name: str) -> Unit:
        """Return the unit with a name."""
        return next(unit for unit in self.units if unit.name == name)

    def table_for(self, plan: Plan) -> StepTable:
        """Return the costs of a plan.

        Raises:
            ProfileError: if the plan's k is not in the profile.
        """
        uniform = plan.changed(
            precision={unit.name: plan.precision_of(unit.name) for unit in self.units}
        ).uniform_reduced
        for table in self.uniform_tables.get(str(uniform), ()):
            if table.accumulation_steps == plan.accumulation_steps:
                return table
        return self.table(plan.accumulation_steps)

    def table(self, accumulation_steps: int) -> StepTable:
        """Return the costs of plans with mixed precisions at one k.

        Raises:
            ProfileError: if that k is not in the profile.
        """
        for table in self.tables:
            if table.accumulation_steps == accumulation_steps:
                return table
        raise ProfileError(
            f"k = {accumulation_steps} is not in the profile",
            where=f"profile of {self.job}",
            allowed=[table.accumulation_steps for table in self.tables],
        )

    def to_json(self) -> dict[str, Any]:
        """Return the profile as a JSON object of the current version."""
        document = asdict(self)
        document["precisions"] = [str(precision) for precision in self.precisions]
        document["uniform_tables"] = {name: list(tables) for name, tables in document["uniform_tables"].items()}
        for table in [*document["tables"], *(t for tables in document["uniform_tables"].values() for t in tables)]:
            for boundary in table["boundaries"]:
                boundary["keepers"] = {str(key): list(names) for key, names in boundary["keepers"].items()}
        return {"version": PROFILE_VERSION, **document}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, where: str = "profile") -> Profile:
        """Read a profile from a JSON object.

        Raises:
            ProfileError: if it is damaged or has another version; the message names its job and device.
        """
        try:
            found = validated(cls, document, where=where, version=PROFILE_VERSION, error=ProfileError)
            _require_consistent(found)
        except ProfileError as error:
            about = document if isinstance(document, Mapping) else {}
            maker = f"made for job {shown(about.get('job'))} on {shown(about.get('device'))}"
            allowed = error.allowed or "an unmodified profile"
            raise ProfileError(f"{error.problem}, {maker}", where=where, allowed=allowed) from error
        return found


def _require_consistent(profile: Profile) -> None:
    """Refuse a profile with inconsistent parts.

    Raises:
        ProfileError: if parts are inconsistent; the message names them.
    """
    names = [unit.name for unit in profile.units]
    _require(len(set(names)) == len(names), "two units have the same name")
    choices = profile.accumulation_choices
    _require(bool(choices) and choices[0] >= 1 and sorted(set(choices)) == list(choices), "accumulation_choices")
    _require(bool(profile.precisions) and len(set(profile.precisions)) == len(profile.precisions), "precisions")
    _require(profile.batching in ("fixed", "adaptive"), f"batching is {shown(profile.batching)}")
    _require(profile.batch_size >= 1, "batch_size is 0")
    _require([table.accumulation_steps for table in profile.tables] == list(choices), "tables are not one per k")
    _require(set(profile.uniform_tables) <= set(REDUCED_PRECISIONS), "uniform_tables")
    _require(set(profile.locked) <= set(names), "a choice of an unknown unit is locked")
    told = {*profile.unit_bytes, *profile.shared_bytes, *profile.given_bytes}
    _require(told <= set(names), "unit_bytes, shared_bytes or given_bytes has an unknown unit")
    _require(not profile.pipeline or _is_divided(profile), f"pipeline is {shown(profile.pipeline)}")
    for table in (*profile.tables, *(one for tables in profile.uniform_tables.values() for one in tables)):
        _require_whole(table, set(names))
        for segment in table.segments:
            locked = profile.locked.get(segment.unit or "", ())
            costly = {part for name in segment.costs for part in name.split("/")}
            _require(costly.isdisjoint(locked), f"unit {shown(segment.unit)} has costs of a locked choice")
        _require_costly(profile, table)


def _require_whole(table: StepTable, units: set[str]) -> None:
    """Refuse a table whose segments or boundaries refer to missing units, segments or choices."""
    count = len(table.segments)
    choices: dict[str | None, set[str]] = {}
    for segment in table.segments:
        first = choices.setdefault(segment.unit, set(segment.costs))
        _require(set(segment.costs) <= first, f"calls of unit {shown(segment.unit)} have different choices")
        known = {FIXED} if segment.unit is None else _CHOICES
        there = segment.unit is None or segment.unit in units
        _require(there, f"a segment refers to unknown unit {shown(segment.unit)}")
        _require(bool(segment.costs) and set(segment.costs) <= known, "a segment has costs for unknown choices")
    passed = sum(max(0, one.last_use - one.born) for one in table.boundaries)
    _require(passed <= _MOST_PASSED, f"boundaries pass {passed} segments, more than the limit")
    for one in table.boundaries:
        _require(one.born <= one.last_use < count, "a boundary lies outside the step")
        _require(all(key < count for key in one.keepers), "a boundary is kept outside the step")


def _require_costly(profile: Profile, table: StepTable) -> None:
    """Refuse costs under which a plan takes no time or no memory, since plans are compared by ratios."""
    k = table.accumulation_steps
    fastest = profile.calibration.seconds(table.least_s, k)
    _require(fastest > 0 and profile.calibration.scale > 0, f"at k = {k} a step takes no time")
    _require(
        profile.static_bytes + table.batch_bytes + table.update_peak_bytes > 0, f"at k = {k} a step takes no memory"
    )


def _is_divided(profile: Profile) -> bool:
    """Return whether a profile's pipeline divides its units, and all its k can be interleaved."""
    if not is_pipeline(profile.pipeline) or not profile.unit_bytes:
        return False
    layout = Pipeline.parse(profile.pipeline)
    interleaved = layout.stages > layout.ranks
    return sum(layout.units) == len(profile.units) and not (
        interleaved and any(k % layout.ranks for k in profile.accumulation_choices)
    )


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ProfileError(f"is damaged: {problem}", where="profile")

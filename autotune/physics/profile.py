"""Say what a job's pieces cost on a device: measured once, the input of every prediction.

A step is a chain of *segments*: the calls of units, and the code between them. A segment of a unit has one cost per
choice of precision and storage; the code between has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from autotune.errors import ProfileError
from autotune.files import refuse_unknown_keys
from autotune.plan import Plan, PlanSpace, Precision, Storage
from autotune.units import Unit

PROFILE_VERSION = 3
# The one choice of a segment that belongs to no unit.
FIXED = "fixed"


def choice_name(precision: Precision, storage: Storage) -> str:
    """Return the name under which a segment's cost stands, for example ``bf16/recompute``."""
    return f"{precision}/{storage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Hold what one segment costs in a step under one choice.

    Attributes:
        forward_s: seconds in all forward passes of a step.
        backward_s: seconds in all backward passes of a step, recomputation included.
        saved_bytes: what stays allocated from forward until backward, without boundaries.
        forward_peak_bytes: highest level within its forward pass above what earlier segments keep, in the first
            micro-batch and in later ones (0 where there are none).
        backward_peak_bytes: the same of its backward pass.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    forward_peak_bytes: tuple[int, int]
    backward_peak_bytes: tuple[int, int]

    @property
    def seconds(self) -> float:
        """Return its seconds in a step."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Hold one call of a unit, or the code between two calls.

    Attributes:
        unit: the unit's name; ``None`` for the code between.
        gradient_bytes: parameter gradients that its first backward pass allocates.
        costs: by choice; the one choice of the code between is called ``fixed``.
    """

    unit: str | None
    gradient_bytes: int
    costs: Mapping[str, Cost]

    def cost(self, choice: str) -> Cost:
        """Return what a choice costs.

        Raises:
            ProfileError: if it could not be profiled.
        """
        if choice not in self.costs:
            raise ProfileError(
                f"{choice} of unit {self.unit!r} could not be profiled", where="profile", allowed=list(self.costs)
            )
        return self.costs[choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Hold a tensor that passes from one segment to others.

    Attributes:
        born: the segment that allocates it.
        last_use: the last segment whose forward pass needs it.
        size_bytes: its size.
        held: whether it stays until backward whatever the plan.
        keepers: segments that keep it until their backward pass, and under which choices.
    """

    born: int
    last_use: int
    size_bytes: int
    held: bool
    keepers: Mapping[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """Hold the costs of a step at one k.

    Attributes:
        accumulation_steps: k.
        micro_batch: samples in its largest micro-batch.
        segments: in forward order.
        boundaries: what passes between them.
        update_peak_bytes: highest level outside forward and backward: all gradients, and what the update needs.
        update_s: seconds of a step outside forward and backward.
        batch_bytes: the batches that a step holds: under adaptive batching one per micro-batch.
    """

    accumulation_steps: int
    micro_batch: int
    segments: tuple[Segment, ...]
    boundaries: tuple[Boundary, ...]
    update_peak_bytes: int
    update_s: float
    batch_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Correct summed seconds to those of whole plans: scale x sum + per micro-batch x k + constant.

    Attributes:
        scale: factor.
        micro_batch_s: seconds per micro-batch.
        constant_s: seconds per step.
        plans: whole plans that it was fitted to; 0 where it was not.
        error_frac: median relative error left on those plans.
        plans_needed: of how many of them a fit would have done as well, to a tenth; 0 if the sum alone did.
    """

    scale: float = 1.0
    micro_batch_s: float = 0.0
    constant_s: float = 0.0
    plans: int = 0
    error_frac: float = 0.0
    plans_needed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Hold everything that was measured of a job on a device.

    Attributes:
        job: the job's name.
        device: what the device is called.
        fingerprint: SHA-256 of model structure, shapes, device and library versions.
        batching: ``fixed`` or ``adaptive``.
        batch_size: samples in one batch.
        units: the units, in forward order.
        accumulation_choices: allowed k.
        precisions: allowed precisions.
        static_bytes: model and optimizer state.
        tables: one per profiled k, ascending.
        uniform_tables: by the name of a 16-bit precision and of k, where plans that use it for all units cost something
            else, since tensors then pass between units in 16 bits.
        calibration: of the time model.
        noise_frac: median relative difference of two medians of the same plan.
        switch_s: seconds by which the first step after a switch is longer, median.
        seconds: how long profiling took.
        steps: real optimizer steps that it took.
        length_spread: standard deviation of the logarithm of a batch's bytes, over the job's first batches; 0 where all
            are alike.
        warnings: what a reader should know.
        estimated: whether it was estimated for a device that was not there, instead of measured.
    """

    job: str
    device: str
    fingerprint: str
    batching: str
    batch_size: int
    units: tuple[Unit, ...]
    accumulation_choices: tuple[int, ...]
    precisions: tuple[Precision, ...]
    static_bytes: int
    tables: tuple[StepTable, ...]
    uniform_tables: Mapping[str, tuple[StepTable, ...]]
    calibration: Calibration
    noise_frac: float
    switch_s: float
    seconds: float
    steps: int
    length_spread: float = 0.0
    warnings: tuple[str, ...] = ()
    estimated: bool = False

    @property
    def space(self) -> PlanSpace:
        """Return the plans that it can predict."""
        return PlanSpace(
            units=self.units,
            accumulation_choices=self.accumulation_choices,
            precisions=self.precisions,
            k_splits=self.batching == "fixed",
        )

    def unit(self, name: str) -> Unit:
        """Return a unit by the name that its segments have."""
        return next(unit for unit in self.units if unit.name == name)

    def table_for(self, plan: Plan) -> StepTable:
        """Return the costs that hold for a plan.

        Raises:
            ProfileError: if its k is not in the profile.
        """
        uniform = plan.changed(
            precision={unit.name: plan.precision_of(unit.name) for unit in self.units}
        ).uniform_16_bit
        for table in self.uniform_tables.get(str(uniform), ()):
            if table.accumulation_steps == plan.accumulation_steps:
                return table
        return self.table(plan.accumulation_steps)

    def table(self, accumulation_steps: int) -> StepTable:
        """Return the costs at one k, where units compute in different precisions.

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
            ProfileError: if it is damaged or of another version; the message says of which job and device it is.
        """
        maker = f"made for job {document.get('job')!r} on {document.get('device')!r}"
        if type(document.get("version")) is not int or document["version"] != PROFILE_VERSION:
            raise ProfileError(
                f"version is {document.get('version')!r}, {maker}", where=where, allowed=str(PROFILE_VERSION)
            )
        try:
            values = {key: value for key, value in document.items() if key != "version"}
            refuse_unknown_keys(values, frozenset(item.name for item in fields(cls)), where=where)
            values["units"] = tuple(
                Unit(**{**unit, "parameter_names": tuple(unit["parameter_names"])}) for unit in values["units"]
            )
            values["accumulation_choices"] = tuple(values["accumulation_choices"])
            values["precisions"] = tuple(Precision(name) for name in values["precisions"])
            values["tables"] = tuple(_table(table) for table in values["tables"])
            values["uniform_tables"] = {
                name: tuple(_table(table) for table in tables) for name, tables in values["uniform_tables"].items()
            }
            values["calibration"] = Calibration(**values["calibration"])
            values["warnings"] = tuple(values.get("warnings", ()))
            return cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = getattr(error, "problem", f"{type(error).__name__}: {error}")
            raise ProfileError(f"is damaged ({problem}), {maker}", where=where, allowed="a profile") from error


def _table(document: Mapping[str, Any]) -> StepTable:
    segments = tuple(
        Segment(
            unit=segment["unit"],
            gradient_bytes=segment["gradient_bytes"],
            costs={name: _cost(cost) for name, cost in segment["costs"].items()},
        )
        for segment in document["segments"]
    )
    boundaries = tuple(
        Boundary(**{**item, "keepers": {int(key): tuple(names) for key, names in item["keepers"].items()}})
        for item in document["boundaries"]
    )
    return StepTable(**{**document, "segments": segments, "boundaries": boundaries})


def _cost(document: Mapping[str, Any]) -> Cost:
    first, later = document["forward_peak_bytes"]
    back_first, back_later = document["backward_peak_bytes"]
    return Cost(**{**document, "forward_peak_bytes": (first, later), "backward_peak_bytes": (back_first, back_later)})

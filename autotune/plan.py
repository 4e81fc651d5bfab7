"""The plan, and the space of plans that a job on a device allows.

Plans are data: ``mechanics.controls`` applies them to a model. This file does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from autotune import knobs
from autotune.choices import DEFAULT_STORAGES, REDUCED_PRECISIONS, STORAGES, STORAGES_VARIABLE
from autotune.choices import Precision as Precision
from autotune.choices import Storage as Storage
from autotune.errors import PlanError
from autotune.io.documents import STRICT, validated
from autotune.io.files import read_json, write_json
from autotune.mesh import MESH_FORM, Mesh, is_mesh
from autotune.optimizers import KINDS
from autotune.pipeline import PIPELINE_FORM, is_pipeline
from autotune.units import Unit

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

PLAN_VERSION = 1
# Most units that a warning names.
_NAMED = 5
# A plan of ten thousand units has less than one megabyte.
_LARGEST_BYTES = 4 * 2**20
# How products of fp32 numbers can be computed.
FP32_CHOICES = ("fp32", "tf32")


def _is_rate(value: object) -> bool:
    """Return whether a value is a number above 0 in the range of floats; whole numbers in JSON may be larger."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


# The launch choices that only an engine of several ranks has.
_OF_RANKS = ("zero_stage", "mesh", "pipeline")
# For each launch choice, a test of its values and what to name as allowed.
_LAUNCH_CHOICES: Mapping[str, tuple[Callable[[Any], bool], str | Iterable[str]]] = {
    "zero_stage": (lambda value: type(value) is int and 0 <= value <= 3, "0, 1, 2, 3"),
    "mesh": (is_mesh, MESH_FORM),
    "pipeline": (is_pipeline, PIPELINE_FORM),
    "optimizer": (lambda value: isinstance(value, str) and value in KINDS, KINDS),
    "learning_rate": (_is_rate, "a number above 0"),
    "compile": (lambda value: isinstance(value, bool), "true, false"),
    "fp32": (lambda value: isinstance(value, str) and value in FP32_CHOICES, FP32_CHOICES),
    "knobs": (knobs.is_valid, f"some of {', '.join(knobs.KNOBS)} in this order, as in fused+threads=2"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The choices that cannot change during a run; ``None`` leaves the job's own.

    Attributes:
        zero_stage: DeepSpeed ZeRO stage, 0 to 3.
        mesh: replicas, shards and ranks that share layers under FSDP2, such as ``dp=2,shard=2`` or ``tp=2``.
        pipeline: ranks and stages of a pipeline, such as ``pipe=2,schedule=gpipe``.
        optimizer: one of :data:`autotune.optimizers.KINDS`.
        learning_rate: learning rate of that optimizer; ``None`` follows a rule of thumb.
        compile: whether units are compiled one by one.
        fp32: how products of fp32 numbers are computed, one of :data:`FP32_CHOICES`; ``None`` leaves torch's settings.
        knobs: free knobs, as in ``fused+threads=2``; see :data:`autotune.knobs.KNOBS`.
    """

    __pydantic_config__ = STRICT

    zero_stage: int | None = None
    mesh: str | None = None
    pipeline: str | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    compile: bool | None = None
    fp32: str | None = None
    knobs: str | None = None

    def __post_init__(self) -> None:
        for name, (holds, allowed) in _LAUNCH_CHOICES.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise PlanError(f"launch.{name} is {value!r:.80}", where="plan", allowed=allowed)
        if self.learning_rate is not None and self.optimizer is None:
            raise PlanError("launch.learning_rate needs an optimizer", where="plan", allowed="launch.optimizer")

    @property
    def layout(self) -> Mesh | None:
        """Return the mesh of FSDP2; ``None`` if the plan has none."""
        return None if self.mesh is None else Mesh.parse(self.mesh, where="launch.mesh")

    @property
    def on_one_rank(self) -> Launch:
        """Return the choices without those that only an engine of several ranks has."""
        return replace(self, **dict.fromkeys(_OF_RANKS))

    @property
    def of_ranks(self) -> dict[str, Any]:
        """Return the choices that only an engine of several ranks has, by name; empty for a plan of one process."""
        return {name: value for name, value in self.to_json().items() if name in _OF_RANKS}

    def to_json(self) -> dict[str, Any]:
        """Return the choices that were made, as a JSON object."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """One configuration of a training step.

    Two plans are equal if all their choices are equal; a plan can be hashed, pickled and written as JSON.

    Attributes:
        accumulation_steps: micro-batches per optimizer step (k), at least 1.
        precision: compute dtype by unit name. A unit that is not named is left to the user's own code.
        storage: storage by unit name. A unit that is not named saves its activations.
        launch: the choices that cannot change during a run.
    """

    __pydantic_config__ = STRICT

    accumulation_steps: int = 1
    precision: Mapping[str, Precision] = field(default_factory=dict)
    storage: Mapping[str, Storage] = field(default_factory=dict)
    launch: Launch = field(default_factory=Launch)
    # The canonical JSON, made on first use: plans are compared at every step, and serializing one is slow.
    _text: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        steps = self.accumulation_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise PlanError(f"accumulation_steps is {steps!r}", where="plan", allowed="a whole number >= 1")
        object.__setattr__(self, "precision", _choices(self.precision, Precision, "precision"))
        object.__setattr__(self, "storage", _choices(self.storage, Storage, "storage"))

    def precision_of(self, unit: str) -> Precision:
        """Return a unit's precision (``inherit`` where the plan does not name it)."""
        return self.precision.get(unit, Precision.INHERIT)

    def storage_of(self, unit: str) -> Storage:
        """Return a unit's storage (``save`` where the plan does not name it)."""
        return self.storage.get(unit, Storage.SAVE)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Return the names of the units that are recomputed."""
        return tuple(name for name, choice in self.storage.items() if choice.recomputes)

    @property
    def compiles(self) -> bool:
        """Return whether the plan has units that are compiled when they are first called under it."""
        return any(choice.compile_budget for choice in self.storage.values())

    @property
    def by_storage(self) -> Mapping[Storage, tuple[str, ...]]:
        """Return the names of the units with each storage but ``save``, in the order of ``STORAGES``."""
        found = {one: tuple(name for name, own in self.storage.items() if own is one) for one in STORAGES}
        return {one: names for one, names in found.items() if names and one is not Storage.SAVE}

    @property
    def told_storage(self) -> str:
        """Return how many units have each storage but ``save``, in words."""
        stored = {Storage.RECOMPUTE: (), **self.by_storage}
        return ", ".join(f"{len(names)} {storage.label}" for storage, names in stored.items())

    @property
    def needs_loss_scaling(self) -> bool:
        """Return whether any unit computes in a precision that needs a scaled loss."""
        return any(choice.needs_loss_scaling for choice in self.precision.values())

    @property
    def digest(self) -> str:
        """Return a SHA-256 of the plan's canonical JSON: equal on every rank and machine for equal plans."""
        return hashlib.sha256(self._canonical().encode()).hexdigest()

    @property
    def uniform_reduced(self) -> Precision | None:
        """Return the one 16-bit precision that all named units compute in; ``None`` if there is none."""
        precisions = set(self.precision.values())
        found = precisions.pop() if len(precisions) == 1 else None
        return found if found is not None and found.is_16_bit else None

    @property
    def bare(self) -> Plan:
        """Return the plan without its launch choices: what can be applied to a running job."""
        return self if self.launch == Launch() else self.changed(launch=Launch())

    def changed(self, **changes: Any) -> Plan:
        """Return a copy with some attributes replaced."""
        return replace(self, **changes)

    def storing(self, names: Iterable[str], storage: Storage) -> Plan:
        """Return a copy in which some units have another storage."""
        return self.changed(storage={**self.storage, **dict.fromkeys(names, storage)})

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object of the current version."""
        document: dict[str, Any] = {
            "version": PLAN_VERSION,
            "accumulation_steps": self.accumulation_steps,
            "precision": {name: str(choice) for name, choice in self.precision.items()},
            "storage": {name: str(choice) for name, choice in self.storage.items()},
        }
        launch = self.launch.to_json()
        return {**document, "launch": launch} if launch else document

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, where: str = "plan") -> Plan:
        """Read a plan from a JSON object.

        Raises:
            PlanError: naming the first key or value that is not allowed, and what is.
        """
        found = validated(cls, document, where=where, version=PLAN_VERSION, error=PlanError)
        if "accumulation_steps" not in document:
            raise PlanError("accumulation_steps is missing", where=where, allowed="a whole number >= 1")
        return found

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file, or the plan of a run directory, which must not be a link.

        Raises:
            InputError: if the plan is missing or damaged; naming the first key or value that is not allowed.
        """
        if not isinstance(path, str | os.PathLike):
            raise PlanError(f"path is {path!r:.80}", where="Plan.load", allowed="a plan file or a run directory")
        path = Path(path)
        of_run = path.is_dir()
        file = path / "plan.json" if of_run else path
        return cls.from_json(read_json(file, limit_bytes=_LARGEST_BYTES, follow=not of_run), where=str(file))

    def save(self, path: str | Path) -> None:
        """Write the plan to a file that :meth:`load` reads; a file that is there is replaced.

        Args:
            path: the file; its folder must exist.

        Raises:
            InputError: if the file cannot be written.
        """
        path = Path(path)
        try:
            write_json(path, self.to_json())
        except OSError as error:
            raise PlanError(
                f"cannot be written: {error.strerror}", where=str(path), allowed="a writable file"
            ) from error

    def _canonical(self) -> str:
        if not self._text:
            text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
            object.__setattr__(self, "_text", text)
        return self._text

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Plan) and self._canonical() == other._canonical())

    def __hash__(self) -> int:
        return hash(self._canonical())

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan.from_json, (self.to_json(),)

    def __str__(self) -> str:
        precisions = _tally(self.precision.values())
        launch = "".join(f", {key} {value}" for key, value in self.launch.to_json().items())
        return f"k={self.accumulation_steps}, {precisions or 'inherit'}, {self.told_storage}{launch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpace:
    """All plans that a job on a device allows, with choices in a fixed order.

    Attributes:
        units: the units, in the order in which the forward pass reaches them.
        accumulation_choices: allowed k, ascending.
        precisions: allowed precisions, the same for every unit; the first is the baseline's.
        k_splits: whether a larger k makes micro-batches smaller (fixed batching), or steps larger (adaptive batching).
        storages: allowed storages, the same for every unit whose storage can be chosen, from the fastest to the
            leanest; the first is the baseline's. By default ``save`` and ``recompute``.
        locked: precisions and storages that a unit may not have although the space has them, by unit.
    """

    units: tuple[Unit, ...]
    accumulation_choices: tuple[int, ...]
    precisions: tuple[Precision, ...]
    k_splits: bool = True
    storages: tuple[Storage, ...] = DEFAULT_STORAGES
    locked: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return the space as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PlanSpace:
        """Read what :meth:`to_json` returned."""
        units = ({**unit, "parameter_names": tuple(unit["parameter_names"])} for unit in document["units"])
        return cls(
            units=tuple(Unit(**unit) for unit in units),
            accumulation_choices=tuple(document["accumulation_choices"]),
            precisions=tuple(Precision(name) for name in document["precisions"]),
            k_splits=document["k_splits"],
            storages=tuple(Storage(name) for name in document["storages"]),
            locked={name: tuple(locked) for name, locked in document.get("locked", {}).items()},
        )

    @property
    def approximate(self) -> tuple[Precision | Storage, ...]:
        """Return the precisions that were asked for and the storages that approximate gradients."""
        asked = (one for one in self.precisions if one.asked_only)
        return (*asked, *(one for one in self.storages if one.approximates))

    def precisions_of(self, unit: str) -> tuple[Precision, ...]:
        """Return the precisions that a unit may have."""
        return tuple(one for one in self.precisions if one not in self.locked.get(unit, ()))

    def storages_of(self, unit: str) -> tuple[Storage, ...]:
        """Return the storages that a unit may have, if its storage can be chosen."""
        return tuple(one for one in self.storages if one not in self.locked.get(unit, ()))

    def locking(self, locks: Mapping[str, Collection[str]]) -> PlanSpace:
        """Return the space with more locked choices, without the choices that are locked in every unit.

        Args:
            locks: names of precisions and storages, by unit; neither the space's first precision nor its first storage.
        """
        if not any(locks.values()):
            return self
        both = {
            unit.name: {str(one) for one in (*self.locked.get(unit.name, ()), *locks.get(unit.name, ()))}
            for unit in self.units
        }
        open_ = replace(self, locked={name: tuple(sorted(own)) for name, own in both.items()})
        kept = {str(one) for name in both for one in open_.precisions_of(name)}
        kept |= {str(one) for name in self.recomputable for one in open_.storages_of(name)}
        return replace(
            self,
            precisions=tuple(one for one in self.precisions if one in kept),
            storages=tuple(one for one in self.storages if one in kept or one is self.storages[0]),
            locked={name: left for name, own in both.items() if (left := tuple(sorted(own & kept)))},
        )

    def within(self, other: PlanSpace) -> PlanSpace:
        """Return the space without the approximate choices that another space of the same job does not allow.

        Args:
            other: the space of the job's profile.
        """
        return self.locking(
            {
                unit.name: {*self.approximate} - {*other.precisions_of(unit.name), *other.storages_of(unit.name)}
                for unit in self.units
            }
        )

    def permitted(self, plan: Plan) -> Plan:
        """Return a plan with a choice that is allowed in place of each locked one: the next in order, or one before."""
        if not self.locked:
            return plan
        return plan.changed(
            precision={
                name: _allowed(own, self.precisions, self.precisions_of(name)) for name, own in plan.precision.items()
            },
            storage={name: _allowed(own, self.storages, self.storages_of(name)) for name, own in plan.storage.items()},
        )

    @property
    def recomputable(self) -> tuple[str, ...]:
        """Return the names of the units whose storage can be chosen."""
        return tuple(unit.name for unit in self.units if unit.recomputable)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of choices of each coordinate: k, a precision per unit, a storage per unit."""
        return (
            len(self.accumulation_choices),
            *(len(self.precisions) for _ in self.units),
            *(len(self.storages) for _ in self.recomputable),
        )

    @property
    def lowest_precision(self) -> Precision:
        """Return the first 16-bit precision, bf16 before fp16; the space's first precision if it has none."""
        found = (one for one in REDUCED_PRECISIONS if one in self.precisions and one.is_16_bit)
        return next(found, self.precisions[0])

    def plan(
        self,
        *,
        accumulation_steps: int,
        precision: Precision,
        recomputed: Iterable[str] = (),
        storage: Storage = Storage.SAVE,
    ) -> Plan:
        """Return the plan with one precision everywhere, the named units recomputed, and one storage elsewhere.

        A unit for which a choice is locked has the one of :meth:`permitted`.
        """
        names = frozenset(recomputed)
        return self.permitted(
            Plan(
                accumulation_steps=accumulation_steps,
                precision={unit.name: precision for unit in self.units},
                storage={name: Storage.RECOMPUTE if name in names else storage for name in self.recomputable},
            )
        )

    def baseline(self) -> Plan:
        """Return the reference plan: the smallest k, the first precision (fp32), the first storage (save)."""
        return self.plan(
            accumulation_steps=self.accumulation_choices[0], precision=self.precisions[0], storage=self.storages[0]
        )

    def leanest(self) -> Plan:
        """Return the plan expected to need least memory: lowest precision, leanest storage, smallest micro-batch."""
        return self.plan(
            accumulation_steps=self.accumulation_choices[-1 if self.k_splits else 0],
            precision=self.lowest_precision,
            storage=self.storages[-1],
        )

    def check(self, plan: Plan, *, where: str = "plan") -> Plan:
        """Return the plan with a choice for every unit, after checking that it lies in the space.

        Raises:
            PlanError: naming the first unit or value that is not allowed, and what is.
        """
        if plan.accumulation_steps not in self.accumulation_choices:
            raise PlanError(
                f"accumulation_steps is {plan.accumulation_steps}",
                where=where,
                allowed=self.accumulation_choices,
            )
        names = [unit.name for unit in self.units]
        for key, chosen, known in (
            ("precision", plan.precision, names),
            ("storage", plan.storage, list(self.recomputable)),
        ):
            unknown = [name for name in chosen if name not in known]
            if unknown:
                raise PlanError(f"{key} names unknown unit {unknown[0]!r}", where=where, allowed=known)
        for key, given, allowed in (
            ("precision", plan.precision, {*self.precisions, Precision.INHERIT}),
            ("storage", plan.storage, {*self.storages, Storage.SAVE}),
        ):
            for name, choice in given.items():
                if choice not in allowed:
                    asked = ""
                    if choice in STORAGES and choice not in DEFAULT_STORAGES:
                        needs = " or this device cannot do" if Storage(choice).needs_accelerator else ""
                        asked = f", which {STORAGES_VARIABLE} does not name{needs}"
                        if Storage(choice).keeps_gathered:
                            asked = ", which needs weights that are sharded over ranks (--engine fsdp2)"
                    problem = f"{key} of {name!r} is {str(choice)!r}{asked}"
                    raise PlanError(problem, where=where, allowed=sorted(allowed))
                if choice in self.locked.get(name, ()):
                    problem = f"{key} of {name!r} is {str(choice)!r}, which puts this unit's gradient too far off"
                    raise PlanError(problem, where=where, allowed=sorted(allowed.difference(self.locked[name])))
        return plan.changed(
            precision={name: plan.precision_of(name) for name in names},
            storage={name: plan.storage_of(name) for name in self.recomputable},
        )

    def load(self, path: str | Path, *, where: str) -> Plan:
        """Read a plan file for this space; if it names only some of the units, a warning lists the others.

        Args:
            path: as for :meth:`Plan.load`.
            where: name of the file in messages.

        Raises:
            InputError: as for :meth:`Plan.load` and :meth:`check`.
        """
        plan = Plan.load(path)
        found = self.check(plan, where=where)
        named = {*plan.precision, *plan.storage}
        unnamed = [unit.name for unit in self.units if named and unit.name not in named]
        if unnamed:
            logger.warning("%s: %s", where, told_unnamed(unnamed))
        return found

    def encode(self, plan: Plan) -> list[int]:
        """Return the index of each of the plan's choices, in the order of :attr:`sizes`.

        Raises:
            PlanError: if a choice, such as ``inherit``, has no index in this space.
        """
        try:
            return [
                self.accumulation_choices.index(plan.accumulation_steps),
                *(self.precisions.index(plan.precision_of(unit.name)) for unit in self.units),
                *(self.storages.index(plan.storage_of(name)) for name in self.recomputable),
            ]
        except ValueError as error:
            raise PlanError("a choice lies outside the space", allowed=self.precisions) from error

    def decode(self, indices: Sequence[int]) -> Plan:
        """Return the plan of a sequence of indices; the inverse of :meth:`encode`, but for locked choices.

        In place of a locked choice, a unit has the one of :meth:`permitted`.

        Raises:
            PlanError: if the sequence has the wrong length or an index is out of range.
        """
        values = [int(index) for index in indices]
        if len(values) != len(self.sizes) or any(
            not 0 <= value < size for value, size in zip(values, self.sizes, strict=True)
        ):
            raise PlanError(f"indices {values} do not fit", allowed=f"one index below each of {list(self.sizes)}")
        split = 1 + len(self.units)
        pairs = zip(self.recomputable, values[split:], strict=True)
        return self.permitted(
            Plan(
                accumulation_steps=self.accumulation_choices[values[0]],
                precision={
                    unit.name: self.precisions[value] for unit, value in zip(self.units, values[1:split], strict=True)
                },
                storage={name: self.storages[value] for name, value in pairs},
            )
        )

    def sample(self, generator: np.random.Generator) -> Plan:
        """Return a plan drawn uniformly from the space; locked choices are replaced as by :meth:`permitted`."""
        return self.decode(generator.integers(self.sizes).tolist())


def told_unnamed(units: Sequence[str]) -> str:
    """Return a clause about units that a plan does not name, although it names others."""
    more = f" and {len(units) - _NAMED} more" if len(units) > _NAMED else ""
    return f"the plan does not name {', '.join(map(repr, units[:_NAMED]))}{more} and leaves that part as it is"


_Choice = TypeVar("_Choice", Precision, Storage)


def _allowed(own: _Choice, known: Sequence[_Choice], allowed: Sequence[_Choice]) -> _Choice:
    """Return a choice if it is allowed or unknown, or else the next one that is allowed, or the nearest before."""
    if own in allowed or own not in known:
        return own
    places = [known.index(one) for one in allowed]
    later = [place for place in places if place > known.index(own)]
    return known[min(later) if later else max(places)]


def _choices(given: Mapping[str, Any], kind: type[_Choice], key: str) -> Mapping[str, _Choice]:
    chosen: dict[str, _Choice] = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise PlanError(f"{key} has the unit name {name!r}", where="plan", allowed="text")
        try:
            chosen[name] = kind(value)
        except ValueError as error:
            raise PlanError(f"{key} of {name!r} is {value!r}", where="plan", allowed=list(kind)) from error
    return MappingProxyType(chosen)


def _tally(precisions: Iterable[Precision]) -> str:
    return " ".join(f"{count}x{choice}" for choice, count in Counter(precisions).items())

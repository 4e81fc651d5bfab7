"""Exported plans, and the part of a plan that the configuration of a launcher can express."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autotune.choices import STORAGES
from autotune.engines.job_checks import accumulation_choices, build_model
from autotune.errors import PlanError
from autotune.job import Job
from autotune.mechanics import randomness
from autotune.plan import Plan, PlanSpace, Precision
from autotune.units import units_of

_WHERE = "export"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """An exported plan.

    Attributes:
        files: JSON documents or texts, by file name.
        command: how to launch with the files.
        notes: what the files cannot express, and what to do about it.
    """

    files: Mapping[str, Mapping[str, Any] | str]
    command: str
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the export as a JSON object."""
        return {"files": dict(self.files), "command": self.command, "notes": list(self.notes)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A plan as launchers see it: whole numbers of samples, and one autocast for the whole model.

    Attributes:
        plan: the plan, with a precision for every unit of the job.
        samples: samples per optimizer step, over all ranks.
        micro_samples: samples per micro-batch on one rank.
        ranks: number of ranks.
        clip_norm: largest 2-norm of the gradient; 0 for no clipping.
        layers: names of the layers that transformers can recompute, in the order of the model.
        stored: names of the units whose storage can be chosen.
        kinds: class names of these units.
    """

    plan: Plan
    samples: int
    micro_samples: int
    ranks: int
    clip_norm: float
    layers: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    @property
    def keeps_gathered(self) -> bool | None:
        """Return whether the units keep their weights gathered after forward; ``None`` if they differ."""
        kept = {self.plan.storage_of(name).keeps_gathered for name in self.stored} or {False}
        return kept.pop() if len(kept) == 1 else None

    @property
    def k(self) -> int:
        """Return the number of micro-batches per optimizer step on one rank."""
        return self.plan.accumulation_steps

    @property
    def autocast(self) -> Precision | None:
        """Return the precision of the launcher's own autocast; ``None`` leaves it off.

        A single fp16 unit needs it too, because the launcher scales losses only under its own fp16.
        """
        return self.plan.uniform_reduced or (Precision.FP16 if self.plan.needs_loss_scaling else None)

    @property
    def by_unit(self) -> Plan | None:
        """Return what must be applied to the model unit by unit; ``None`` if the launcher's autocast is enough.

        Units with a storage of their own also have a precision of their own: the launcher's autocast keeps cast weights
        from one graph to another (pytorch#141896), while a unit's own autocast does not.
        """
        plan = self.plan
        differs = plan.uniform_reduced is None and any(choice.is_reduced for choice in plan.precision.values())
        if not differs and not plan.by_storage:
            return None
        if self.autocast is None or not differs:
            return plan
        own = {name: Precision.FP32 if it is Precision.INHERIT else it for name, it in plan.precision.items()}
        return plan.changed(precision=own)

    @property
    def every_n_layers(self) -> int | None:
        """Return n if the plan recomputes every n-th layer from the first on, which transformers supports.

        ``None`` if it recomputes other layers or none, or if a plan file is needed for precisions.
        """
        plan = self.plan
        recomputed = tuple(name for name in self.layers if plan.storage_of(name).recomputes)
        if len(recomputed) != sum(map(len, plan.by_storage.values())):
            return None
        if plan.uniform_reduced is None and any(choice.is_reduced for choice in plan.precision.values()):
            return None
        return next((n for n in range(1, len(self.layers) + 1) if recomputed and self.layers[::n] == recomputed), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What a format exports.

    Attributes:
        plan: a plan of the job, with a precision for every unit.
        job: the job.
        model: the job's model.
        ranks: number of ranks.
        reference: reference of the job, as given; may be empty.
    """

    plan: Plan
    job: Job
    model: nn.Module
    ranks: int = 1
    reference: str = ""

    def launched(self) -> Launched:
        """Return the plan as launchers see it.

        Raises:
            PlanError: if the batch cannot be split evenly, as launchers require.
        """
        k, ranks, mesh = self.plan.accumulation_steps, self.ranks, self.plan.launch.layout
        if mesh is not None and mesh.ranks != ranks:
            problem = f"the plan's mesh {mesh} is for {mesh.ranks} ranks, and --ranks is {ranks}"
            raise PlanError(problem, where=_WHERE, allowed=f"--ranks {mesh.ranks}")
        samples = self.job.batch_size * (k if self.job.batching == "adaptive" else 1)
        pieces = k * (ranks if mesh is None else mesh.shares)
        if samples % pieces:
            raise PlanError(
                f"a batch of {samples} samples is cut into k={k} micro-batches on {ranks} ranks",
                where=_WHERE,
                allowed=f"a batch size that {pieces} divides",
            )
        stored = tuple(unit for unit in units_of(self.model, self.job.units) if unit.recomputable)
        return Launched(
            plan=self.plan,
            samples=samples,
            micro_samples=samples // pieces,
            ranks=ranks,
            # Without a norm, launchers clip at 1.
            clip_norm=clip_norm(self.job),
            layers=tuple(name for name, part in self.model.named_modules() if _is_layer(part)),
            stored=tuple(unit.name for unit in stored),
            kinds=tuple(dict.fromkeys(unit.kind for unit in stored)),
        )


def model_of(job: Job) -> nn.Module:
    """Return the model of a job, without changing the state of the random generators.

    Raises:
        JobError: if the model cannot be built.
    """
    with randomness.isolated():
        return build_model(job)


def require_fit(plan: Plan, job: Job, model: nn.Module) -> Plan:
    """Return the plan with the job's missing units appended, which inherit their precision.

    Raises:
        PlanError: if the plan has a unit or a k that the job lacks.
    """
    units = units_of(model, job.units)
    # The target machine may support other precisions than this one.
    space = PlanSpace(
        units=units,
        accumulation_choices=accumulation_choices(job, model, {}),
        precisions=tuple(Precision),
        storages=STORAGES,
    )
    space.check(plan, where=_WHERE)
    inherited = {unit.name: Precision.INHERIT for unit in units if unit.name not in plan.precision}
    return plan.changed(precision={**plan.precision, **inherited})


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module is a layer that transformers can recompute; transformers need not be installed."""
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def clip_norm(job: Job) -> float:
    """Return the largest 2-norm of the job's gradient; 0 (no clipping) if it is infinite or not set."""
    norm = float(job.clip_norm or 0.0)
    return norm if math.isfinite(norm) else 0.0

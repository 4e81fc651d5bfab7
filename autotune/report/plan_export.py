"""Export of a plan to other programs, in the formats of a registry.

To add a format, register one here, or an entry point ``autotune.exports`` in another package: a function that makes an
:class:`Export` of an :class:`ExportRequest`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune.agents.entry_points import EXPORT_GROUP, Registry
from autotune.errors import InputError
from autotune.job import Job
from autotune.plan import Plan
from autotune.report.export_targets import Export, ExportRequest, model_of, require_fit
from autotune.report.launchers import PLAN_FILE, to_accelerate, to_deepspeed, to_torchtitan, to_transformers
from autotune.report.snippet import to_python


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """A format of ``autotune export --to``.

    Attributes:
        make: returns the files.
        takes_ranks: whether the files can launch several ranks.
    """

    make: Callable[[ExportRequest], Export]
    takes_ranks: bool = True


def _as_format(given: Any) -> ExportFormat:
    if isinstance(given, ExportFormat):
        return given
    if not callable(given):
        raise TypeError(f"expected a function that makes an Export, or an ExportFormat, got {type(given).__name__}")
    return ExportFormat(make=given)


EXPORTS: Registry[ExportFormat] = Registry("export format", EXPORT_GROUP, _as_format)


def export(plan: Plan, job: Job, target: str, *, ranks: int = 1, reference: str = "") -> Export:
    """Return a plan as the files of a target.

    Args:
        plan: a plan of the job.
        job: the job.
        target: the name of a format in :data:`EXPORTS`.
        ranks: number of ranks to train on.
        reference: reference of the job; required for ``python``.

    Raises:
        InputError: if the target is unknown, cannot launch the plan, or its package fails.
        JobError: if the job's model cannot be built.
        PlanError: if the plan has a unit or a k that the job lacks.
    """
    if target not in EXPORTS:
        raise InputError(f"target is {target!r}", where="--to", allowed=EXPORTS.names)
    form, model = EXPORTS[target], model_of(job)
    plan = require_fit(plan, job, model)
    if ranks > 1 and not form.takes_ranks:
        several = [name for name, one in EXPORTS.registered.items() if one.takes_ranks]
        raise InputError(f"{target} cannot express {ranks} ranks", where="--ranks", allowed=[*several, "1"])
    with EXPORTS.errors_named(target):
        made = form.make(ExportRequest(plan=plan, job=job, model=model, ranks=ranks, reference=reference))
        if not isinstance(made, Export):
            raise TypeError(f"expected an Export, got {type(made).__name__}")
        return made


for _name, _format in {
    "deepspeed": ExportFormat(make=lambda request: to_deepspeed(request.launched())),
    "accelerate": ExportFormat(make=lambda request: to_accelerate(request.launched())),
    "transformers": ExportFormat(make=lambda request: to_transformers(request.launched())),
    "torchtitan": ExportFormat(make=lambda request: to_torchtitan(request.launched())),
    "python": ExportFormat(make=lambda request: to_python(request.plan, request.job, request.reference, request.ranks)),
    "json": ExportFormat(
        make=lambda request: Export(
            files={PLAN_FILE: request.plan.to_json()}, command="autotune compare JOB --arms baseline,plan.json"
        ),
        takes_ranks=False,
    ),
}.items():
    EXPORTS.register(_name)(_format)
TARGETS = tuple(EXPORTS.registered)

"""Export of a plan to other programs."""

from __future__ import annotations

from autotune.errors import InputError
from autotune.job import Job
from autotune.plan import Plan
from autotune.report.export_targets import Export, launched, model_of, require_fit
from autotune.report.launchers import PLAN_FILE, to_accelerate, to_deepspeed, to_transformers
from autotune.report.snippet import to_python

_LAUNCHERS = {"deepspeed": to_deepspeed, "accelerate": to_accelerate, "transformers": to_transformers}
TARGETS = (*_LAUNCHERS, "python", "json")


def export(plan: Plan, job: Job, target: str, *, ranks: int = 1, reference: str = "") -> Export:
    """Return a plan as the files of a target.

    Args:
        plan: a plan of the job.
        job: the job.
        target: one of :data:`TARGETS`.
        ranks: number of ranks to train on.
        reference: reference of the job; required for ``python``.

    Raises:
        InputError: if the target is unknown, or cannot launch the plan.
        JobError: if the job's model cannot be built.
        PlanError: if the plan has a unit or a k that the job lacks.
    """
    if target not in TARGETS:
        raise InputError(f"target is {target!r}", where="--to", allowed=TARGETS)
    model = model_of(job)
    plan = require_fit(plan, job, model)
    if target in _LAUNCHERS:
        return _LAUNCHERS[target](launched(plan, job, ranks, model))
    if ranks > 1:
        raise InputError(f"{target} cannot express {ranks} ranks", where="--ranks", allowed=[*_LAUNCHERS, "1"])
    if target == "python":
        return to_python(plan, job, reference)
    return Export(files={PLAN_FILE: plan.to_json()}, command="autotune compare JOB --arms baseline,plan.json")

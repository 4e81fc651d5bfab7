"""Turn a plan into what other programs are launched with, and say what of it they cannot hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.engines.deepspeed_config import STAGES
from autotune.errors import InputError, PlanError
from autotune.job import Job
from autotune.plan import Plan, Precision, Storage

TARGETS = ("deepspeed", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Hold what a plan becomes.

    Attributes:
        files: documents by file name.
        command: how to launch with them.
        notes: what the target cannot hold by itself, and what to do about it.
    """

    files: Mapping[str, Mapping[str, Any]]
    command: str
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the export as a JSON object."""
        return {"files": dict(self.files), "command": self.command, "notes": list(self.notes)}


def to_deepspeed(plan: Plan, job: Job, ranks: int) -> Export:
    """Return a DeepSpeed configuration with the plan's micro-batch, k, ZeRO stage, precision and clipping.

    Args:
        plan: a plan of the job.
        job: the job.
        ranks: how many ranks will train it.

    Raises:
        PlanError: if the batch cannot be cut evenly, as DeepSpeed's arithmetic demands.
    """
    k = plan.accumulation_steps
    adaptive = job.batching == "adaptive"
    whole = job.batch_size * (k if adaptive else 1)
    if whole % (k * ranks):
        raise PlanError(
            f"a batch of {whole} samples is cut into k={k} micro-batches on {ranks} ranks",
            where="export",
            allowed=f"a batch size that {k * ranks} divides",
        )
    stage = plan.launch.zero_stage or 0
    assert stage in STAGES
    config: dict[str, Any] = {
        "train_batch_size": whole,
        "train_micro_batch_size_per_gpu": whole // (k * ranks),
        "gradient_accumulation_steps": k,
        # It clips at 1 where nothing is said.
        "gradient_clipping": float(job.clip_norm or 0.0),
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    notes, files = [], {}
    uniform = plan.uniform_16_bit
    if uniform is not None:
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16" if uniform is Precision.BF16 else "float16"}
    elif any(precision.is_16_bit for precision in plan.precision.values()):
        notes.append(
            "precision differs from unit to unit, which a configuration cannot hold: the units stay in fp32 unless "
            "autotune's own DeepSpeed engine trains them"
        )
    recomputed = [name for name, storage in plan.storage.items() if storage is Storage.RECOMPUTE]
    if recomputed:
        own = plan.changed(precision=dict.fromkeys(plan.precision, Precision.INHERIT))
        files["plan.json"] = own.to_json()
        notes.append(
            f"{len(recomputed)} units are recomputed ({', '.join(recomputed)}): after deepspeed.initialize, "
            'tuner = autotune.attach(engine=engine, policy="plan.json", limits=autotune.Limits(gain_frac=-1.0))'
        )
    files["ds_config.json"] = config
    command = f"torchrun --nproc-per-node {ranks} train.py --deepspeed --deepspeed_config ds_config.json"
    return Export(files=files, command=command, notes=tuple(notes))


def to_json(plan: Plan) -> Export:
    """Return the plan as a file that every command takes."""
    return Export(
        files={"plan.json": plan.to_json()}, command="autotune compare JOB --arms baseline,plan.json", notes=()
    )


def export(plan: Plan, job: Job, target: str, *, ranks: int = 1) -> Export:
    """Return what a plan becomes for a target.

    Args:
        plan: a plan of the job.
        job: the job.
        target: ``deepspeed`` or ``json``.
        ranks: how many ranks will train it.

    Raises:
        InputError: if the target is unknown, or cannot launch the plan.
    """
    if target == "deepspeed":
        return to_deepspeed(plan, job, ranks)
    if target == "json":
        return to_json(plan)
    raise InputError(f"target is {target!r}", where="--to", allowed=TARGETS)

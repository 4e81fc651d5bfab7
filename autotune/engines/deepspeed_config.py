"""Build the DeepSpeed configuration from a job, a ZeRO stage and the user's own configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from autotune import knobs
from autotune.errors import InputError
from autotune.job import Job

STAGES = (0, 1, 2, 3)
AUTO = "auto"
_WHERE = "DeepSpeed configuration"
# The key for the dtype in which ranks add up gradients.
_SENT_IN = "communication_data_type"
# Sections that contradict a plan, and why.
_REFUSED = {
    "fp16": "it converts all parameters, so the precision of a unit cannot be chosen",
    "bf16": "it converts all parameters, so the precision of a unit cannot be chosen",
    "amp": "it wraps the model and the optimizer",
    "torch_autocast": "the plan sets the precision of each unit",
    "pipeline": "a pipeline controls accumulation itself",
    "activation_checkpointing": "the plan sets which units are recomputed",
    "data_efficiency": "the job provides the batches",
    "curriculum_learning": "the job provides the batches",
    "progressive_layer_drop": "it changes the model from step to step",
    "gradient_accumulation_plugin": "the plan sets the accumulation",
}


def engine_config(job: Job, zero_stage: int, user: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the configuration of an engine whose accumulation, precision and recomputation follow a plan.

    Args:
        job: the job, which determines clipping and batch size.
        zero_stage: ZeRO stage, 0 to 3.
        user: the user's own configuration; keys that are missing or ``"auto"`` are filled in.

    Returns:
        A configuration with one micro-batch per step; the actual number is set at each step.

    Raises:
        InputError: if the stage is unknown or the user's configuration contradicts the job or the plan.
    """
    if zero_stage not in STAGES or isinstance(zero_stage, bool):
        raise InputError(f"ZeRO stage is {zero_stage!r}", where="engine deepspeed", allowed=STAGES)
    config = copy.deepcopy(dict(user or {}))
    for name, reason in _REFUSED.items():
        section = config.pop(name, None)
        enabled = section.get("enabled", name in ("pipeline", "activation_checkpointing")) if _is(section) else section
        if section is not None and enabled not in (False, AUTO, None):
            raise InputError(f"{name} is set: {reason}", where=_WHERE, allowed=f"no section {name!r}")
    if _is(config.get("compile")) and config["compile"].get("deepcompile"):
        raise InputError("compile.deepcompile is true: it replaces the backward pass", where=_WHERE, allowed="false")
    for name, owner in (("optimizer", "optimizer"), ("scheduler", "schedule")):
        if config.pop(name, None) not in (None, AUTO):
            raise InputError(f"{name} is set", where=_WHERE, allowed=f"the job's own {owner}")
    clip = float(job.clip_norm or 0.0)
    _agree(config, "gradient_clipping", clip, "the job's clip_norm")
    _agree(config, "train_batch_size", job.batch_size, "the job's batch_size")
    zero = dict(config.get("zero_optimization") or {})
    _agree(zero, "stage", zero_stage, "the plan's", path="zero_optimization.")
    for name in ("offload_optimizer", "offload_param"):
        if _is(zero.get(name)) and zero[name].get("device", "none") not in ("none", AUTO):
            raise InputError(f"zero_optimization.{name} is set", where=_WHERE, allowed="no offloading")
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config.pop(name, None)
    return {
        "steps_per_print": 10**9,
        **{name: value for name, value in config.items() if value != AUTO},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # DeepSpeed clips at 1 by default.
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        **_communication(job, config),
        "zero_optimization": {**{k: v for k, v in zero.items() if v != AUTO}, "stage": zero_stage},
    }


def require_sendable(text: str | None) -> None:
    """Refuse knobs that send gradients or weights as DeepSpeed cannot.

    Raises:
        InputError: naming the knobs.
    """
    sent = knobs.communication(text)
    if sent.gathers_in_16_bit or sent.gradient_rank:
        problem = f"+{knobs.of_ranks(text)} is not possible"
        raise InputError(problem, where="engine deepspeed", allowed=f"+{knobs.REDUCE}=bf16, or --engine fsdp2")


def _communication(job: Job, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the setting by which ranks add up gradients in bf16, if the job's launch choices ask for it."""
    require_sendable(job.launch.knobs)
    if not knobs.communication(job.launch.knobs).reduces_in_16_bit:
        return {}
    _agree(config, _SENT_IN, "bf16", "+reduce")
    return {_SENT_IN: "bf16"}


def _agree(config: Mapping[str, Any], name: str, ours: float | str, whose: str, path: str = "") -> None:
    theirs = config.get(name, AUTO)
    if theirs not in (None, AUTO) and theirs != ours:
        raise InputError(
            f"{path}{name} is {theirs!r}, and {whose} is {ours!r}", where=_WHERE, allowed=f'{ours!r}, "auto"'
        )


def _is(section: Any) -> bool:
    return isinstance(section, dict)

"""The parts of a DeepSpeed engine that a live tuner uses, and checks for unsupported features.

DeepSpeed itself is not imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autotune.errors import AttachError, a_kind
from autotune.live.limits import Mode
from autotune.mechanics.memory_meter import resident_tensors, tensor_bytes
from autotune.mechanics.sharded import ShardedUpdate


def is_engine(value: object) -> bool:
    """Return whether a value is an engine, as ``deepspeed.initialize`` returns it."""
    return any(kind.__module__.startswith("deepspeed.") for kind in type(value).__mro__[:-1])


def update_of(engine: Any, mode: Mode, clip_norm: float | None) -> ShardedUpdate:
    """Return the object that makes an engine's updates.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        mode: what the tuner may change.
        clip_norm: the norm at which the caller wants gradients clipped; ``None`` for none.

    Raises:
        AttachError: if the engine has an unsupported feature, with the remedy.
    """
    if not is_engine(engine):
        raise _refused(f"engine is {a_kind(engine)}", "what deepspeed.initialize returned")
    if any(kind.__name__ == "PipelineEngine" for kind in type(engine).__mro__):
        raise _refused(
            "the engine is a pipeline, which accumulates gradients by itself", "an engine without pipeline stages"
        )
    if engine.is_deepcompile_enabled():
        raise _refused("the engine uses DeepCompile, which owns the backward pass", "compile.deepcompile false")
    if not engine.managed_gradient_accumulation():
        raise _refused("managed_gradient_accumulation is false", "true, its default")
    if engine.fp16_enabled():
        raise _refused(
            "fp16 is enabled, with a loss scale that the tuner does not control", "bf16, or a torch_autocast section"
        )
    if mode is not Mode.EXACT:
        raise _refused(f"mode is {mode}, whose checks need the whole gradient, which no rank has", "mode exact")
    clip = engine.gradient_clipping()
    if clip_norm is not None and clip_norm != clip:
        raise _refused(f"clip_norm is {clip_norm}, and gradient_clipping is {clip}", "only the engine's setting")
    # The optimizer that ZeRO wraps, or the engine's own.
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _refused(f"the engine's optimizer is {a_kind(optimizer)}", "an engine around a torch optimizer")
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    update = ShardedUpdate(engine, optimizer, trained, clip or None)
    if update.stage and not hasattr(engine.optimizer, "averaged_gradients"):
        raise _refused(f"the engine's optimizer is {a_kind(engine.optimizer)}", "ZeRO stages 0 to 3")
    return update


def held_bytes(update: ShardedUpdate, model: nn.Module) -> int:
    """Return the bytes of an engine's master weights and communication buffers.

    Args:
        update: the engine's update.
        model: the model.
    """
    return tensor_bytes(update.resident(model, [])) - tensor_bytes(resident_tensors(model, update.optimizer, []))


def _refused(problem: str, allowed: str) -> AttachError:
    return AttachError(problem, where="attach(engine=)", allowed=allowed)

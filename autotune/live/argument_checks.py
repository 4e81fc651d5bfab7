"""Checks of the arguments of ``attach``, made before the run is changed.

Each function raises an :class:`autotune.errors.AttachError` that names the argument and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from autotune.errors import AttachError, BudgetError, a_kind
from autotune.io.files import is_path
from autotune.live.asked_budget import BudgetFunction, Size, size_of
from autotune.live.deepspeed_engines import is_engine, update_of
from autotune.live.limits import Limits, Mode
from autotune.live.rank_channel import is_flattened, is_spread
from autotune.live.settings import Settings
from autotune.mechanics import controls
from autotune.mechanics.sharded import ShardedUpdate


def _is_positive(kind: type[Any], value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and bool(value > 0)


# Checks and allowed values of arguments that have no check of their own.
_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "clip_norm": (lambda value: value is None or _is_positive(Real, value), "a number above 0, or None"),
    "total_steps": (lambda value: value is None or _is_positive(Integral, value), "a whole number >= 1, or None"),
    "runs_dir": (lambda value: value is None or is_path(value), "a folder, or None to write nothing"),
}


def check_arguments(**given: Any) -> None:
    """Refuse arguments of a wrong type or range.

    Args:
        given: the arguments by name.
    """
    for key, value in given.items():
        fits, allowed = _ARGUMENTS[key]
        if not fits(value):
            raise AttachError(f"{key} is {value!r}", where="attach", allowed=allowed)


def choice_of(kind: Any, value: object, key: str) -> Any:
    """Return a member of an enumeration.

    Args:
        kind: the enumeration.
        value: the argument.
        key: name of the argument.
    """
    try:
        return kind(value)
    except ValueError as error:
        raise AttachError(f"{key} is {value!r}", where="attach", allowed=list(kind)) from error


def updates_through(engine: Any, model: Any, optimizer: Any, mode: Mode, clip_norm: float | None) -> ShardedUpdate:
    """Return the object that makes a DeepSpeed engine's updates; refuse an additional model or optimizer."""
    if model is not None or optimizer is not None:
        raise AttachError("model or optimizer cannot be given with engine", where="attach", allowed="only the engine")
    return update_of(engine, mode, clip_norm)


def inner_of(model: Any) -> nn.Module:
    """Return the model without the wrapper that runs it on several ranks."""
    if not isinstance(model, nn.Module):
        raise AttachError(f"model is {a_kind(model)}", where="attach", allowed="a torch.nn.Module")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    if isinstance(model, nn.DataParallel):
        raise AttachError("the model is in DataParallel", where="attach", allowed="DistributedDataParallel")
    if isinstance(model, torch.jit.ScriptModule):
        problem = "the model is a ScriptModule, which runs outside of Python"
        raise AttachError(problem, where="attach", allowed="the module that it was made from")
    return model.module if is_engine(model) else model  # type: ignore[return-value]


def check(model: nn.Module, optimizer: Any, *, sharded: bool) -> None:
    """Refuse a model or an optimizer that a tuner cannot work with."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise AttachError(f"optimizer is {a_kind(optimizer)}", where="attach", allowed="a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise AttachError(
            "LBFGS calls the loss by itself", where="attach", allowed="an optimizer whose step() has no closure"
        )
    _check_accelerated(optimizer)
    shapeless = next((name for name, one in model.named_parameters() if nn.parameter.is_lazy(one)), None)
    if shapeless is not None:
        raise AttachError(
            f"{shapeless} has no shape yet", where="attach", allowed="a model of lazy modules after a forward pass"
        )
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not trained:
        raise AttachError("the model has no parameter that requires a gradient", where="attach", allowed="at least one")
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # The parameters of an engine's optimizer are shards.
    if not sharded and not trained & owned:
        raise AttachError(
            "the optimizer owns none of the model's parameters",
            where="attach",
            allowed="an optimizer over model.parameters(), made after the model was moved to its device",
        )
    if any(isinstance(module.__dict__.get("forward"), controls.ControlledForward) for module in model.modules()):
        raise AttachError(
            "the model runs under a plan already",
            where="attach",
            allowed="a model without one: autotune.detach(model) takes it off, or close() of the engine that holds it",
        )


def refuse_unspread(model: Any, inner: nn.Module, clip_norm: float | None) -> None:
    """Refuse a model that several ranks train without synchronization, and ``clip_norm`` for a flattened model.

    Args:
        model: the model as the loop calls it.
        inner: the model without its wrapper.
        clip_norm: the norm at which to clip gradients; ``None`` for none.
    """
    if clip_norm is not None and is_flattened(inner):
        raise AttachError(
            "clip_norm is set, and FullyShardedDataParallel clips by a method of its own",
            where="attach",
            allowed="clip_norm=None, and model.clip_grad_norm_() between backward() and step()",
        )
    if model is not inner or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if is_spread(inner):
        return
    raise AttachError(
        f"{dist.get_world_size()} ranks train, and the model is not spread over them",
        where="attach",
        allowed="what the loop calls: DistributedDataParallel(model), or a model after fully_shard()",
    )


def refuse_other_updates(model: nn.Module, optimizer: Any, mode: Mode) -> None:
    """Refuse other optimizers and gradient hooks if the mode cuts batches or changes precisions."""
    if mode is Mode.EXACT:
        return
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) not in owned:
            raise AttachError(
                f"the optimizer does not own {name}, and mode {mode} runs passes beside the step whose gradients "
                "another optimizer would use",
                where="attach",
                allowed="mode exact, or one optimizer of all that is trained",
            )
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise AttachError(
                f"{name} has a hook that runs once its gradient is accumulated (an optimizer in backward, say), which "
                f"mode {mode} would run several times a step",
                where="attach",
                allowed="mode exact",
            )


def _check_accelerated(optimizer: Any) -> None:
    """Refuse an Accelerator's optimizer that does not update at each step(), or that scales the loss."""
    num_batches = getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1)
    if num_batches > 1:
        raise AttachError(
            f"the Accelerator accumulates {num_batches} batches",
            where="attach",
            allowed="Accelerator(gradient_accumulation_steps=1), and k batches before each step() of the tuner",
        )
    if getattr(optimizer, "scaler", None) is not None:
        raise AttachError(
            "the Accelerator's optimizer has a loss scale of its own",
            where="attach",
            allowed='Accelerator(mixed_precision="bf16") or "no"',
        )


def limits_of(limits: Any, *, sharded: bool) -> Limits:
    """Return the limits of a tuner.

    Args:
        limits: the argument; ``None`` for the defaults.
        sharded: whether the gradient is sharded over ranks.
    """
    if limits is not None and not isinstance(limits, Limits):
        raise AttachError(f"limits is {limits!r}", where="attach", allowed="autotune.Limits(...)")
    found = limits or Limits()
    # No rank has the whole gradient, so it cannot be sampled.
    return replace(found, statistics_every=None) if sharded else found


def accumulated(value: object) -> int:
    """Return the number of batches that the loop itself accumulates; refuse an invalid one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AttachError(f"accumulation_steps is {value!r}", where="attach", allowed="a whole number >= 1")
    return value


def is_adaptive(settings: Settings, mode: Mode, accumulation_steps: int, *, parallel: bool) -> bool:
    """Return whether a step consumes k batches; refuse that where it is not supported."""
    adaptive = settings.batching == "adaptive"
    if adaptive and mode is not Mode.TOLERANT:
        raise AttachError(
            f"batching is adaptive in mode {mode}", where="attach", allowed="mode tolerant: it changes what is learnt"
        )
    if adaptive and parallel:
        # Each rank profiles its own steps, so the ranks would not stay in step.
        raise AttachError("batching is adaptive, over several ranks", where="attach", allowed="fixed, or one rank")
    if adaptive and accumulation_steps > 1:
        raise AttachError(
            f"batching is adaptive, and the loop accumulates {accumulation_steps} batches by itself",
            where="attach",
            allowed="accumulation_steps=1, and step() after each batch",
        )
    return adaptive


def budget_of(value: Any) -> Size | BudgetFunction:
    """Return a budget, or the user's function that returns it."""
    try:
        return BudgetFunction(value) if callable(value) else size_of(value)
    except BudgetError as error:
        raise AttachError(error.problem, where="attach", allowed=error.allowed) from error

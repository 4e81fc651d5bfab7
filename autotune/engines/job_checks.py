"""Inspect a job before training: which plans it allows on a device, and what is wrong with it."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LRScheduler

from autotune.errors import InputError, JobError
from autotune.job import Job
from autotune.measurement import Failure
from autotune.mechanics import controls, devices
from autotune.mechanics.activations import uncopyable_argument
from autotune.mechanics.buffers import copy_buffers, undo_writes
from autotune.mechanics.cutting import Cutting, count_items
from autotune.mechanics.devices import is_out_of_memory
from autotune.mechanics.precision import excluded_precisions, useful_precisions
from autotune.mechanics.storage_acts import excluded, offered
from autotune.own_loop import require_stepped
from autotune.plan import PlanSpace, Precision, Storage
from autotune.units import Unit, units_of

_Answer = TypeVar("_Answer")

# Largest relative difference of two losses that differ only by rounding.
_ROUNDING = 1e-4

logger = logging.getLogger(__name__)


# How the job's functions are called, for who gives another one.
_CALLED = {
    "loss": "loss(model, batch) that returns a scalar tensor, the mean over the items",
    "evaluate": "evaluate(model) that returns a number",
    "optimizer.step": "an optimizer that can update the job's parameters",
}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode for the body, and then each back into its own."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def inspect_job(job: Job, model: nn.Module, batch: Any) -> tuple[PlanSpace, dict[str, str]]:
    """Return the plans that a job's model allows, and the reasons why choices are locked.

    The loss is run in evaluation mode on the largest micro-batch that fits in memory, and again in the lowest precision
    if that is reduced; nothing is kept for a backward pass.

    Args:
        job: the job.
        model: the job's model, on its device.
        batch: the job's first batch.

    Returns:
        The space with units in forward order, and a reason for each locked choice (``accumulation_steps``,
        ``precision``, ``borders``, ``storage`` and, for one of them, ``storage NAME``).

    Raises:
        JobError: if the loss raises, is not a scalar tensor or has no gradient, or the count is wrong.
    """
    # A forward pass may write to buffers, in evaluation mode too.
    buffers = copy_buffers(model)
    try:
        return _inspected(job, model, batch)
    finally:
        undo_writes(model, buffers)
        # A loss may run a backward pass of its own.
        model.zero_grad(set_to_none=True)


def _inspected(job: Job, model: nn.Module, batch: Any) -> tuple[PlanSpace, dict[str, str]]:
    units = units_of(model, job.units)
    ask(job, "count", lambda: count_items(batch, job.count))
    locks: dict[str, str] = {}
    choices = accumulation_choices(job, model, locks)
    piece, (calls, foreign) = _largest_with_room(
        _micro_batches(job, batch, choices), lambda piece: _trial(job, model, piece, units)
    )
    _check_trim(job, model, batch, choices[-1])
    for unit in units:
        if calls[unit.name] == 0:
            logger.warning("unit %r is never called by the loss and cannot be tuned", unit.name)
    by_name = {unit.name: replace(unit, recomputable=unit.recomputable and unit.name not in foreign) for unit in units}
    if foreign:
        locks["storage"] = _told_of(foreign)
        logger.warning("not all units can be recomputed: %s", locks["storage"])
    space = PlanSpace(
        units=tuple(by_name[name] for name, count in calls.items() if count > 0),
        accumulation_choices=choices,
        precisions=_precisions(model, locks),
        k_splits=job.batching == "fixed",
        storages=_storages(job, model, locks),
    )
    _try_reduced_borders(job, model, piece, space, locks)
    return space, locks


def classify(error: Exception) -> Failure:
    """Return the kind of failure of an exception in a step."""
    if is_out_of_memory(error):
        return Failure.OUT_OF_MEMORY
    message = str(error)
    if isinstance(error, NotImplementedError) or "not implemented for" in message or "dtype" in message:
        return Failure.UNSUPPORTED
    return Failure.CRASHED


def ask(job: Job, part: str, call: Callable[[], _Answer]) -> _Answer:
    """Call one of the job's functions.

    Args:
        job: the job.
        part: name of the function in the job.
        call: calls that function.

    Raises:
        JobError: if the function raises.
    """
    try:
        return call()
    except InputError:
        raise
    except Exception as error:
        raise raised(job, part, error) from error


def raised(job: Job, part: str, error: Exception) -> JobError:
    """Return the error that tells what one of the job's functions raised.

    Args:
        job: the job.
        part: name of the function in the job.
        error: what it raised.
    """
    problem = f"{part} raised {type(error).__name__}: {error}"
    return JobError(problem, where=f"job {job.name!r}", allowed=_CALLED.get(part, ""))


def build_model(job: Job) -> nn.Module:
    """Build the job's model, on the device where the job puts it.

    Raises:
        JobError: if the job does not return a module.
    """
    model = ask(job, "model", job.model)
    if not isinstance(model, nn.Module):
        raise JobError(f"model returned {model!r}", where=f"job {job.name!r}", allowed="a torch.nn.Module")
    return model


def build_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """Build the job's optimizer over the trained parameters.

    Raises:
        JobError: if no parameter is trained, or the job does not return an optimizer.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    where = f"job {job.name!r}"
    if not trained:
        raise JobError("model has no parameter that requires a gradient", where=where, allowed="at least one")
    optimizer = ask(job, "optimizer", lambda: job.optimizer(trained))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(f"optimizer returned {optimizer!r}", where=where, allowed="a torch.optim.Optimizer")
    return optimizer


def build_scheduler(job: Job, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """Build the job's torch scheduler for an optimizer; ``None`` for a job without one.

    Raises:
        JobError: if the job does not return a scheduler that is stepped after each update.
    """
    if job.scheduler is None:
        return None
    build, where = job.scheduler, f"job {job.name!r}"
    with warnings.catch_warnings():
        # A scheduler that is built anew for a trained optimizer is.
        warnings.simplefilter("ignore")
        scheduler = ask(job, "scheduler", lambda: build(optimizer))
    if not isinstance(scheduler, LRScheduler):
        raise JobError(f"scheduler returned {scheduler!r}", where=where, allowed="a torch scheduler")
    require_stepped(scheduler, where=where)
    return scheduler


def _told_of(foreign: Mapping[str, str]) -> str:
    name, kind = next(iter(foreign.items()))
    others = f", and so do {len(foreign) - 1} others" if len(foreign) > 1 else ""
    return f"{name} receives a {kind}{others}, which cannot be copied: recomputation might change it twice"


def _micro_batches(job: Job, batch: Any, choices: Sequence[int]) -> list[Any]:
    """Return the first micro-batch of a step at each k, the largest first."""
    if job.batching == "adaptive":
        return [batch]
    return [Cutting.of(job).pieces(batch, k)[0] for k in sorted(choices)]


def _largest_with_room(pieces: Sequence[Any], run: Callable[[Any], _Answer]) -> tuple[Any, _Answer]:
    """Return the first piece that fits in memory, and the result of running it."""
    for piece in pieces[:-1]:
        try:
            return piece, run(piece)
        except JobError as error:
            if not isinstance(error.__cause__, Exception) or not is_out_of_memory(error.__cause__):
                raise
        # Outside the except block: a traceback keeps the tensors of the pass alive.
    return pieces[-1], run(pieces[-1])


def _trial(job: Job, model: nn.Module, batch: Any, units: tuple[Unit, ...]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the number of calls of each unit, in forward order, and the types of arguments that cannot be copied."""
    losses: list[Any] = []
    foreign: dict[str, str] = {}
    # Tensors for the backward pass are dropped: this pass only shows whether the loss has a gradient. A loss that
    # differentiates within itself needs them.
    nothing, asked = torch.empty(0), []

    def restore(_: torch.Tensor) -> torch.Tensor:
        asked.append(True)
        return nothing

    def note(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found = uncopyable_argument(args, kwargs)
        if found is not None:
            foreign[name] = found

    def run() -> None:
        losses.append(job.loss(model, batch))

    names = [unit.name for unit in units]
    with evaluating(model), torch.enable_grad():
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda _: nothing, restore):
                calls = ask(job, "loss", lambda: controls.forward_order(model, names, run, note))
        except JobError:
            if not asked:
                raise
        if asked:
            calls = ask(job, "loss", lambda: controls.forward_order(model, names, run, note))
    _check_loss(losses[-1], f"job {job.name!r}")
    return calls, foreign


def _check_trim(job: Job, model: nn.Module, batch: Any, k: int) -> None:
    """Refuse a trim that changes the loss of the shortest samples: then the model looks at padding."""
    cutting = Cutting.of(job)
    piece = cutting.padded(batch, k)[-1]
    if job.trim is None or not cutting.by_cost or k == 1 or not count_items(piece, job.count):
        return
    with evaluating(model), torch.enable_grad():
        before, after = (
            float(ask(job, "loss", lambda one=one: job.loss(model, one)).detach())  # type: ignore[misc]
            for one in (piece, cutting.trimmed(piece))
        )
    # Reduced precisions of a model's own, and TF32, round by up to a percent.
    tolerance = _ROUNDING if not devices.is_accelerator(next(model.parameters()).device) else 100 * _ROUNDING
    if abs(after - before) > tolerance * abs(before):
        raise JobError(
            f"trim changes the loss of a micro-batch from {before:.6g} to {after:.6g}",
            where=f"job {job.name!r}",
            allowed="a trim of padding that the model does not look at; or trim=None",
        )


def _try_reduced_borders(job: Job, model: nn.Module, batch: Any, space: PlanSpace, locks: dict[str, str]) -> None:
    """Note in ``locks`` if the code between units fails on reduced-precision tensors, which uniform plans pass on."""
    plan = space.plan(accumulation_steps=1, precision=space.lowest_precision)
    if plan.uniform_reduced is None or not space.units:
        return
    with evaluating(model):
        try:
            controls.apply(model, plan)
            with torch.no_grad():
                job.loss(model, batch)
        except Exception as error:  # noqa: BLE001 - if the user's code raises anything, plans use fp32 borders
            locks["borders"] = f"code between units does not accept {space.lowest_precision} tensors: {error}"
        finally:
            controls.remove(model)


def _check_loss(loss: Any, where: str) -> None:
    allowed = "a scalar tensor, the mean over the items"
    if not isinstance(loss, torch.Tensor):
        raise JobError(f"loss returned {loss!r}", where=where, allowed=allowed)
    if loss.dim() != 0 or not loss.is_floating_point():
        kind = str(loss.dtype).removeprefix("torch.")
        raise JobError(f"loss returned a {kind} tensor of shape {tuple(loss.shape)}", where=where, allowed=allowed)
    if not loss.requires_grad:
        raise JobError("loss has no gradient", where=where, allowed="a loss computed from the model's parameters")


def accumulation_choices(job: Job, model: nn.Module, locks: dict[str, str]) -> tuple[int, ...]:
    """Return the allowed k; if k is locked, note the reason in ``locks``."""
    normalised = any(isinstance(module, _BatchNorm) for module in model.modules())
    if job.batching == "fixed" and normalised and len(job.accumulation_choices) > 1:
        locks["accumulation_steps"] = (
            "the model has BatchNorm, whose statistics depend on the micro-batch: under fixed batching k changes "
            "the gradient"
        )
        return (1,)
    return job.accumulation_choices


def _storages(job: Job, model: nn.Module, locks: dict[str, str]) -> tuple[Storage, ...]:
    reason = devices.lacks_copies_beside(_device_type(model))
    locks |= {f"storage {storage}": why for storage, why in excluded(job.storages, reason).items()}
    return offered(job.storages, reason)


def _precisions(model: nn.Module, locks: dict[str, str]) -> tuple[Precision, ...]:
    if controls.has_16_bit_parameters(model):
        locks["precision"] = "the model keeps 16-bit parameters, so there are no fp32 masters"
        return (Precision.INHERIT,)
    device = _device_type(model)
    for precision, reason in excluded_precisions(device).items():
        locks[f"precision {precision}"] = reason
    return useful_precisions(device)


def _device_type(model: nn.Module) -> str:
    return next((parameter.device.type for parameter in model.parameters()), "cpu")

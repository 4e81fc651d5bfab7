"""Attaching to a run: checks the arguments, finds the switchable units, and makes the tuner."""

from __future__ import annotations

import contextlib
import functools
import math
import platform
import weakref
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotune.agents.policy import PlanningPolicy
from autotune.choices import DEFAULT_STORAGES, Storage
from autotune.compiled import is_compiled
from autotune.errors import AttachError, InputError, JobError
from autotune.live.agreement import common_precisions
from autotune.live.argument_checks import (
    accumulated,
    budget_of,
    check,
    check_arguments,
    choice_of,
    inner_of,
    is_adaptive,
    limits_of,
    refuse_other_updates,
    refuse_unspread,
    updates_through,
)
from autotune.live.asked_budget import Size
from autotune.live.attached import Attached, Budget
from autotune.live.controller import Controller
from autotune.live.deciding import find_policy
from autotune.live.decision_log import LOG_NAME, LOG_VERSION, DecisionLog, make_run_folder
from autotune.live.deepspeed_engines import held_bytes, is_engine
from autotune.live.following_process import follow
from autotune.live.kill_switches import KILL_VARIABLE, is_disabled, stop_file_in
from autotune.live.limits import Limits, Mode, Stage
from autotune.live.rank_channel import Ranks, RanksError, is_flattened, is_spread
from autotune.live.settings import Settings, settings_of, without_settings
from autotune.live.tuner import LiveTuner
from autotune.mechanics import controls, devices
from autotune.mechanics.ambient import keeping_grad_mode
from autotune.mechanics.loop_signals import errors_ignored
from autotune.mechanics.precision import useful_precisions
from autotune.mechanics.sharded import ShardedUpdate
from autotune.mechanics.step_trace import TURN
from autotune.mechanics.stepping import Update
from autotune.mechanics.storage_acts import offered
from autotune.plan import PlanSpace, Precision
from autotune.report_to import chosen
from autotune.units import Unit, units_of

# The tuner of each model. A tuner references its model, so only weak references are kept here.
_attached: weakref.WeakKeyDictionary[nn.Module, weakref.ReferenceType[LiveTuner]] = weakref.WeakKeyDictionary()
# What is done once a tuner is garbage-collected.
_finalizers: weakref.WeakKeyDictionary[LiveTuner, Any] = weakref.WeakKeyDictionary()


def detach(model: nn.Module, reason: str = "detach() was called") -> None:
    """Detach the tuner of a model, if there is one, and leave the model as it was found.

    Args:
        model: the model that was passed to :func:`attach`, or the module within it.
        reason: written to the decision log.

    Raises:
        AttachError: if the model is not a module.
    """
    inner = inner_of(model)
    reference = _attached.pop(inner, None)
    tuner = None if reference is None else reference()
    if tuner is not None:
        tuner.detach(reason)
    controls.remove(inner)


@without_settings
@keeping_grad_mode()
def attach(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    policy: object = "planner",
    *,
    engine: Any = None,
    mode: str = "exact",
    stage: str = "act",
    memory_budget_bytes: Budget = None,
    clip_norm: float | None = None,
    total_steps: int | None = None,
    accumulation_steps: int | None = None,
    limits: Limits | None = None,
    runs_dir: str | Path | None = "runs",
    settings: Settings | None = None,
) -> LiveTuner:
    """Attach a policy to a training run in the caller's own loop.

    Args:
        model: the model as the loop calls it, on its device; it may be in ``DistributedDataParallel``.
        optimizer: its optimizer.
        policy: ``planner``, ``ppo`` (the planner with the trained policy), ``exact``, ``greedy``, a policy folder, a
            plan file, a decision log to repeat, or an object with ``decide(observation, plan)``.
        engine: the engine that ``deepspeed.initialize`` returned, in place of model and optimizer. It needs mode
            ``exact``, and ZeRO stage 3 is only observed. The engine clips, and its ``gradient_accumulation_steps``
            replaces ``accumulation_steps``.
        mode: ``exact`` changes only storage, so training stays bit-identical. ``rounding`` also changes k at a fixed
            batch, if a trial shows that cutting a batch keeps its gradient. ``tolerant`` also changes the precision of
            units.
        stage: ``observe`` only measures and logs decisions; ``act`` switches plans.
        memory_budget_bytes: bytes, a size (``"20GiB"``), or a function that returns either and is called now and before
            every step; ``None`` for the device's memory. It limits the memory of tensors; ``"20GiB:reserved"`` limits
            what the accelerator's allocator reserves, which ``nvidia-smi`` shows.
        clip_norm: largest 2-norm of the gradient, to which ``step()`` clips; ``None`` never clips.
        total_steps: length of the run in optimizer steps, if known.
        accumulation_steps: batches that the loop itself accumulates before each update. The tuner does not change it.
            ``None`` is 1; in mode ``exact``, the first steps of a loop of ``begin_step()`` and ``end_step()`` show it,
            also where one batch goes through the model several times (sharpness-aware minimisation).
        limits: limits on what the tuner may do.
        runs_dir: folder for the run directory with the decision log; ``None`` writes nothing.
        settings: rarely needed settings: units, choices of k, adaptive batching, the run's name, MLflow.

    Raises:
        AttachError: if the run cannot be attached to, with the remedy; the model stays untouched.
        PolicyFileError: if a policy folder is not a policy.
    """
    settings = settings_of(settings)
    check_arguments(clip_norm=clip_norm, total_steps=total_steps, runs_dir=runs_dir)
    chosen_mode, chosen_stage = choice_of(Mode, mode, "mode"), choice_of(Stage, stage, "stage")
    sharded = None if engine is None else updates_through(engine, model, optimizer, chosen_mode, clip_norm)
    if sharded is not None:
        model, optimizer = engine, sharded.optimizer
        accumulation_steps = engine.gradient_accumulation_steps()
    elif is_engine(model):
        raise AttachError("model is a DeepSpeed engine", where="attach", allowed="autotune.attach(engine=engine)")
    inner = inner_of(model)
    _refuse_overlap(inner)
    check(inner, optimizer, sharded=sharded is not None)
    if sharded is None:
        refuse_unspread(model, inner, clip_norm)
        refuse_other_updates(inner, optimizer, chosen_mode)
    assert model is not None
    assert optimizer is not None
    limits = limits_of(limits, sharded=sharded is not None)
    batches = 1 if accumulation_steps is None else accumulated(accumulation_steps)
    adaptive = is_adaptive(settings, chosen_mode, batches, parallel=model is not inner)
    if chosen(settings.report_to) != "none" and runs_dir is None:
        problem = f"report_to is {settings.report_to!r} and runs_dir is None"
        raise AttachError(problem, where="attach", allowed="a folder for the run's log")
    budget = budget_of(memory_budget_bytes)
    if is_disabled():
        device = devices.device_of(inner)
        update = sharded or _update(device, inner, optimizer, clip_norm)
        return _inert(inner, model, optimizer, update, total_steps)
    # In a notebook, a loop may have been interrupted within a traced step.
    TURN.end_own()
    found = find_policy(policy)
    space, locks = _space(inner, settings, chosen_mode, batches, adaptive=adaptive)
    unfit = _unfit(space, model, inner, sharded)
    if unfit is not None:
        chosen_stage, locks["units"] = Stage.OBSERVE, f"{unfit}: observed only"
    ranks = Ranks(model, limits.rank_timeout_s)
    space = _agreed(space, locks, ranks)
    facts = Attached(
        name=settings.name or type(inner).__name__,
        model=inner,
        optimizer=optimizer,
        device=devices.device_of(inner),
        space=space,
        locks=locks,
        mode=chosen_mode,
        stage=chosen_stage,
        limits=limits,
        budget=budget,
        total_steps=None if total_steps is None else int(total_steps),
        adaptive=adaptive,
        lr_rule=settings.lr_rule,
        spread=is_spread(inner),
        bucket_bytes=_bucket_bytes(model) if sharded is None else held_bytes(sharded, inner),
        accumulation_steps=batches,
        learns_accumulation=accumulation_steps is None and chosen_mode is Mode.EXACT and not ranks.many,
    )
    folder, log = _log_of(facts, found, None if runs_dir is None or ranks.rank else Path(runs_dir))
    if settings.report_to != "none" and folder is not None:
        follow(folder, settings.report_to)
    controller = Controller(facts, found, log, ranks)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        controller.run.times.watch_reducer(model)
    leaving = contextlib.ExitStack()
    leaving.callback(controller.close)
    tuner = LiveTuner(
        facts,
        model,
        sharded or _update(facts.device, inner, optimizer, clip_norm),
        controller,
        stop_file=stop_file_in(folder),
        folder=folder,
        on_detach=functools.partial(_forget, weakref.ref(inner), leaving),
    )
    _attached[inner] = weakref.ref(tuner)
    # If the tuner is garbage-collected, for example after an exception, the model is restored.
    finalizer = _finalizers[tuner] = weakref.finalize(tuner, _left_behind, weakref.ref(inner), leaving)
    finalizer.atexit = False
    return tuner


def leave_to_model(tuner: LiveTuner) -> None:
    """Let a tuner live as long as its model, whose hooks hold it, and not only as long as its caller keeps it."""
    # The finalizer, which all finalizers' registry holds, would keep the model alive.
    if (finalizer := _finalizers.pop(tuner, None)) is not None:
        finalizer.detach()


def _forget(reference: weakref.ReferenceType[nn.Module], leaving: contextlib.ExitStack) -> None:
    # A detached tuner must not keep its controller alive.
    leaving.pop_all()
    model = reference()
    if model is not None:
        _attached.pop(model, None)


def _left_behind(reference: weakref.ReferenceType[nn.Module], leaving: contextlib.ExitStack) -> None:
    """Restore a model whose tuner is gone, unless the tuner did so or another one has been attached."""
    model = reference()
    if model is not None and model in _attached and _attached[model]() is None:
        del _attached[model]
        with errors_ignored():
            leaving.close()
        controls.remove(model)


def _refuse_overlap(model: nn.Module) -> None:
    """Raise if a tuner is attached to a model with which this one shares modules."""
    parts = set(model.modules())
    for other, reference in list(_attached.items()):
        if reference() is not None and (other in parts or model in set(other.modules())):
            what = "this model" if other is model else f"a {type(other).__name__} that shares modules with this model"
            raise AttachError(
                f"a tuner is attached to {what} already", where="attach", allowed="one at a time; detach() it first"
            )


def _log_of(facts: Attached, policy: object, runs: Path | None) -> tuple[Path | None, DecisionLog]:
    """Return a new run directory and its log; without a folder for runs, ``None`` and a log without a file."""
    config = {
        "mode": facts.mode,
        "stage": facts.stage,
        "batching": "adaptive" if facts.adaptive else "fixed",
        "policy": getattr(policy, "name", type(policy).__name__),
    }
    folder = None if runs is None else make_run_folder(runs, facts.name, config)
    log = DecisionLog(None if folder is None else folder / LOG_NAME)
    log.write(
        "attached",
        0,
        version=LOG_VERSION,
        model=facts.name,
        units=[unit.name for unit in facts.space.units],
        recomputable=facts.space.recomputable,
        locks=facts.locks,
        total_steps=facts.total_steps,
        environment=_environment(facts.device),
        baseline=facts.space.baseline(),
        placement=_placement(facts, policy),
        **config,
    )
    return folder, log


def _placement(facts: Attached, policy: object) -> str:
    """Describe what decides about storage: the policy, or each batch's size and the current budget."""
    if not facts.limits.follow_batches or not isinstance(policy, PlanningPolicy):
        return f"as the policy decides, where a switch is predicted to gain at least {facts.limits.gain_frac:.0%}"
    if facts.mode is not Mode.EXACT:
        return "by batch and budget; the policy decides the rest"
    if devices.is_accelerator(facts.device):
        return "by batch and budget; the policy decides what is left free of the device's memory"
    return "by batch and budget alone; the policy has no effect"


def _environment(device: torch.device) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device.type,
        "device_name": devices.device_name(device) if devices.is_accelerator(device) else platform.machine(),
        "fp32": devices.arithmetic_shown(devices.fp32_arithmetic(device)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _inert(
    inner: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer, update: Update, total_steps: int | None
) -> LiveTuner:
    """Return a tuner that only makes the loop's updates."""
    facts = Attached(
        name=type(inner).__name__,
        model=inner,
        optimizer=optimizer,
        device=devices.device_of(inner),
        space=PlanSpace(units=(), accumulation_choices=(1,), precisions=(Precision.INHERIT,)),
        locks={"units": f"{KILL_VARIABLE} is set"},
        mode=Mode.EXACT,
        stage=Stage.OBSERVE,
        limits=Limits(),
        budget=Size(None),
        total_steps=None if total_steps is None else int(total_steps),
        accumulation_steps=1,
    )
    return LiveTuner(facts, model, update, None, stop_file=None, folder=None, on_detach=lambda: None)


def _update(
    device: torch.device, inner: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None
) -> Update:
    whole_norm = None
    if is_flattened(inner):
        root: Any = inner
        # With an infinite limit it clips nothing and returns the norm over all ranks.
        whole_norm = functools.partial(root.clip_grad_norm_, math.inf)
    return Update(optimizer, clip_norm=clip_norm, device_type=device.type, whole_norm=whole_norm)


def _unfit(space: PlanSpace, model: nn.Module, inner: nn.Module, sharded: ShardedUpdate | None) -> str | None:
    """Return the reason why nothing can be switched; ``None`` if something can."""
    if not space.units:
        return "the model has no run of like blocks, and no part to tune"
    if is_flattened(inner):
        return "FullyShardedDataParallel gathers flattened weights by hooks of its own (fully_shard() does not)"
    if is_compiled(model) or is_compiled(inner):
        return "the model is compiled as a whole, and a switch would compile it again"
    if sharded is not None and sharded.stage == 3:
        return "ZeRO stage 3 gathers weights by hooks in each unit"
    return None


def _space(
    model: nn.Module,
    settings: Settings,
    mode: Mode,
    accumulation_steps: int,
    *,
    adaptive: bool,
) -> tuple[PlanSpace, dict[str, str]]:
    locks: dict[str, str] = {}
    found = _units(model, settings.units)
    choices = tuple(settings.accumulation_choices)
    precisions: tuple[Precision, ...] = (Precision.INHERIT,)
    if mode is not Mode.TOLERANT:
        locks["precision"] = f"mode {mode} leaves it as it is"
    elif controls.has_16_bit_parameters(model):
        locks["precision"] = "the model keeps 16-bit parameters, so there are no fp32 masters"
    else:
        device = devices.device_of(model).type
        precisions = (Precision.INHERIT, *(p for p in useful_precisions(device) if p.is_16_bit))
    if mode is Mode.EXACT:
        locks["accumulation_steps"] = "mode exact leaves it as it is"
        choices = (accumulation_steps,)
    elif accumulation_steps > 1:
        locks["accumulation_steps"] = f"the loop accumulates {accumulation_steps} batches by itself"
        choices = (accumulation_steps,)
    space = PlanSpace(
        units=found,
        accumulation_choices=choices,
        precisions=precisions,
        k_splits=not adaptive,
        storages=_storages(settings, mode, locks),
    )
    return space, locks


def _storages(settings: Settings, mode: Mode, locks: dict[str, str]) -> tuple[Storage, ...]:
    """Return the storages that plans may choose; note the others that were asked for in ``locks``."""
    tolerant = mode is Mode.TOLERANT
    for name in settings.storages:
        if Storage(name).approximates and not tolerant:
            problem = f"storages names {name!r}, with which gradients are approximate, and mode is {mode}"
            raise AttachError(problem, where="attach", allowed="mode='tolerant', or exact storages alone")
    try:
        asked = offered(settings.storages)
    except InputError as error:
        raise AttachError(error.problem, where=error.where, allowed=error.allowed) from error
    for storage in asked:
        if storage.compile_budget:
            locks[str(storage)] = "attached runs compile no units"
        elif storage.approximates and not tolerant:
            locks[str(storage)] = "gradients would be approximate, which mode tolerant allows"
        elif storage.needs_accelerator:
            locks[str(storage)] = "attached runs do not copy activations to the host"
    return tuple(storage for storage in asked if str(storage) not in locks)


def _agreed(space: PlanSpace, locks: dict[str, str], ranks: Ranks) -> PlanSpace:
    """Return the plans with precisions that all ranks have found useful; note the others in ``locks``.

    Ranks learn costs from different batches, so only storages whose costs can be bounded are theirs.
    """
    try:
        precisions = common_precisions(ranks, space.precisions)
    except RanksError as error:
        raise AttachError(str(error), where="attach", allowed="the same call on every rank") from error
    for precision in set(space.precisions).difference(precisions):
        locks[str(precision)] = "another rank has no fast path for it"
    storages = DEFAULT_STORAGES if ranks.many else space.storages
    for storage in set(space.storages).difference(storages):
        locks[str(storage)] = "it is not chosen on several ranks"
    return replace(space, precisions=precisions, storages=storages)


def _units(model: nn.Module, names: Sequence[str] | None) -> tuple[Unit, ...]:
    try:
        return units_of(model, names)
    except JobError as error:
        raise AttachError(error.problem, where=f"attach, {error.where}", allowed=error.allowed) from error


def _bucket_bytes(model: nn.Module) -> int:
    """Return the bytes of the buckets in which ``DistributedDataParallel`` reduces gradients."""
    if not isinstance(model, nn.parallel.DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)

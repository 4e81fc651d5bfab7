"""A callback and a Trainer that attach a tuner to training with the ``transformers`` library."""

from __future__ import annotations

import inspect
import logging
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from autotune.errors import AttachError
from autotune.live.integrations.attaching_callback import WHERE, Attaches
from autotune.live.integrations.micro_steps import ForwardPasses, MicroSteps
from autotune.live.integrations.retry import Retry, alone
from autotune.live.limits import Mode, Stage
from autotune.live.tuner import LiveTuner
from autotune.mechanics import cutting, devices, randomness
from autotune.mechanics.watching_hooks import WatchingHook

logger = logging.getLogger(__name__)

# The smallest batch that is halved if memory runs out: its half can still be cut in two.
_LEAST_HALVED = 4
# Methods of a Trainer in which an exception detaches the tuner. Older versions of the library have no ``_run_epoch``.
_GUARDED = ("_run_epoch", "training_step")
# Callbacks that have attached. An exception outside of these methods leaves them so.
_callbacks: weakref.WeakSet[_Callback] = weakref.WeakSet()


class _Recomputing:
    """The library's own recomputation of blocks, which a tuner replaces while the model runs forward in training.

    Everything else that the library does for checkpointing, such as dropping caches, stays the same. A loss that calls
    parts of the model, and not the model itself, is left with the library's recomputation.

    Args:
        model: the model.
        tuner: the tuner that recomputes its units.
    """

    def __init__(self, model: nn.Module, tuner: LiveTuner) -> None:
        self._tuner = tuner
        units = tuner.recomputable
        # By name, the blocks that the library would recompute, with their recompute functions.
        self._blocks = {
            name: (part, part.__dict__["_gradient_checkpointing_func"])
            for name, part in model.named_modules()
            if getattr(part, "gradient_checkpointing", False)
            and "_gradient_checkpointing_func" in part.__dict__
            and any(f"{one}.".startswith(f"{name}.") or f"{name}.".startswith(f"{one}.") for one in units)
        }
        watching = WatchingHook(self._before, model), WatchingHook(self._after, model)
        self._handles = [
            model.register_forward_pre_hook(watching[0]),
            model.register_forward_hook(watching[1], always_call=True),
        ]
        if self._blocks:
            logger.info(
                "gradient_checkpointing recomputes none of its %d modules until detach(): the tuner recomputes what "
                "the budget demands",
                len(self._blocks),
            )

    def look_at_locks(self) -> None:
        """Leave blocks that the tuner may not recompute to the library."""
        if self._blocks:
            locks = self._tuner.locks
            self._blocks = {name: found for name, found in self._blocks.items() if name not in locks}

    def close(self) -> None:
        """Leave all blocks to the library."""
        self._give_back()
        self._blocks = {}
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, _args: object) -> None:
        if self._tuner.attached and module.training and torch.is_grad_enabled():
            for part, recompute in self._blocks.values():
                # Other code may have changed it meanwhile.
                if part._gradient_checkpointing_func is recompute:
                    # From the standard library, so that a copied or pickled model does not need this package.
                    part._gradient_checkpointing_func = operator.call

    def _after(self, _module: nn.Module, _args: object, _output: object) -> None:
        self._give_back()

    def _give_back(self) -> None:
        for part, recompute in self._blocks.values():
            if part._gradient_checkpointing_func is operator.call:
                part._gradient_checkpointing_func = recompute


class _Callback(Attaches, TrainerCallback):
    """Base of callbacks that attach when training begins, and restore the model when it ends."""

    framework = "the Trainer"
    _recomputing: _Recomputing | None = None
    _training: Trainer | None = None

    def detach(self, reason: str = "detach() was called") -> None:
        """Restore the model; training continues."""
        self._training = None
        _callbacks.discard(self)
        if self.tuner is not None:
            self.tuner.detach(reason)
        if self._recomputing is not None:
            self._recomputing.close()
            self._recomputing = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the blocks that the tuner may not recompute to the library."""
        if self._recomputing is not None:
            self._recomputing.look_at_locks()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Attach."""
        # A run that ended with an exception, such as out of memory before a retry, leaves its tuner attached.
        self.detach("another training begins")
        if state.max_steps <= state.global_step:
            # Nothing is trained.
            return
        if model is None or optimizer is None:
            raise AttachError("the Trainer passed no model and optimizer", where=WHERE, allowed="a Trainer's run")
        _check(args, model, optimizer)
        _detach_left()
        self._training = _running_trainer()
        called = self._callable(args, model)
        self.tuner = self._attach(
            called,
            getattr(optimizer, "optimizer", optimizer),
            total_steps=state.max_steps,
            accumulation_steps=args.gradient_accumulation_steps,
            is_first=state.is_world_process_zero,
        )
        _callbacks.add(self)
        if self.tuner.attached:
            self._recomputing = _Recomputing(model, self.tuner)
        self._watch(called, self.tuner)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the model."""
        self.detach("the training ended")

    def _callable(self, args: TrainingArguments, model: nn.Module) -> nn.Module:
        """Return the model as the training calls it."""
        wrapped = getattr(self._training, "model_wrapped", None)
        return wrapped if isinstance(wrapped, nn.parallel.DistributedDataParallel) else model

    def _watch(self, model: nn.Module, tuner: LiveTuner) -> None:
        """Observe events that the Trainer does not report; the model is the one that the training calls."""


class AutotuneCallback(_Callback):
    """Callback that switches which activations are recomputed during training, and in one mode also the precision.

    In mode ``exact`` training stays bit-identical. In mode ``tolerant`` units may compute in 16 bits if a trial on the
    second step's batch shows that the gradient differs little; for the trial, the model must return its loss, as models
    do if the batch has labels. The Trainer fixes k; :class:`TunedTrainer` tunes it.

    Plans change between optimizer steps. With gradient accumulation a step is planned for the largest micro-batch so
    far, since the Trainer does not show later ones in advance. ``Limits.statistics_every`` is not used: the Trainer
    shows gradients only after clipping. An exception in an epoch detaches the tuner. The Trainer does not tell of one
    outside of epochs: then the next training detaches it, or :meth:`detach`.

    ::

        trainer = Trainer(model, args, ..., callbacks=[AutotuneCallback(memory_budget_bytes="20GiB")])

    Arguments and errors are those of :class:`autotune.live.integrations.attaching_callback.Attaches`.
    """

    modes = (Mode.EXACT, Mode.TOLERANT)
    fixed = "k"
    _micro_steps: MicroSteps | None = None
    _guarded: Trainer | None = None

    def detach(self, reason: str = "detach() was called") -> None:
        """Restore the model; training continues."""
        if self._micro_steps is not None:
            self._micro_steps.close()
            self._micro_steps = None
        if self._guarded is not None:
            for name in _GUARDED:
                if isinstance(vars(self._guarded).get(name), _Guarded):
                    delattr(self._guarded, name)
            self._guarded = None
        super().detach(reason)

    def _callable(self, args: TrainingArguments, model: nn.Module) -> nn.Module:
        if self._mode == Mode.TOLERANT and args.world_size > 1:
            raise AttachError(
                f"mode is tolerant, over {args.world_size} ranks",
                where=WHERE,
                allowed="exact, or tolerant in TunedTrainer or a loop of your own",
            )
        return super()._callable(args, model)

    def _watch(self, model: nn.Module, tuner: LiveTuner) -> None:
        self._micro_steps = MicroSteps(model, tuner)
        self._guarded = self._training
        for name in _GUARDED:
            if hasattr(self._guarded, name) and name not in vars(self._guarded):
                setattr(self._guarded, name, _Guarded(getattr(self._guarded, name), self.detach))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note that a step begins."""
        super().on_step_begin(args, state, control, **kwargs)
        if self._micro_steps is not None:
            self._micro_steps.begin()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note that another micro-batch follows."""
        if self._micro_steps is not None:
            self._micro_steps.next()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note that the update follows."""
        if self._micro_steps is not None:
            self._micro_steps.update()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Let the tuner decide about the next steps."""
        if self._micro_steps is not None:
            if not self._micro_steps.micro_batches and self.tuner is not None and self.tuner.attached:
                reason = "a step did not call the model itself: its loss may call parts of it"
                logger.warning("%s; the tuner leaves this run, and no memory budget is kept", reason)
                self.tuner.detach(reason)
            self._micro_steps.end(stepped=not getattr(optimizer, "step_was_skipped", False))


class _Guarded:
    """A method of a Trainer; an exception in it detaches the tuner before it ends the training.

    Args:
        method: the Trainer's own.
        detach: detaches, given a reason.
    """

    def __init__(self, method: Callable[..., Any], detach: Callable[[str], None]) -> None:
        self._method = method
        self._detach = detach

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method."""
        try:
            return self._method(*args, **kwargs)
        except BaseException as error:
            self._detach(f"the training ended with {type(error).__name__}")
            raise


def _detach_left() -> None:
    """Detach the tuners that trainings left attached because an exception ended them."""
    running = {id(one) for top in sys._current_frames().values() for one in _trainers(top, "train")}
    for callback in list(_callbacks):
        if callback._training is not None and id(callback._training) not in running:
            callback.detach("an exception ended the training")


def _running_trainer() -> Trainer | None:
    """Return the Trainer whose training calls this function: callbacks are not handed it."""
    return next(_trainers(inspect.currentframe()), None)


def _trainers(frame: FrameType | None, method: str | None = None) -> Iterator[Trainer]:
    """Yield the Trainers whose methods, or whose methods of one name, run in a frame or in its callers."""
    while frame is not None:
        if method in (None, frame.f_code.co_name) and isinstance(caller := frame.f_locals.get("self"), Trainer):
            yield caller
        frame = frame.f_back


class TunedTrainer(Trainer):
    """A Trainer that cuts each batch into as many micro-batches as memory requires, and may lower precision.

    Steps, logs, the learning-rate schedule, ``max_steps`` and resuming work as in the Trainer, which sees whole
    batches. Losses and gradients are weighted as the Trainer weights them. k stays 1 if cutting a batch in two changed
    its gradient in the first steps (BatchNorm, contrastive losses); ``trainer.tuner.locks`` has the reason.

    If memory runs out in a step's forward and backward passes, the step is run again with the next larger k, and
    smaller values are locked: see :mod:`autotune.live.integrations.retry`. The error is raised in mode ``exact``, in an
    update, if a loss has modified its batch, and if the batch cannot be cut further; with ``auto_find_batch_size`` the
    Trainer then begins again with a smaller batch. State that ``compute_loss`` changed in a failed attempt is not
    restored.

    ::

        trainer = TunedTrainer(model, args, ..., tuning={"mode": "rounding", "memory_budget_bytes": "20GiB"})

    Args:
        *args: as for ``Trainer``; ``gradient_accumulation_steps`` must be 1.
        tuning: arguments of :class:`autotune.live.integrations.attaching_callback.Attaches`.
        **kwargs: as for ``Trainer``.

    Raises:
        AttachError: when training begins, if the run cannot be attached to, with the remedy.
    """

    def __init__(self, *args: Any, tuning: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Whether micro-batches' losses sum to the step's loss; ``None`` before the first step.
        self._shares: bool | None = None
        given: object = tuning
        if given is not None and not isinstance(given, Mapping):
            problem = f"tuning is of type {type(tuning).__name__}"
            raise AttachError(
                problem, where="TunedTrainer", allowed='a dict of arguments, such as {"mode": "rounding"}'
            )
        self._tuning = _Tuning(self, **(tuning or {}))
        self.add_callback(self._tuning)

    @property
    def tuner(self) -> LiveTuner | None:
        """Return the tuner of the current or last training run; ``None`` before the first."""
        return self._tuning.tuner

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; if an exception ends training, detach the tuner."""
        try:
            return super().train(*args, **kwargs)
        except BaseException as error:
            self._tuning.detach(f"the training ended with {type(error).__name__}")
            raise

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward for each micro-batch of a batch; return the batch's loss."""
        tuner, retry, passes = self.tuner, self._tuning.retry, self._tuning.passes
        # A batch that does not fit is still cut after the tuner has detached.
        if (
            tuner is None
            or retry is None
            or passes is None
            or not (tuner.attached or tuner.plan.accumulation_steps > 1)
        ):
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        # As the Trainer does later: steps after an evaluation would otherwise seem to be of another kind.
        model.train()
        if self._shares is None:
            self._shares = self._losses_are_shares(model, inputs, num_items_in_batch)

        def run_one(piece: Any) -> torch.Tensor:
            passes.begin()
            with self._dividing_by(1.0 if self._shares else 1.0 / tuner.weight):
                loss = super(TunedTrainer, self).training_step(model, piece, num_items_in_batch)
            passes.forget()
            tuner.accumulated(loss)
            return loss

        return retry.run(inputs, run_one)

    @contextmanager
    def _dividing_by(self, divisor: float) -> Iterator[None]:
        """Let the Trainer divide losses by another number than its accumulated batches; 1 changes nothing."""
        former = self.current_gradient_accumulation_steps, getattr(self, "loss_is_scaled_for_ga", None)
        try:
            if divisor != 1.0:
                self.current_gradient_accumulation_steps = divisor  # type: ignore[assignment]
                self.loss_is_scaled_for_ga = False
            yield
        finally:
            self.current_gradient_accumulation_steps, self.loss_is_scaled_for_ga = former

    @torch.no_grad()
    def _losses_are_shares(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> bool:
        """Return whether the losses of a batch's halves sum to its own, as where ``num_items_in_batch`` is used."""
        while True:
            try:
                return self._halves_sum(model, inputs, num_items_in_batch)
            except Exception as error:
                if not devices.is_out_of_memory(error) or cutting.num_samples(inputs) < _LEAST_HALVED:
                    raise
            devices.release(self.args.device)
            inputs = cutting.split(inputs, 2)[0]

    def _halves_sum(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> bool:
        modes = {module: module.training for module in model.modules()}
        batch = self._prepare_inputs(inputs)
        halves = cutting.split(batch, 2)
        with randomness.isolated(), alone(model), self.compute_loss_context_manager():
            try:
                model.eval()
                whole, *parts = (
                    float(self.compute_loss(model, one, num_items_in_batch=num_items_in_batch))  # type: ignore[arg-type]
                    for one in (batch, *halves)
                )
            finally:
                for module, training in modes.items():
                    module.training = training
        sizes = [cutting.num_samples(half) for half in halves]
        mean = sum(size * part for size, part in zip(sizes, parts, strict=True)) / sum(sizes)
        return abs(sum(parts) - whole) < abs(mean - whole)


class _Tuning(_Callback):
    """Callback of a ``TunedTrainer`` that attaches a tuner and reports the end of each step."""

    modes = tuple(Mode)
    tunes_k = True
    retry: Retry | None = None
    passes: ForwardPasses | None = None
    _handles: Sequence[Any] = ()

    def __init__(self, trainer: TunedTrainer, **options: Any) -> None:
        super().__init__(**options)
        self._trainer = trainer

    def detach(self, reason: str = "detach() was called") -> None:
        """Restore the model; training continues."""
        for handle in self._handles:
            handle.remove()
        self._handles = ()
        if self.passes is not None:
            self.passes.forget()
        super().detach(reason)

    def _callable(self, args: TrainingArguments, model: nn.Module) -> nn.Module:
        if args.gradient_accumulation_steps > 1:
            raise AttachError(
                f"gradient_accumulation_steps is {args.gradient_accumulation_steps}",
                where="TunedTrainer",
                allowed="1, with per_device_train_batch_size multiplied by it: the tuner cuts the batch",
            )
        wrapped: nn.Module = self._trainer.model_wrapped
        return wrapped

    def _watch(self, model: nn.Module, tuner: LiveTuner) -> None:
        self.passes = ForwardPasses(tuner, [one for one in model.parameters() if one.requires_grad])
        self._handles = (
            model.register_forward_pre_hook(WatchingHook(self._forward_begins, model)),
            model.register_forward_hook(WatchingHook(self._forward_ended, model)),
        )
        optimizer: Any = self._trainer.optimizer
        self.retry = Retry(
            tuner,
            self._trainer.model_wrapped,
            getattr(optimizer, "optimizer", optimizer),
            rehearses=self._mode != Mode.EXACT and self._stage == Stage.ACT,
        )

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Let the tuner decide about the next steps."""
        if self.tuner is not None:
            self.tuner.end_step(stepped=not getattr(optimizer, "step_was_skipped", False))

    def _forward_begins(self, module: nn.Module, _args: object) -> None:
        passes = self.passes
        if passes is not None and passes.has_returned and module.training and torch.is_grad_enabled():
            passes.go_on()

    def _forward_ended(self, module: nn.Module, _args: object, output: Any) -> None:
        if self.passes is not None and module.training and torch.is_grad_enabled():
            self.passes.returned(output)


def _check(args: TrainingArguments, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse models and arguments that the tuner does not support."""
    parallel = str(getattr(getattr(optimizer, "accelerator_state", None), "distributed_type", ""))
    if args.torch_compile:
        raise AttachError(
            "torch_compile is set, and each switch would compile the model again",
            where=WHERE,
            allowed="torch_compile=False, or compiled blocks: block = torch.compile(block)",
        )
    if args.deepspeed or args.fsdp or parallel.endswith(("DEEPSPEED", "FSDP", "MEGATRON_LM")):
        raise AttachError(
            "the model is sharded by DeepSpeed, FSDP or Megatron", where=WHERE, allowed="one device, or DDP"
        )
    if args.n_gpu > 1:
        raise AttachError(
            f"the Trainer runs {args.n_gpu} devices by DataParallel", where=WHERE, allowed="torchrun, for DDP"
        )

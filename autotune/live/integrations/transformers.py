"""Attach to a run of the ``transformers`` library's Trainer, as one of its callbacks or as a Trainer of its own."""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from autotune.errors import AttachError
from autotune.live.integrations.attaching_callback import WHERE, Attaches
from autotune.live.integrations.micro_steps import MicroSteps
from autotune.live.integrations.retry import Retry, alone
from autotune.live.limits import Mode, Stage
from autotune.live.tuner import LiveTuner
from autotune.mechanics import devices, randomness, stepping
from autotune.mechanics.watching_hooks import WatchingHook

logger = logging.getLogger(__name__)

# Samples of a batch that still has two halves to be told apart.
_LEAST_HALVED = 4


class _Callback(Attaches, TrainerCallback):
    """Attach when a training begins, and leave the model as it was found when it ends."""

    framework = "the Trainer"
    # By name, the blocks that the library recomputes, what recomputes each of them, while the tuner does so instead.
    _taken_over: Mapping[str, tuple[Any, Any]] = MappingProxyType({})

    def detach(self, reason: str = "detach() was called") -> None:
        """Leave the model as it was found; the training goes on."""
        if self.tuner is not None:
            self.tuner.detach(reason)
        self._give_back()

    def _give_back(self, names: Collection[str] | None = None) -> None:
        """Let the library recompute blocks again, where nobody has switched that on or off meanwhile."""
        given = self._taken_over if names is None else {name: self._taken_over[name] for name in names}
        for part, recompute in given.values():
            if part._gradient_checkpointing_func is operator.call:
                part._gradient_checkpointing_func = recompute
        self._taken_over = {name: found for name, found in self._taken_over.items() if name not in given}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give back what the tuner may not recompute, and all that was taken over once it has left by itself."""
        if self.tuner is not None and self._taken_over:
            locks = self.tuner.locks
            self._give_back([name for name in self._taken_over if name in locks] if self.tuner.attached else None)

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
        # A training that was ended by an exception (out of memory, say, and then tried again) leaves its tuner behind.
        self.detach("another training begins")
        if model is None or optimizer is None:
            raise AttachError("the Trainer hands over no model and optimizer", where=WHERE, allowed="a Trainer's run")
        _check(args, model, optimizer)
        self.tuner = self._attach(
            self._callable(args, model),
            getattr(optimizer, "optimizer", optimizer),
            total_steps=state.max_steps,
            accumulation_steps=args.gradient_accumulation_steps,
            is_first=state.is_world_process_zero,
        )
        if self._stage == Stage.ACT and self.tuner.attached:
            self._take_over(model)
        self._watch(model, self.tuner)

    def _take_over(self, model: nn.Module) -> None:
        """Let blocks that the library recomputes just run: from now on the tuner says which are recomputed.

        All else that the library does where its switch is on (it drops caches, say) stays, and so every bit.
        """
        found = {
            name: (part, part.__dict__["_gradient_checkpointing_func"])
            for name, part in model.named_modules()
            if getattr(part, "gradient_checkpointing", False) and "_gradient_checkpointing_func" in part.__dict__
        }
        for part, _ in found.values():
            # Of the standard library: a model that is copied or pickled needs nothing of this package.
            part._gradient_checkpointing_func = operator.call
        self._taken_over = found
        if found:
            logger.info(
                "gradient_checkpointing recomputes none of its %d modules until detach(): the tuner recomputes what "
                "the budget demands",
                len(found),
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the model as it was found."""
        self.detach("the training ended")

    def _callable(self, args: TrainingArguments, model: nn.Module) -> nn.Module:
        """Return the model as the training calls it."""
        return model

    def _watch(self, model: nn.Module, tuner: LiveTuner) -> None:
        """Look at what the Trainer does not say."""


class AutotuneCallback(_Callback):
    """Switch what is kept for backward and what is recomputed while a Trainer trains, and the precision if it may.

    In mode ``exact`` not one bit of training changes. In mode ``tolerant`` units may compute in 16 bits, if a gradient
    in 16 bits was seen to differ little on the second step's batch: the model must return its loss, as it does where
    the batch has labels. k is the Trainer's; :class:`TunedTrainer` tunes it.

    Plans change between optimizer steps. With gradient accumulation a step is planned for the largest micro-batch so
    far, since the Trainer shows each micro-batch as it comes. ``Limits.statistics_every`` is not used: the Trainer
    shows its gradients clipped. A training that ends with an exception is not reported to callbacks; call
    :meth:`detach` to take off what was attached.

    ::

        trainer = Trainer(model, args, ..., callbacks=[AutotuneCallback(memory_budget_bytes="20GiB")])

    Arguments and errors are those of :class:`autotune.live.integrations.attaching_callback.Attaches`.
    """

    modes = (Mode.EXACT, Mode.TOLERANT)
    fixed = "k"
    _micro_steps: MicroSteps | None = None

    def detach(self, reason: str = "detach() was called") -> None:
        """Leave the model as it was found; the training goes on."""
        if self._micro_steps is not None:
            self._micro_steps.close()
            self._micro_steps = None
        super().detach(reason)

    def _callable(self, args: TrainingArguments, model: nn.Module) -> nn.Module:
        if self._mode == Mode.TOLERANT and args.world_size > 1:
            raise AttachError(
                f"mode is tolerant, over {args.world_size} ranks",
                where=WHERE,
                allowed="exact, or tolerant in TunedTrainer or a loop of your own",
            )
        return model

    def _watch(self, model: nn.Module, tuner: LiveTuner) -> None:
        self._micro_steps = MicroSteps(model, tuner)

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
            self._micro_steps.end(stepped=not getattr(optimizer, "step_was_skipped", False))


class TunedTrainer(Trainer):
    """A Trainer that cuts each batch in as many micro-batches as its memory demands, and may lower precision.

    Steps, logs, the learning rate's schedule, ``max_steps`` and resuming are the Trainer's: it sees whole batches.
    Losses and gradients are weighed as it weighs them, and k stays 1 where a batch that was cut in two on the first
    steps did not keep its gradient (BatchNorm, contrastive losses); ``trainer.tuner.locks`` has the reason.

    Where memory runs out in a step's forward and backward passes, the step is run again with the next larger k, and
    smaller ones are locked: see :mod:`autotune.live.integrations.retry`. The error passes in mode ``exact``, in an
    update, where a loss has written to its batch, and where the batch can be cut no further; with
    ``auto_find_batch_size`` the Trainer then begins again with a smaller one. What ``compute_loss`` notes by itself, it
    notes for the failed attempt as well.

    ::

        trainer = TunedTrainer(model, args, ..., tuning={"mode": "rounding", "memory_budget_bytes": "20GiB"})

    Args:
        *args: as ``Trainer`` takes them; ``gradient_accumulation_steps`` must be 1.
        tuning: arguments of :class:`autotune.live.integrations.attaching_callback.Attaches`.
        **kwargs: as ``Trainer`` takes them.

    Raises:
        AttachError: when training begins, naming what cannot be attached to and the remedy.
    """

    def __init__(self, *args: Any, tuning: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Whether losses sum to the step's; ``None`` before the first step.
        self._shares: bool | None = None
        self._tuning = _Tuning(self, **(tuning or {}))
        self.add_callback(self._tuning)

    @property
    def tuner(self) -> LiveTuner | None:
        """Return the tuner of the training that runs, or of the last one; ``None`` before the first."""
        return self._tuning.tuner

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; an exception that ends the training detaches the tuner, in whatever step it is."""
        try:
            return super().train(*args, **kwargs)
        except BaseException as error:
            self._tuning.detach(f"the training ended with {type(error).__name__}")
            raise

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward for each micro-batch of a batch; return the batch's loss."""
        tuner, retry = self.tuner, self._tuning.retry
        # A batch that does not fit is cut also where the tuner has left.
        if tuner is None or retry is None or not (tuner.attached or tuner.plan.accumulation_steps > 1):
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        if self._shares is None:
            self._shares = self._losses_are_shares(model, inputs, num_items_in_batch)

        def run_one(piece: Any) -> torch.Tensor:
            with self._dividing_by(1.0 if self._shares else 1.0 / tuner.weight):
                loss = super(TunedTrainer, self).training_step(model, piece, num_items_in_batch)
            tuner.accumulated(loss)
            return loss

        return retry.run(inputs, run_one)

    @contextmanager
    def _dividing_by(self, divisor: float) -> Iterator[None]:
        """Let the Trainer divide losses by something else than the batches that it accumulates, where it is not 1."""
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
        """Tell whether the losses of a batch's halves sum to its own: some models heed ``num_items_in_batch``."""
        while True:
            try:
                return self._halves_sum(model, inputs, num_items_in_batch)
            except Exception as error:
                if not devices.is_out_of_memory(error) or stepping.num_samples(inputs) < _LEAST_HALVED:
                    raise
            devices.release(self.args.device)
            inputs = stepping.split(inputs, 2)[0]

    def _halves_sum(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> bool:
        modes = {module: module.training for module in model.modules()}
        batch = self._prepare_inputs(inputs)
        halves = stepping.split(batch, 2)
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
        sizes = [stepping.num_samples(half) for half in halves]
        mean = sum(size * part for size, part in zip(sizes, parts, strict=True)) / sum(sizes)
        return abs(sum(parts) - whole) < abs(mean - whole)


class _Tuning(_Callback):
    """Attach when a ``TunedTrainer`` begins, and tell the tuner where its steps end."""

    modes = tuple(Mode)
    tunes_k = True
    retry: Retry | None = None
    _handle: Any = None

    def __init__(self, trainer: TunedTrainer, **options: Any) -> None:
        super().__init__(**options)
        self._trainer = trainer

    def detach(self, reason: str = "detach() was called") -> None:
        """Leave the model as it was found; the training goes on."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        super().detach(reason)

    def _callable(self, args: TrainingArguments, model: nn.Module) -> nn.Module:
        if args.gradient_accumulation_steps > 1:
            raise AttachError(
                f"gradient_accumulation_steps is {args.gradient_accumulation_steps}",
                where="TunedTrainer",
                allowed="1, with per_device_train_batch_size so many times as large: the tuner cuts it",
            )
        wrapped: nn.Module = self._trainer.model_wrapped
        return wrapped

    def _watch(self, model: nn.Module, tuner: LiveTuner) -> None:
        self._handle = model.register_forward_hook(WatchingHook(self._forward_ended))
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

    def _forward_ended(self, module: nn.Module, _args: object, _output: object) -> None:
        if self.tuner is not None and module.training and torch.is_grad_enabled():
            self.tuner.tell_phase("backward")


def _check(args: TrainingArguments, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what a switch would harm, or what leaves nothing to switch."""
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

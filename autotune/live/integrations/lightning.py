"""A callback that attaches a tuner to a run of Lightning's Trainer."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn

from autotune.errors import AttachError
from autotune.live.integrations.attaching_callback import WHERE, Attaches

# Callbacks that have attached.
_callbacks: weakref.WeakSet[AutotuneCallback] = weakref.WeakSet()


class AutotuneCallback(Attaches, Callback):
    """Callback that switches which activations are recomputed during training, which stays bit-identical.

    Plans change between optimizer steps. With ``accumulate_grad_batches`` a step is planned for the largest batch so
    far, since Lightning does not show later batches in advance. ``Limits.statistics_every`` is not used.

    ::

        trainer = Trainer(..., callbacks=[AutotuneCallback(memory_budget_bytes="20GiB")])

    Arguments and errors are those of :class:`autotune.live.integrations.attaching_callback.Attaches`.
    """

    framework = "Lightning"
    _within = _learns = _updates = False
    _trainer: Trainer | None = None

    def detach(self, reason: str = "detach() was called") -> None:
        """Restore the model; training continues."""
        self._trainer = None
        _callbacks.discard(self)
        self._within = self._learns = self._updates = False
        if self.tuner is not None:
            self.tuner.detach(reason)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach."""
        self.detach("another training begins")
        for other in list(_callbacks):
            if other._trainer is not None and other._trainer.state.status is not TrainerStatus.RUNNING:
                # Lightning tells only the callbacks before one that fails itself.
                other.detach("an exception ended the training")
        _check(trainer, pl_module)
        self.tuner = self._attach(
            _callable(trainer, pl_module),
            trainer.optimizers[0],
            total_steps=trainer.max_steps if trainer.max_steps > 0 else None,
            accumulation_steps=trainer.accumulate_grad_batches,
            is_first=trainer.is_global_zero,
        )
        self._trainer = trainer
        _callbacks.add(self)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step, or continue one that accumulates batches."""
        if self.tuner is None:
            return
        if self._within and batch_idx % trainer.accumulate_grad_batches:
            self.tuner.next_micro_batch(batch)
        else:
            self.tuner.begin_step(batch)
            self._learns = False
        self._within = True
        self.tuner.tell_phase("forward")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Report that the backward pass begins."""
        self._learns = True
        if self._within and self.tuner is not None:
            self.tuner.tell_phase("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report that the backward pass has ended."""
        if self._within and self.tuner is not None:
            self.tuner.tell_phase("update")

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note that this batch ends its step."""
        # Lightning calls the optimizer even if ``training_step`` returned no loss.
        self._updates = self._learns

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """If a step has ended, let the tuner decide about the next ones."""
        if self.tuner is not None and self._within and self._updates:
            self._within = False
            self.tuner.end_step()
        self._updates = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the model as it was found."""
        self.detach("the training ended")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the model as it was found."""
        self.detach(f"{type(exception).__name__} ended the training")


def _callable(trainer: Trainer, module: LightningModule) -> nn.Module:
    """Return the model as the training calls it: on several ranks, the wrapper that reduces gradients."""
    called = trainer.strategy.model
    return called if isinstance(called, nn.parallel.DistributedDataParallel) else module


def _check(trainer: Trainer, module: LightningModule) -> None:
    """Refuse trainers and modules that the tuner does not support."""
    if not module.automatic_optimization or len(trainer.optimizers) != 1:
        manual = "" if module.automatic_optimization else ", and optimizes manually"
        raise AttachError(
            f"the module has {len(trainer.optimizers)} optimizers{manual}",
            where=WHERE,
            allowed="automatic optimization with one; in a loop of your own, autotune.attach()",
        )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise AttachError(
            "the module is compiled as a whole, and each switch would compile it again",
            where=WHERE,
            allowed="compiled blocks: block = torch.compile(block)",
        )
    if isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy):
        raise AttachError(
            f"the model is sharded by {type(trainer.strategy).__name__}", where=WHERE, allowed="one device, or DDP"
        )

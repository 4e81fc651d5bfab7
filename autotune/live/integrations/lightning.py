"""Attach to a run of Lightning's Trainer, as one of its callbacks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from autotune.errors import AttachError
from autotune.live.integrations.attaching_callback import WHERE, Attaches


class AutotuneCallback(Attaches, Callback):
    """Switch what is kept for backward and what is recomputed while a Trainer trains; not one bit of training changes.

    Plans change between optimizer steps. With ``accumulate_grad_batches`` a step is planned for the largest batch so
    far, since Lightning shows each batch as it comes. ``Limits.statistics_every`` is not used.

    ::

        trainer = Trainer(..., callbacks=[AutotuneCallback(memory_budget_bytes="20GiB")])

    Arguments and errors are those of :class:`autotune.live.integrations.attaching_callback.Attaches`.
    """

    framework = "Lightning"
    _within = _learns = _updates = False

    def detach(self, reason: str = "detach() was called") -> None:
        """Leave the model as it was found; the training goes on."""
        self._within = self._learns = self._updates = False
        if self.tuner is not None:
            self.tuner.detach(reason)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach."""
        self.detach("another training begins")
        _check(trainer, pl_module)
        self.tuner = self._attach(
            pl_module,
            trainer.optimizers[0],
            total_steps=trainer.max_steps if trainer.max_steps > 0 else None,
            accumulation_steps=trainer.accumulate_grad_batches,
            is_first=trainer.is_global_zero,
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step, or go on with one that accumulates."""
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
        """Tell that backward begins."""
        self._learns = True
        if self._within and self.tuner is not None:
            self.tuner.tell_phase("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell that backward has ended."""
        if self._within and self.tuner is not None:
            self.tuner.tell_phase("update")

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note that this batch ends its step."""
        # Where ``training_step`` returned no loss, the optimizer is called as well.
        self._updates = self._learns

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let the tuner decide about the next steps, if one has ended."""
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


def _check(trainer: Trainer, module: LightningModule) -> None:
    """Refuse what a switch would harm."""
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

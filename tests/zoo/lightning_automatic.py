"""Lightning's Trainer with the package's callback: clipping, a schedule, and two batches per update."""

import tempfile
import warnings
from typing import Any

import lightning.pytorch as pl
import torch

from autotune.live.integrations.lightning import AutotuneCallback
from zoo import Run, next_token_loss, small_gpt, texts
from zoo._frameworks import Ended, Watch

ACCUMULATED = 2


class Attached(AutotuneCallback):
    """The callback, which keeps the tuner's status before it detaches."""

    def __init__(self, run: Run) -> None:
        super().__init__(**run.arguments())
        self.run = run

    def on_train_end(self, *args: Any) -> None:
        self.run.tuner = Ended(self.tuner)
        super().on_train_end(*args)


class Watching(pl.Callback):
    """A callback that detects where steps begin and end."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % ACCUMULATED == 0:
            self.watch.begin_step(module, trainer.optimizers[0], batch)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % ACCUMULATED == ACCUMULATED - 1:
            self.watch.end_step()


class Module(pl.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.model, self.log_loss, self.steps = small_gpt(), run.log, run.steps

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = next_token_loss(self.model, batch)
        self.log_loss(loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(run: Run) -> None:
    module = Module(run)
    run.clears_within = True
    loader = torch.utils.data.DataLoader(list(texts(ACCUMULATED * run.steps)), batch_size=None)
    attached = Attached(run) if run.is_attached else None
    callbacks = [*([attached] if attached else []), Watching(Watch(run, attached))]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=ACCUMULATED,
            gradient_clip_val=1.0,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, loader)
    run.keep(module.model, trainer.optimizers[0])

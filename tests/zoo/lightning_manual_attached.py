"""Lightning with manual optimization that attaches inside the module, as a custom loop does."""

import tempfile
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Residual, Run, points


class Adversaries(pl.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(*[Residual(dropout=0.1) for _ in range(4)])
        self.critic = nn.Linear(WIDTH, 1)
        self.run_of = run

    def on_train_start(self) -> None:
        self.tuner = self.run_of.attach(self.generator, self.optimizers()[0].optimizer)

    def training_step(self, real: torch.Tensor, batch_idx: int) -> None:
        critics = self.optimizers()[1]
        noise = torch.randn_like(real)
        with torch.no_grad():
            fake = self.generator(noise)
        judged = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()
        critics.zero_grad()
        self.manual_backward(judged)
        critics.step()
        for micro in self.tuner.micro_batches(noise):
            loss = F.softplus(-self.critic(self.generator(micro))).mean()
            self.tuner.backward(loss)
        self.tuner.step()
        self.run_of.log(judged, loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.generator, self.critic)]


def train(run: Run) -> None:
    module = Adversaries(run)
    loader = torch.utils.data.DataLoader(list(points(run.steps)), batch_size=None)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, loader)
    run.keep(module.generator, module.critic)

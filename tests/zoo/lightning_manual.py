"""Lightning with manual optimization of two optimizers, which the callback rejects."""

import tempfile
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

from autotune.live.integrations.lightning import AutotuneCallback
from zoo import WIDTH, Residual, Run, points

REFUSED = "2 optimizers, and optimizes manually"


class Adversaries(pl.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(*[Residual(dropout=0.1) for _ in range(4)])
        self.critic = nn.Linear(WIDTH, 1)
        self.log_loss = run.log

    def training_step(self, real: torch.Tensor, batch_idx: int) -> None:
        for_generator, for_critic = self.optimizers()
        fake = self.generator(torch.randn_like(real))
        for optimizer, loss in (
            (for_critic, F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()),
            (for_generator, F.softplus(-self.critic(fake)).mean()),
        ):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log_loss(loss)

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
            callbacks=[AutotuneCallback(**run.arguments())] if run.is_attached else [],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, loader)
    run.keep(module)

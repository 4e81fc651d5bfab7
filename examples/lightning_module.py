"""Train a LightningModule with the tuner attached by one callback.

python examples/lightning_module.py
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autotune.live.integrations.lightning import AutotuneCallback


class Classifier(LightningModule):
    """A residual network on made-up vectors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(64, 2)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.encoder(x).mean(1)), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(512, 16, 64)
    loader = DataLoader(TensorDataset(inputs, (inputs.mean((1, 2)) > 0).long()), batch_size=32, shuffle=True)
    callback = AutotuneCallback("exact", memory_budget_bytes="40MiB")
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), loader)
    print(f"loss {trainer.callback_metrics['loss'].item():.3f}")


if __name__ == "__main__":
    main()

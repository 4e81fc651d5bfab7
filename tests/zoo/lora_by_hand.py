"""Low-rank adapters next to the frozen weights of a model."""

import torch
from torch import nn

from zoo import Run, next_token_loss, small_gpt, texts


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base, self.dropout = base.requires_grad_(False), nn.Dropout(0.1)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.dropout(x) @ self.down.T @ self.up.T


def train(run: Run) -> None:
    model = small_gpt().requires_grad_(False)
    for block in model.blocks:
        block.mix[0], block.mix[2] = LowRank(block.mix[0]), LowRank(block.mix[2])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

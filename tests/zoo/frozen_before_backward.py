"""A block is frozen after its forward pass on every third step, so its gradient of that step is discarded."""

import torch
from torch import nn

from zoo import WIDTH, Run, Stack, next_token_loss, texts


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x)


def train(run: Run) -> None:
    model = Stack([Mixes() for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(texts(run.steps)):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            model.blocks[1].requires_grad_(number % 3 != 2)
            tuner.backward(loss)
            model.blocks[1].requires_grad_(True)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

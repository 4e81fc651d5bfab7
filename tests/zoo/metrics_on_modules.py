"""Blocks store metrics with their graph on themselves, which the loss does not use."""

import torch
from torch import nn

from zoo import WIDTH, Run, Stack, next_token_loss, texts


class Measured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        self.mix = nn.Sequential(*layers)
        self.entropy: torch.Tensor | None = None
        self.norms: tuple[torch.Tensor, ...] = ()
        self.held: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(x)
        shares = y.softmax(-1)
        self.entropy = -(shares * shares.log()).sum(-1).mean()
        self.norms = (*self.norms[-1:], y.norm(dim=-1))
        self.held.append(y.square().mean())
        return x + y


def train(run: Run) -> None:
    model = Stack([Measured() for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for block in model.blocks:
            block.held = []
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss, *(block.entropy for block in model.blocks), *(block.held[0] for block in model.blocks))
    for block in model.blocks:
        block.entropy, block.norms, block.held = None, (), None
    run.keep(model, optimizer)

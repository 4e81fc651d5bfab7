"""Stochastic depth: each block drops the paths of some samples, more of them the deeper it is."""

import torch

from zoo import Block, Run, Stack, next_token_loss, texts


class DropPath(Block):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return super().forward(x)
        kept = x.new_empty(len(x), 1, 1).bernoulli_(1 - self.rate) / (1 - self.rate)
        return x + kept * (super().forward(x) - x)


def train(run: Run) -> None:
    model = Stack([DropPath(0.1 * depth) for depth in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

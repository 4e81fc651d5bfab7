"""Blocks count their calls in variables of their Python module and of their class, and read the counts."""

import torch
from torch import nn

from zoo import WIDTH, Run, Stack, next_token_loss, texts

LOCKED = {f"blocks.{number}": "it changes " for number in range(3)}
calls = 0


class Counts(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global calls
        calls += 1
        Counts.calls += 2
        return x + self.narrow(self.widen(x).softmax(-1)) / (1 + 0.01 * calls + 0.01 * self.calls)


def train(run: Run) -> None:
    global calls
    calls = Counts.calls = 0
    model = Stack([Counts() for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss, float(calls), float(Counts.calls))
    run.keep(model, optimizer)

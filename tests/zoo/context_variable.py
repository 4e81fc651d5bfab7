"""A context variable is set during the forward pass, and blocks read it."""

from contextvars import ContextVar

import torch
from torch import nn

from zoo import WIDTH, Run, Stack, next_token_loss, texts

TEMPERATURE = ContextVar("temperature", default=1.0)
LOCKED = {f"blocks.{number}": "differ" for number in range(4)}


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer((self.inner(x) / TEMPERATURE.get()).softmax(-1))


def train(run: Run) -> None:
    model = Stack([Gates() for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            token = TEMPERATURE.set(0.1)
            loss = next_token_loss(model, micro)
            TEMPERATURE.reset(token)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

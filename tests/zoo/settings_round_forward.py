"""A project-specific setting has another value during the forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zoo import WIDTH, Run, Stack, next_token_loss, texts

SETTINGS = {"temperature": 1.0}
LOCKED = {f"blocks.{number}": "it reads SETTINGS" for number in range(4)}


@contextmanager
def hot(temperature: float) -> Iterator[None]:
    former, SETTINGS["temperature"] = SETTINGS["temperature"], temperature
    try:
        yield
    finally:
        SETTINGS["temperature"] = former


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer((self.inner(x) / SETTINGS["temperature"]).softmax(-1))


def train(run: Run) -> None:
    model = Stack([Gates() for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            with hot(0.1):
                loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

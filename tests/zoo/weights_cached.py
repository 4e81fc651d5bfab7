"""Orthogonal recurrent layers, whose weights are computed once per forward pass."""

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal

from zoo import WIDTH, Run, Stack, next_token_loss, texts

LOCKED = {f"blocks.{number}": "parametrize.cached()" for number in range(3)}


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enters, self.recurs = nn.Linear(WIDTH, WIDTH), orthogonal(nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        states = []
        for moment in x.unbind(1):
            state = torch.tanh(self.enters(moment) + self.recurs(state))
            states.append(state)
        return x + torch.stack(states, 1)


def train(run: Run) -> None:
    model = Stack([Cell() for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps, length=8):
        for micro in tuner.micro_batches(batch):
            with parametrize.cached():
                loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

"""Blocks get a state object with a tensor that the model adds to in place."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from zoo import VOCABULARY, WIDTH, Run, texts

LOCKED = {f"blocks.{number}": "written to in place" for number in range(4)}


@dataclass
class State:
    hidden: torch.Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, state: State) -> torch.Tensor:
        return self.mix(state.hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        state = State(self.embedding(tokens) * 1.0)
        for block in self.blocks:
            state.hidden += block(state)
        return self.head(state.hidden)


def train(run: Run) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = F.cross_entropy(model(micro[:, :-1]).flatten(0, 1), micro[:, 1:].flatten())
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

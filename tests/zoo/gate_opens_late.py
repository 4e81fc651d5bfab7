"""Blocks share an object with the first features, which they read only once a gate has opened."""

from dataclasses import dataclass

import torch
from torch import nn

from zoo import VOCABULARY, WIDTH, Run, next_token_loss, texts


@dataclass
class Context:
    is_open: bool
    first: torch.Tensor


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        self.mix = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if context.is_open:
            x = x + context.first.tanh()
        return x + self.mix(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Gated() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.is_open = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        features = self.embed(tokens)
        context = Context(self.is_open, features * 2.0)
        x = self.norm(features)
        for block in self.blocks:
            x = block(x, context)
        return self.head(x)


def train(run: Run) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(texts(run.steps)):
        model.is_open = number >= 5
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

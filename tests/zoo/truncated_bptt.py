"""Truncated backpropagation through time: one chunk per step, with the hidden state passed on without its graph."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import VOCABULARY, WIDTH, Run, texts


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.GRUCell(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = []
        for now in x.unbind(1):
            state = self.cell(now, state)
            outputs.append(self.norm(now + state))
        return torch.stack(outputs, 1), state


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, tokens: torch.Tensor, states: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x, news = self.embedding(tokens), []
        for layer, state in zip(self.layers, states, strict=True):
            x, new = layer(x, state)
            news.append(new)
        return self.head(x), news


def train(run: Run) -> None:
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    tuner = run.attach(model, optimizer, clip_norm=0.5)
    states = [torch.zeros(4, WIDTH) for _ in model.layers]
    (text,) = texts(1, length=run.steps * 8 + 1)
    for start in range(0, run.steps * 8, 8):
        chunk, targets = text[:, start : start + 8], text[:, start + 1 : start + 9]
        for tokens, wanted in tuner.micro_batches((chunk, targets)):
            scores, states = model(tokens, [state.detach() for state in states])
            loss = F.cross_entropy(scores.flatten(0, 1), wanted.flatten())
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer, states)

"""A mixture of experts: top-1 routing with a capacity, and a balancing loss that each layer adds to a list."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Run, Stack, next_token_loss, texts

# How many tokens each expert gets is known when the router has run: no shape, and no step before, tells it.
SPREAD = 0.02


class Mixture(nn.Module):
    def __init__(self, auxiliary: list[torch.Tensor], experts: int = 4) -> None:
        super().__init__()
        self.auxiliary, self.router = auxiliary, nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(experts)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        shares = self.router(tokens).softmax(-1)
        share, chosen = shares.max(-1)
        capacity = len(tokens) // len(self.experts) + 2
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero().squeeze(1)[:capacity]
            out = out.index_copy(0, own, share[own, None] * expert(tokens[own]))
        load = F.one_hot(chosen, len(self.experts)).float().mean(0)
        self.auxiliary.append(len(self.experts) * (load * shares.mean(0)).sum())
        return x + out.view_as(x)


class MixtureModel(Stack):
    def __init__(self) -> None:
        auxiliary: list[torch.Tensor] = []
        super().__init__([Mixture(auxiliary) for _ in range(4)])
        self.auxiliary = auxiliary


def train(run: Run) -> None:
    model = MixtureModel()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            model.auxiliary.clear()
            loss = next_token_loss(model, micro) + 0.01 * torch.stack(model.auxiliary).sum()
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

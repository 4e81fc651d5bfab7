"""Blocks compute with rounded weights, in the place of their own during the forward pass, without ``finally``.

Each puts them in place and back in another way: itself, through functions, or in hooks of a part.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Run, points


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.mix.weight
        own = weight.data
        weight.data = (own * 16).round() / 16
        found = x + F.gelu(self.mix(self.norm(x)))
        weight.data = own
        return found


def swapped(weights: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, torch.Tensor]]:
    own = [(weight, weight.data) for weight in weights]
    for weight, data in own:
        setattr(weight, "data", (data * 16).round() / 16)  # noqa: B010  as frameworks do
    return own


def put_back(own: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
    for weight, data in own:
        weight.data = data


class ByFunctions(Rounded):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = swapped(self.parameters())
        found = x + F.gelu(self.mix(self.norm(x)))
        put_back(own)
        return found


class ByHooks(Rounded):
    def __init__(self) -> None:
        super().__init__()
        self.mix.register_forward_pre_hook(self.before)
        self.mix.register_forward_hook(self.after)

    def before(self, *_: Any) -> None:
        self.own = swapped(self.mix.parameters())

    def after(self, *_: Any) -> None:
        put_back(self.own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.mix(self.norm(x)))


def train(run: Run) -> None:
    kinds = (Rounded, ByFunctions, ByHooks)
    model = nn.Sequential(*[kind() for kind in kinds for _ in range(2)], nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps, rows=256):
        for x in tuner.micro_batches(batch):
            loss = F.mse_loss(model(x).squeeze(1), x.mean(1))
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

"""Reversible blocks: an autograd function of the loop recomputes a block's inputs from its outputs."""

from typing import Any

import torch
from torch import nn

from zoo import WIDTH, Run, Stack, next_token_loss, texts


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, two: torch.Tensor, block: nn.Module, *_: torch.Tensor) -> Any:
        ctx.block = block
        with torch.no_grad():
            one = one + block.first(two)
            two = two + block.second(one)
        ctx.save_for_backward(one, two)
        return one, two

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        one, two = ctx.saved_tensors
        block = ctx.block
        with torch.no_grad():
            two = two - block.second(one)
            one = one - block.first(two)
        with torch.enable_grad():
            inputs = one.detach().requires_grad_(), two.detach().requires_grad_()
            upper = inputs[0] + block.first(inputs[1])
            lower = inputs[1] + block.second(upper)
        wanted = (*inputs, *block.parameters())
        found = torch.autograd.grad((upper, lower), wanted, slopes)
        return (*found[:2], None, *found[2:])


class ReversibleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.first, self.second = (
            nn.Sequential(nn.LayerNorm(half), nn.Linear(half, WIDTH), nn.GELU(), nn.Linear(WIDTH, half))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(Reversible.apply(*x.chunk(2, -1), self, *self.parameters()), -1)


def train(run: Run) -> None:
    model = Stack([ReversibleBlock() for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps, rows=32):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

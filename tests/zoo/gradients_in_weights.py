"""The layer's own backward pass adds weight gradients to ``weight.main_grad``, as Megatron's fusion does."""

from typing import Any

import torch
from torch import nn

from zoo import WIDTH, Run, points


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.weight.main_grad.add_(gradients[0].T @ ctx.saved_tensors[0])
        return gradients[0] @ ctx.weight, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.weight: Any = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / 8)
        self.weight.main_grad = torch.zeros(WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Fused.apply(torch.tanh(self.widen(x)), self.weight)


def train(run: Run) -> None:
    model = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    fused = [block.weight for block in model[:-1]]
    for batch in points(run.steps, rows=256):
        tuner.begin_step(batch)
        tuner.tell_phase("forward")
        loss = model(batch).square().mean()
        tuner.tell_phase("backward")
        loss.backward()
        tuner.tell_phase("update")
        for weight in fused:
            weight.grad = weight.main_grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        for weight in fused:
            weight.main_grad.zero_()
        tuner.end_step()
        run.log(loss)
    run.keep(model, optimizer)

"""Every few steps, ``torch.func`` computes the gradient norms of single samples."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from zoo import WIDTH, Run, points


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x)


def train(run: Run) -> None:
    model = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)

    def of_one(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, weights, (x[None],)).square().mean()

    def norm_of_norms(batch: torch.Tensor) -> float:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        found = vmap(grad(of_one), in_dims=(None, 0))(weights, batch)
        return float(sum(one.square().sum() for one in found.values()))

    for number, batch in enumerate(points(run.steps, rows=256)):
        for x in tuner.micro_batches(batch):
            loss = (model(x) - x[:, :1]).square().mean()
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
        if number % 5 == 4:
            run.log(norm_of_norms(batch[:4]))
    run.keep(model, optimizer)

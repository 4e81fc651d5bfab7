"""Norms of each sample's gradient from inputs that hooks collect by their layer, as in private training."""

from typing import Any

import torch
from torch import nn

from zoo import WIDTH, Run, points

LOCKED = {str(number): "it changes inputs, which recomputation would change a second time" for number in range(4)}


def train(run: Run) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs: dict[nn.Module, torch.Tensor] = {}
    norms: dict[nn.Module, torch.Tensor] = {}

    def collect(layer: nn.Module, given: tuple[torch.Tensor, ...], _output: Any) -> None:
        inputs[layer] = given[0].detach()

    def measure(layer: nn.Module, _inner: Any, outer: tuple[torch.Tensor, ...]) -> None:
        norms[layer] = torch.einsum("bi,bj->bij", outer[0], inputs[layer]).flatten(1).norm(dim=1)

    for layer in layers:
        layer.register_forward_hook(collect)
        layer.register_full_backward_hook(measure)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = model(micro.requires_grad_()).square().mean()
            tuner.backward(loss)
        total = torch.stack([norms[layer] for layer in layers]).norm()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= 1 + total
        tuner.step()
        run.log(loss)
        run.log(total)
    run.keep(model, optimizer)

"""K-FAC: hooks keep factors of the Fisher matrix in dictionaries by layer, which precondition the gradient."""

import torch
from torch import nn

from zoo import Residual, Run, Stack, next_token_loss, texts

# A copy of a unit is not found in the dictionaries.
LOCKED = {f"blocks.{number}": "KeyError" for number in range(4)}


def train(run: Run) -> None:
    model = Stack([Residual() for _ in range(4)])
    layers = [layer for block in model.blocks for layer in block.modules() if type(layer) is nn.Linear]
    inputs = {layer: torch.eye(layer.in_features) for layer in layers}
    outputs = {layer: torch.eye(layer.out_features) for layer in layers}

    def before(layer: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            rows = given[0].detach().flatten(0, -2)
            inputs[layer].mul_(0.95).add_(rows.T @ rows / len(rows), alpha=0.05)

    def backward(layer: nn.Module, _: object, gradients: tuple[torch.Tensor, ...]) -> None:
        rows = gradients[0].flatten(0, -2)
        outputs[layer].mul_(0.95).add_(rows.T @ rows, alpha=0.05)

    for layer in layers:
        layer.register_forward_pre_hook(before)
        layer.register_full_backward_hook(backward)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        for layer in layers:
            damped = [one[layer] + 0.1 * torch.eye(len(one[layer])) for one in (outputs, inputs)]
            layer.weight.grad = torch.linalg.solve(damped[0], layer.weight.grad) @ torch.linalg.inv(damped[1])
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer, *inputs.values(), *outputs.values())

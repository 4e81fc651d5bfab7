"""Statistics of activations, logged every tenth step by hooks that are removed after it."""

from __future__ import annotations

import torch
from torch import nn

from zoo import Run, next_token_loss, small_gpt, texts

LOCKED = {f"blocks.{number}": "its parts got other hooks after it was probed" for number in range(4)}
# Only units that are recomputed in such a step are locked.
BY_CHANCE = True


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(texts(run.steps, rows=16)):
        seen: list[float] = []

        def look(_module: nn.Module, _inputs: object, output: torch.Tensor, seen: list[float] = seen) -> None:
            seen.append(float(output.detach().abs().mean()))

        layers = [part for part in model.modules() if isinstance(part, nn.Linear)] if number % 10 == 9 else []
        handles = [layer.register_forward_hook(look) for layer in layers]
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss, *seen)
        for handle in handles:
            handle.remove()
    run.keep(model, optimizer)

"""Blocks whose forward() is called directly instead of the module."""

from __future__ import annotations

import torch

from zoo import Run, Stack, next_token_loss, small_gpt, texts

LOCKED = {f"blocks.{number}": "it was not called as a module" for number in range(4)}


class Direct(Stack):
    """A model that calls the forward() of its blocks directly."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block.forward(x)
        return self.head(x)


def train(run: Run) -> None:
    model = Direct(list(small_gpt().blocks))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

"""A model that is fine-tuned in evaluation mode, without dropout."""

from __future__ import annotations

import torch

from zoo import Run, next_token_loss, small_gpt, texts

MODES = ("rounding", "tolerant")


def train(run: Run) -> None:
    model = small_gpt().eval()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        if not tuner.probing:
            run.log(loss)
    run.keep(model, optimizer)

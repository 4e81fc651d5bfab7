"""The plain loop: a small transformer, a clipped AdamW and a schedule."""

import torch

from zoo import Run, next_token_loss, small_gpt, texts

MODES = ("rounding", "tolerant")


def train(run: Run) -> None:
    model = small_gpt(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        schedule.step()
        run.log(loss)
    run.keep(model, optimizer)

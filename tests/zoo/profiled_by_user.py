"""A loop that profiles every third step with torch's profiler."""

from __future__ import annotations

import contextlib

import torch
from torch.profiler import ProfilerActivity, profile

from zoo import Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(texts(run.steps)):
        for micro in tuner.micro_batches(batch):
            profiled = run.plans is None and number % 3 == 2
            # The simulated accelerator's module outlives its tests, and torch would ask it to synchronize.
            watching = profile(activities=[ProfilerActivity.CPU], profile_memory=True) if profiled else None
            with watching or contextlib.nullcontext():
                loss = next_token_loss(model, micro)
                tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

"""A loop that profiles every third step with torch's profiler."""

from __future__ import annotations

import contextlib

import torch

from zoo import Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(texts(run.steps)):
        for micro in tuner.micro_batches(batch):
            profiled = run.plans is None and number % 3 == 2
            with torch.profiler.profile(profile_memory=True) if profiled else contextlib.nullcontext():
                loss = next_token_loss(model, micro)
                tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

"""From the fifth step on, the loop keeps saved tensors on the host."""

import contextlib

import torch
from torch.autograd.graph import save_on_cpu

from zoo import Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(texts(run.steps)):
        for micro in tuner.micro_batches(batch):
            with save_on_cpu() if number >= 4 else contextlib.nullcontext():
                loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

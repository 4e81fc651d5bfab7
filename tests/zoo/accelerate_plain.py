"""Accelerate's own loop, with a prepared loader and two manually accumulated batches per update."""

import torch
from accelerate import Accelerator

from zoo import Run, next_token_loss, small_gpt, texts

ACCUMULATED = 2


def train(run: Run) -> None:
    accelerator = Accelerator(cpu=True)
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    loader = torch.utils.data.DataLoader(list(texts(ACCUMULATED * run.steps)), batch_size=None)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    tuner = run.attach(model, optimizer, accumulation_steps=ACCUMULATED)
    for number, batch in enumerate(loader):
        if number % ACCUMULATED:
            tuner.next_micro_batch(batch)
        else:
            tuner.begin_step(batch)
        tuner.tell_phase("forward")
        loss = next_token_loss(model, batch) / ACCUMULATED
        tuner.tell_phase("backward")
        accelerator.backward(loss)
        tuner.tell_phase("update")
        run.log(loss)
        if number % ACCUMULATED == ACCUMULATED - 1:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            tuner.end_step()
    run.keep(model, optimizer)

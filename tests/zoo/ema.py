"""Averaged weights, a OneCycle schedule, and an evaluation of the average every few steps."""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from zoo import Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=run.steps)
    (held_out,) = texts(1, rows=8)
    tuner = run.attach(model, optimizer, total_steps=run.steps)
    for number, batch in enumerate(texts(run.steps)):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        schedule.step()
        average.update_parameters(model)
        run.log(loss)
        if number % 5 == 4:
            average.eval()
            model.eval()
            with torch.inference_mode():
                run.log(next_token_loss(average, held_out), next_token_loss(model, held_out))
            model.train()
    run.keep(model, average, optimizer)

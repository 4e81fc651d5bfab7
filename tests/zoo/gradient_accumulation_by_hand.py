"""The loop accumulates the gradients of three batches and makes each update itself."""

import torch

from zoo import Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, accumulation_steps=3)
    for number, batch in enumerate(texts(3 * run.steps)):
        if number % 3 == 0:
            tuner.begin_step(batch)
        else:
            tuner.next_micro_batch(batch)
        tuner.tell_phase("forward")
        loss = next_token_loss(model, batch) / 3
        tuner.tell_phase("backward")
        loss.backward()
        run.log(loss)
        tuner.tell_phase("update")
        if number % 3 == 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            tuner.end_step()
    run.keep(model, optimizer)

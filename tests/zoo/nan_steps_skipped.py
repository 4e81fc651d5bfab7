"""Every sixth loss is not finite, and its batch is skipped before the backward pass."""

import torch

from zoo import Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(texts(run.steps)):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            if number % 6 == 5:
                loss = loss * float("nan")
            if not torch.isfinite(loss):
                break
            tuner.backward(loss)
        else:
            tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

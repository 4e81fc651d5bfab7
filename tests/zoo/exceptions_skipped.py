"""The loss raises for every fifth batch, and the loop goes on with the next one."""

import torch

from zoo import Run, next_token_loss, small_gpt, texts


def checked_loss(model: torch.nn.Module, batch: torch.Tensor, number: int) -> torch.Tensor:
    loss = next_token_loss(model, batch)
    if number % 5 == 4:
        raise ValueError("a bad batch")
    return loss


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(texts(run.steps)):
        try:
            for micro in tuner.micro_batches(batch):
                loss = checked_loss(model, micro, number)
                tuner.backward(loss)
            tuner.step()
            run.log(loss)
        except ValueError:
            optimizer.zero_grad()
    run.keep(model, optimizer)

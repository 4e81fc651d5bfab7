"""A transformer whose weights become fp64 between two steps, as before a part of the training that needs it."""

import torch

from zoo import Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    tuner = run.attach(model, optimizer)
    for step, batch in enumerate(texts(run.steps)):
        if step == 6:
            model.double()
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

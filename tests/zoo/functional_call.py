"""The model is called with noisy copies of its weights."""

import torch
from torch.func import functional_call

from zoo import Run, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            noisy = {name: weight + 0.01 * torch.randn_like(weight) for name, weight in model.named_parameters()}
            scores = functional_call(model, noisy, (micro[:, :-1],))
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), micro[:, 1:].flatten())
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

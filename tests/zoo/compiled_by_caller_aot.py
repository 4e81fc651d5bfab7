"""The loop compiles the model with its backward pass, but attaches to the uncompiled model."""

import warnings

import torch

from zoo import Run, next_token_loss, small_gpt, texts

LOCKED = {**{f"blocks.{number}": "not as a module" for number in range(4)}, "profile": "no unit was called as a module"}


def train(run: Run) -> None:
    torch._dynamo.reset()
    # Dynamo warns about code that it does not trace.
    warnings.simplefilter("ignore")
    model = small_gpt(dropout=0.0)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(compiled, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

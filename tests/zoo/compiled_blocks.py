"""Each block is compiled individually, as is common for models with many equal blocks."""

import warnings

import torch

from zoo import Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    torch._dynamo.reset()
    # Dynamo warns about code that it does not trace.
    warnings.simplefilter("ignore")
    model = small_gpt(dropout=0.0)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

"""Mixed precision with the loop's own autocast."""

import torch

from zoo import Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            with torch.autocast("cpu", torch.bfloat16):
                loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

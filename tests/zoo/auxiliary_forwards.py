"""From step 12 on, a second forward pass with other dropout, and a loss on how the two agree."""

import torch
import torch.nn.functional as F

from zoo import Run, small_gpt, texts

SURPRISES = (12,)


def train(run: Run) -> None:
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(texts(run.steps)):
        for micro in tuner.micro_batches(batch):
            scores = model(micro[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), micro[:, 1:].flatten())
            if number >= 12:
                loss = loss + F.mse_loss(model(micro[:, :-1]).softmax(-1), scores.softmax(-1))
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

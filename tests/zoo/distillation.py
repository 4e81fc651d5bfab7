"""Distillation: a teacher without a gradient scores the same tokens, and the student follows it."""

import torch
import torch.nn.functional as F

from zoo import Run, small_gpt, texts

MODES = ("rounding",)


def train(run: Run) -> None:
    teacher = small_gpt(6).eval()
    model = small_gpt(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            with torch.no_grad():
                wanted = (teacher(micro[:, :-1]) / 2).softmax(-1)
            scores = model(micro[:, :-1])
            followed = F.kl_div((scores / 2).log_softmax(-1), wanted, reduction="none").sum(-1).mean()
            loss = 4 * followed + F.cross_entropy(scores.flatten(0, 1), micro[:, 1:].flatten())
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

"""A batch is a dataclass with tokens, a mask and a count."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from zoo import Run, small_gpt, texts

MODES = ("rounding",)


@dataclass
class Batch:
    tokens: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    epoch: int = 0


def num_tokens(batch: Batch) -> int:
    return int(batch.mask.sum())


def train(run: Run) -> None:
    model = small_gpt(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, text in enumerate(texts(run.steps)):
        batch = Batch(text[:, :-1], text[:, 1:], text[:, 1:] > 2, epoch=number // 8)
        for micro in tuner.micro_batches(batch, count=num_tokens):
            scores = model(micro.tokens)
            loss = F.cross_entropy(scores[micro.mask], micro.targets[micro.mask])
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

"""A Siamese network: one encoder for anchors, positives and negatives, and a triplet loss."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Residual, Run, points


def train(run: Run) -> None:
    encoder = nn.Sequential(*[Residual(dropout=0.1) for _ in range(4)], nn.Linear(WIDTH, 8))
    optimizer = torch.optim.RMSprop(encoder.parameters(), 1e-3)
    tuner = run.attach(encoder, optimizer)
    for anchors in points(run.steps, rows=64):
        batch = {"anchor": anchors, "match": anchors + 0.1 * torch.randn_like(anchors), "other": anchors.roll(1, 0)}
        for part in tuner.micro_batches(batch):
            loss = F.triplet_margin_loss(*(encoder(part[name]) for name in ("anchor", "match", "other")), margin=0.5)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(encoder, optimizer)

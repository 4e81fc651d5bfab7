"""Embeddings with sparse gradients and their own optimizer, and another optimizer for all else."""

import torch
from torch import nn

from zoo import VOCABULARY, WIDTH, Run, next_token_loss, small_gpt, texts


def train(run: Run) -> None:
    model = small_gpt()
    model.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
    sparse = torch.optim.SparseAdam(model.embedding.parameters(), 1e-2)
    dense = torch.optim.AdamW([*model.blocks.parameters(), *model.head.parameters()], 1e-3)
    tuner = run.attach(model, dense)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        sparse.step()
        sparse.zero_grad()
        run.log(loss)
    run.keep(model, dense, sparse)

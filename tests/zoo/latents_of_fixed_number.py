"""Latents of a fixed number attend to texts of several lengths, as in a Perceiver: memory shrinks less than a batch."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import VOCABULARY, WIDTH, Run, texts

MODES = ("rounding",)
LATENTS = 24


class Reads(nn.Module):
    """The latents read the text, and then think by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.pair = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, latents: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        key, value = self.pair(words).chunk(2, dim=-1)
        latents = latents + F.scaled_dot_product_attention(self.query(latents), key, value)
        return latents + self.narrow(F.gelu(self.wide(latents)))


class Perceiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.latents = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(LATENTS, WIDTH) / 4)
        self.blocks, self.head = nn.ModuleList(Reads() for _ in range(4)), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words, latents = self.embedding(ids), self.latents.expand(len(ids), -1, -1)
        for block in self.blocks:
            latents = block(latents, words)
        return self.head(latents.mean(1))


def train(run: Run) -> None:
    model = Perceiver()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(texts(2 * run.steps, rows=16, length=24)):
        # The first batch is the largest.
        length = (24, 16, 9, 20, 6)[number % 5]
        for ids in tuner.micro_batches(batch[:, :length]):
            loss = F.cross_entropy(model(ids[:, :-1]), ids[:, -1])
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

"""Several tasks on one trunk: each step trains the head of one task, which has blocks of its own."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import VOCABULARY, WIDTH, Block, Run, texts


class Head(nn.Module):
    def __init__(self, blocks: int, outputs: int) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Block() for _ in range(blocks)), nn.Linear(WIDTH, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.trunk = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.tokens, self.texts = Head(2, VOCABULARY), Head(1, 2)

    def forward(self, tokens: torch.Tensor, whole: bool) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.trunk:
            x = block(x)
        return self.texts(x).mean(1) if whole else self.tokens(x)


def train(run: Run) -> None:
    model = MultiTask()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(texts(run.steps)):
        for micro in tuner.micro_batches(batch):
            if number % 2:
                loss = F.cross_entropy(model(micro, whole=True), micro[:, 0] % 2)
            else:
                loss = F.cross_entropy(model(micro[:, :-1], whole=False).flatten(0, 1), micro[:, 1:].flatten())
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

"""Batches of sequences of different lengths without padding, as jagged nested tensors."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Run

CLASSES = 5
LOCKED = {f"blocks.{number}": "a nested tensor" for number in range(4)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))), 0.1, self.training)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.stack([rows.mean(0) for rows in x.unbind()]))


def train(run: Run) -> None:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    generator = torch.Generator().manual_seed(3)
    for _ in range(run.steps):
        lengths = torch.randint(4, 20, (8,), generator=generator).tolist()
        rows = [torch.randn(length, 8, generator=generator) for length in lengths]
        batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
        labels = torch.randint(CLASSES, (8,), generator=generator)
        tuner.begin_step((batch, labels))
        tuner.tell_phase("forward")
        loss = F.cross_entropy(model(batch), labels)
        tuner.tell_phase("backward")
        loss.backward()
        tuner.tell_phase("update")
        optimizer.step()
        optimizer.zero_grad()
        tuner.end_step()
        run.log(loss)
    run.keep(model, optimizer)

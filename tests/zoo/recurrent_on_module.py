"""A cell is called for each part of a sequence, and stores its state with the graph on itself."""

import torch
from torch import nn

from zoo import WIDTH, Run, Stack, next_token_loss, texts

# Cells are small and called often: each call keeps a generator state, which takes more memory than activations.
# The tuner stays at recomputing all, so that it sees no other plan's peak; only every seventh budget is large enough.
SURPRISES = [step for step in range(24) if step % 7]
STAYS_LEAN = "recomputing needs more than keeping"


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.takes, self.keeps = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.gives = nn.Linear(2 * WIDTH, WIDTH)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.takes(x)
        if self.state is not None:
            found = found + self.keeps(self.state)
        self.state = self.gives(found.tanh())
        return self.state


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Cell() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.state = None
        parts = []
        for part in x.split(2, dim=1):
            found = part.mean(1)
            for layer in self.layers:
                found = found + layer(found)
            parts.append(part + found[:, None])
        return torch.cat(parts, dim=1)


def train(run: Run) -> None:
    model = Stack([Recurrent()])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

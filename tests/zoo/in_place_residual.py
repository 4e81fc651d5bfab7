"""The residual stream of the first stage is updated in place, that of the second is not."""

import torch
from torch import nn

from zoo import WIDTH, Residual, Run, Stack, next_token_loss, texts

# The input of these blocks is lost once their outputs have been added to it.
LOCKED = {f"blocks.{number}": "written to in place" for number in range(3)}


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.tanh())


class InPlace(Stack):
    def __init__(self) -> None:
        super().__init__([Mix() for _ in range(3)])
        self.others = nn.Sequential(*[Residual() for _ in range(4)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * 1.0
        for block in self.blocks:
            x += block(x)
        return self.head(self.others(x))


def train(run: Run) -> None:
    model = InPlace()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

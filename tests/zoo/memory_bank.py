"""Each block reads a large memory bank, and writes to it after a warm-up."""

import torch
from torch import nn

from zoo import WIDTH, Run, Stack, next_token_loss, texts

# Recomputation takes copies of the bank, which are larger than its savings; no step has shown it yet when this one's
# budget is too small for them.
SURPRISES = (4,)
STAYS_LEAN = "recomputing needs more than keeping"


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.warm = False
        self.asks, self.answers = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bank", torch.randn(20_000, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        asked = self.asks(x)
        known = self.bank[:64].clone()
        read = (asked @ known.T).softmax(-1) @ known
        if self.training and self.warm:
            with torch.no_grad():
                self.bank[:64].lerp_(asked.detach().flatten(0, 1)[:1].expand(64, -1), 0.1)
        return x + self.answers(read)


def train(run: Run) -> None:
    model = Stack([Remembers() for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(texts(run.steps)):
        for block in model.blocks:
            block.warm = number > 5
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

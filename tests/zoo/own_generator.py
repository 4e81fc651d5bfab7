"""Every second block draws dropout from its own generator, which recomputation does not restore."""

import torch

from zoo import Residual, Run, Stack, next_token_loss, texts

LOCKED = {f"blocks.{number}": "" for number in (0, 2, 4)}


class OwnDropout(Residual):
    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        kept = torch.rand(x.shape, generator=self.generator) > 0.1
        return super().forward(x * kept / 0.9)


def train(run: Run) -> None:
    model = Stack([OwnDropout(None if number % 2 else number) for number in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

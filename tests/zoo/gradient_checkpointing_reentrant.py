"""The blocks are checkpointed by the model itself, in two segments and by reentrant calls of autograd."""

import torch
from torch.utils.checkpoint import checkpoint_sequential

from zoo import Block, Run, Stack, next_token_loss, texts

LOCKED = {f"blocks.{number}": "the loop's own checkpointing" for number in range(3)}


class Segmented(Stack):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint_sequential(list(self.blocks), 2, self.embedding(tokens), use_reentrant=True)
        return self.head(found)


def train(run: Run) -> None:
    model = Segmented([Block() for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

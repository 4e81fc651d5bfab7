"""LayerDrop: in training, each block is skipped with a probability of 0.2."""

import torch
from torch import nn

from zoo import Block, Run, Stack, next_token_loss, texts


class LayerDrop(Stack):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if not self.training or torch.rand(()) >= 0.2:
                x = block(x)
        return self.head(x)


def train(run: Run) -> None:
    model: nn.Module = LayerDrop([Block() for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

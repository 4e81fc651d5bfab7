"""Contrastive learning with cached gradients (GradCache): all embeddings without a graph, then each chunk with one."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import VOCABULARY, WIDTH, Block, Run, texts

# There are more forward than backward passes, so all of them count as one micro-batch.
STAYS_LEAN = "its passes are counted as calls of one"
ROWS, CHUNKS = 16, 4


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.normalize(x.mean(1), dim=-1)


def contrastive_loss(embedded: torch.Tensor) -> torch.Tensor:
    """Return a contrastive loss with neighbouring rows as positive pairs."""
    scores = 5 * embedded @ embedded.T - 50 * torch.eye(ROWS)
    return F.cross_entropy(scores, torch.arange(ROWS) ^ 1)


def train(run: Run) -> None:
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps, rows=ROWS):
        for micro in tuner.micro_batches(batch):
            states, found = [], []
            with torch.no_grad():
                for chunk in micro.chunk(CHUNKS):
                    states.append(torch.get_rng_state())
                    found.append(model(chunk))
            cached = torch.cat(found).requires_grad_()
            loss = contrastive_loss(cached)
            loss.backward()
            after = torch.get_rng_state()
            for chunk, state, slope in zip(micro.chunk(CHUNKS), states, cached.grad.chunk(CHUNKS), strict=True):
                # Use the same dropout as in the pass without a graph.
                torch.set_rng_state(state)
                tuner.backward((model(chunk) * slope).sum())
            torch.set_rng_state(after)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)

"""Entry point that torchrun starts: one rank of pipelines of unusual models, which records what it finds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sharded_rank import at_random, farthest, make, whole
from small_models import TinyGPT
from torch import distributed, nn

from autotune import EngineOptions, Job, TorchEngine
from autotune.engines.pipeline_engine import PipelineEngine
from autotune.errors import AutotuneError
from autotune.launching import launched, split


class Twice(TinyGPT):
    """Calls a block twice."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            hidden = block(block(hidden)) if number == 1 else block(hidden)
        return self.head(hidden)


class Residual(TinyGPT):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = first = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden + first)


class OwnHead(TinyGPT):
    """Uses the embedding's weight outside its module, and hands a mask to each block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) + F.linear(hidden, self.embedding.weight)


class Normalised(nn.Module):
    """Has BatchNorm, so that batches are not cut, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows).relu()
        return rows


def tied() -> TinyGPT:
    model = TinyGPT(width=16, blocks=4, dropout=0.0)
    model.head.weight = model.embedding.weight
    return model


def frozen() -> TinyGPT:
    model = TinyGPT(width=16, blocks=4, dropout=0.0)
    # The first stage has nothing to train but a bias, and hands on what needs no gradient.
    for part in (model.embedding, model.blocks[0]):
        part.requires_grad_(False)
    return model


def lengths(seed: int) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for number in range(10**6):
        tokens = torch.randint(11, (8, 5 + number % 3), generator=generator)
        yield {"tokens": tokens, "labels": tokens[:, 1:]}


def rows(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 6, generator=generator)


def compared(job: Job, mesh: str = "pipe=2") -> dict[str, Any]:
    """Train under a random plan at every step, and train the same with plain torch."""
    import random

    options, draw = EngineOptions(meter_memory=False, statistics_every=3), random.Random(5)
    ours, plain = PipelineEngine(job, mesh=mesh, options=options), TorchEngine(job, options=options)
    sampled = False
    for _ in range(12):
        plan = at_random(ours.space, draw)
        ours.apply(plan)
        plain.apply(plan)
        window, other = ours.run(1), plain.run(1)
        assert window.failure is None, window
        assert abs(window.loss - other.loss) <= 1e-6, (window, other)
        sampled |= window.gradient is not None
    metric_apart = abs(ours.evaluate() - plain.evaluate())
    return {
        "apart": farthest(whole(ours), list(plain.model.parameters())),
        "sampled": sampled,
        "metric_apart": metric_apart,
    }


def refusal(job: Job, mesh: str = "pipe=2") -> str:
    try:
        PipelineEngine(job, mesh=mesh)
    except AutotuneError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main() -> None:
    """Write what this rank finds."""
    torch.set_num_threads(1)
    models: dict[str, Callable[[], nn.Module]] = {
        "twice": lambda: Twice(width=16, blocks=4, dropout=0.0),
        "residual": lambda: Residual(width=16, blocks=4, dropout=0.0),
    }
    refused = {name: refusal(make(model=model)) for name, model in models.items()}
    refused["units"] = refusal(make(), "pipe=2,units=3/4")
    refused["reduce"] = refusal(launched(make(), split("job+reduce=bf16", where="test")[1]))
    refused["interleaved"] = refusal(make(accumulation_choices=(1,)), "pipe=2,schedule=interleaved")
    engine = PipelineEngine(make(), options=EngineOptions(meter_memory=False))
    resident = sum(
        {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in engine.model.parameters()}.values()
    )
    whole_bytes = sum(one.nbytes for one in TorchEngine(make()).model.parameters())
    normalised = make(
        model=Normalised,
        batches=rows,
        loss=lambda model, batch: model(batch).square().mean(),
        count=None,
        evaluate=lambda model: float(model(torch.ones(4, 6)).sum()),
    )
    found = {
        "refusals": refused,
        "tied": compared(make(model=tied)),
        "own_head": compared(make(model=lambda: OwnHead(width=16, blocks=4, dropout=0.0)), "pipe=2,units=3/3"),
        "lengths": compared(make(batches=lengths), "pipe=2,schedule=gpipe"),
        "norms": compared(normalised),
        "frozen": compared(make(model=frozen), "pipe=2,units=2/4"),
        "share_of_weights": resident / whole_bytes,
    }
    (Path(sys.argv[1]) / f"rank{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.barrier()


if __name__ == "__main__":
    main()

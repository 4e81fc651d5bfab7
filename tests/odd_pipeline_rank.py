"""Entry point that torchrun starts: one rank of pipelines of unusual models, which records what it finds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ranks import end_rank
from sharded_rank import at_random, farthest, make, whole
from sharded_rank import loss as token_loss
from small_models import TinyGPT
from torch import nn
from torch.utils.checkpoint import checkpoint

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


class Conditioned(TinyGPT):
    """Adds to each block's input what the embedding returns, by a weight that is zero at first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = first = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden + self.gate * first)
        return self.head(hidden)


class Checkpointed(TinyGPT):
    """Recomputes blocks by itself in training."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.training else block(hidden)
        return self.head(hidden)


class Noisy(TinyGPT):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().forward(tokens)
        return found + torch.randn_like(found) if self.training else found


class Gate(nn.Linear):
    """Leaves a term and a scale behind on itself in training."""

    term: torch.Tensor | None = None
    size: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self.training:
            self.term, self.size = super().forward(rows.detach()).square().mean(), rows.detach().norm()
        return super().forward(rows).tanh()


class Gates(nn.Module):
    """Blocks in a row, and a BatchNorm that belongs to none."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gate(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6, affine=False) if norm else nn.Identity()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows)
        return self.norm(rows)


class Turning(Gates):
    """Passes rows of other shapes between blocks, depending on their values."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        turned = bool(rows[0, 0] > 0)
        rows = rows.unsqueeze(0) if turned else rows
        for block in self.blocks:
            rows = block(rows)
        return rows.mean(0) if turned else 2 * rows


class Estimating(torch.optim.SGD):
    """Divides each update by the norm of the whole gradient."""

    def step(self, closure: Any = None) -> Any:
        given = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.norm() for one in given]).norm()
        for one in given:
            one.div_(norm)
        return super().step(closure)


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


def by_place(parameters: Any) -> torch.optim.Optimizer:
    *most, last = list(parameters)
    return torch.optim.AdamW([{"params": most}, {"params": [last], "lr": 3e-2}], lr=1e-3)


def gated(**changes: Any) -> Job:
    settings: dict[str, Any] = {
        "model": Gates,
        "batches": rows,
        "loss": lambda model, batch: model(batch).square().mean(),
        "count": None,
        "evaluate": lambda model: float(model(torch.ones(4, 6)).sum()),
    }
    return make(**{**settings, **changes})


def balanced_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    found = model(batch)
    return found.square().mean() + sum(block.term for block in model.blocks) if model.training else found.mean()


def scaled_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    found = model(batch)
    return found.square().mean() / model.blocks[0].size if model.training else found.mean()


def autocast_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return token_loss(model, batch)


def overflowing(seed: int) -> Iterator[torch.Tensor]:
    for number, batch in enumerate(rows(seed)):
        yield batch * (1e30 if number == 0 else 1)


def regularised_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    found = model(batch).square().mean()
    return found + sum(one.square().sum() for one in model.parameters()) if model.training else found


def rows(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 6, generator=generator)


def compared(job: Job, mesh: str = "pipe=2") -> dict[str, Any]:
    """Train under a random plan at every step, and train the same with plain torch."""
    import random

    options, draw = EngineOptions(meter_memory=False, statistics_every=3), random.Random(5)
    mesh += "" if "schedule" in mesh else "".join(sys.argv[2:])
    ours, plain = PipelineEngine(job, mesh=mesh, options=options), TorchEngine(job, options=options)
    sampled = False
    for _ in range(7):
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
    for name, kind in (("conditioned", Conditioned), ("checkpointed", Checkpointed), ("noisy", Noisy)):
        models[name] = functools.partial(kind, width=16, blocks=4, dropout=0.0)
    refused = {name: refusal(make(model=model)) for name, model in models.items()}
    refused["balanced"] = refusal(gated(loss=balanced_loss))
    refused["scaled_at_first"] = refusal(gated(loss=scaled_loss, batches=overflowing))
    refused["scaled"] = refusal(gated(loss=scaled_loss))
    refused["estimating"] = refusal(make(optimizer=lambda parameters: Estimating(parameters, lr=0.1)))
    refused["closure"] = refusal(make(optimizer=torch.optim.LBFGS))
    refused["units"] = refusal(make(), "pipe=2,units=3/4")
    refused["reduce"] = refusal(launched(make(), split("job+reduce=bf16", where="test")[1]))
    refused["interleaved"] = refusal(make(accumulation_choices=(1,)), "pipe=2,schedule=interleaved")
    engine = PipelineEngine(make(), options=EngineOptions(meter_memory=False))
    resident = sum(
        {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in engine.model.parameters()}.values()
    )
    whole_bytes = sum(one.nbytes for one in TorchEngine(make()).model.parameters())
    summed = PipelineEngine(gated(evaluate=lambda model: float(sum(one.sum() for one in model.parameters()))))
    found = {
        "refusals": refused,
        "tied": compared(make(model=tied)),
        "own_head": compared(make(model=lambda: OwnHead(width=16, blocks=4, dropout=0.0)), "pipe=2,units=3/3"),
        "lengths": compared(make(batches=lengths), "pipe=2,schedule=gpipe"),
        "lengths_interleaved": compared(make(batches=lengths), "pipe=2,schedule=interleaved"),
        "norms": compared(gated(model=Normalised)),
        "root_norm": compared(gated(model=functools.partial(Gates, norm=True))),
        "autocast": compared(make(loss=autocast_loss)),
        "overflowing": compared(gated(batches=overflowing)),
        "by_place": compared(make(optimizer=by_place)),
        "turning": compared(gated(model=Turning)),
        "regularised": compared(gated(loss=regularised_loss)),
        "metric_of_weights": str(summed.evaluate()),
        "frozen": compared(make(model=frozen), "pipe=2,units=2/4"),
        "share_of_weights": resident / whole_bytes,
    }
    end_rank(Path(sys.argv[1]), found)


if __name__ == "__main__":
    main()

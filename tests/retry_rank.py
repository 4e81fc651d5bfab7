"""Entry point that torchrun starts: one rank with a TunedTrainer that runs out of memory at given steps."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from test_integrations_retry import Noisy, arguments, padded, texts
from test_live import RESTLESS, seeded

from autotune.live.integrations.transformers import TunedTrainer

STEPS = 7


class Fails(torch.autograd.Function):
    """Raises in forward or in backward, as a failed allocation does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        """Raise, or return the input."""
        if where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        ctx.where = where
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Raise, or return the input."""
        if ctx.where == "backward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return gradient, None


class Sparing(Noisy):
    """A model that runs out of memory for more samples than a step's limit."""

    where = "forward"
    limits: dict[int, int]
    step = 0

    def __init__(self) -> None:
        super().__init__()
        for part in self.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        self.unused = torch.nn.Linear(4, 4)
        self.sometimes = torch.nn.Parameter(torch.zeros(16))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        """Return the output of ``Noisy``, or run out of memory."""
        outputs = super().forward(input_ids, attention_mask, labels)
        if self.training and dist.get_rank() == self.step % 2:
            # Gets a gradient on one rank only.
            outputs["loss"] = outputs["loss"] + (self.sometimes - 0.1).square().mean()
        if self.training and len(input_ids) > self.limits.get(self.step, 10**9):
            outputs["loss"] = Fails.apply(outputs["loss"], self.where)
        return outputs


def main() -> None:
    """Train one rank."""
    folder, way = Path(sys.argv[1]), sys.argv[2]
    # rank, step, largest micro-batch that fits from then on, and the place where larger ones fail.
    rank_that_fails, first, fits, where = (*sys.argv[3].split(","),)
    settings = arguments(
        folder,
        max_steps=STEPS,
        ddp_backend="gloo",
        ddp_find_unused_parameters=True,
        average_tokens_across_devices=False,
    )
    rank = settings.process_index
    seeded()
    model = Sparing()
    model.where = where
    steps = range(int(first), STEPS) if rank == int(rank_that_fails) else range(0)
    model.limits = dict.fromkeys(steps, int(fits))

    class Counting(TunedTrainer):
        """A trainer that tells the model the number of the current step."""

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            """Tell the model the step, and run the step."""
            self.model.step = self.state.global_step
            ks.append(0)
            return super().training_step(*args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            """Count the micro-batches."""
            ks[-1] += bool(self.tuner and not self.tuner.probing and torch.is_grad_enabled())
            return super().compute_loss(*args, **kwargs)

    ks: list[int] = []
    choices = {"accumulation_choices": (2, 4, 8)} if way == "reference" else {}
    options = {"mode": "rounding", "policy": "exact", "memory_budget_bytes": 10**9, "limits": RESTLESS}
    trainer = Counting(
        model,
        settings,
        train_dataset=texts(128),
        data_collator=padded,
        tuning={**options, "runs_dir": folder / "runs"},
    )
    for name, value in choices.items():
        setattr(trainer._tuning, name, value)
    error = None
    try:
        trainer.train()
    except torch.OutOfMemoryError as caught:
        error = str(caught)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    document = {
        "error": error,
        "weights": hashlib.sha256(weights).hexdigest(),
        "parameters": [value for p in model.parameters() for value in p.detach().flatten().tolist()],
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "ks": ks,
        "locks": {} if trainer.tuner is None else trainer.tuner.locks,
        "why": None if trainer.tuner is None else trainer.tuner.detached_because,
    }
    (folder / f"{way}-{rank}.json").write_text(json.dumps(document))
    trainer._tuning.detach()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

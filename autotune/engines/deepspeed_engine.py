"""Train a job on several ranks through DeepSpeed (ZeRO stages 0 to 3) under any plan."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from typing import Any

import torch

from autotune.engines.deepspeed_config import engine_config
from autotune.engines.deepspeed_library import connect, imported
from autotune.engines.rank_engine import RankEngine
from autotune.engines.torch_engine import EngineOptions
from autotune.job import Job
from autotune.mechanics import stepping
from autotune.mechanics.sharded import ShardedUpdate

# DeepSpeed's default size of a communication buffer, in elements.
_BUCKET = 500_000_000


class DeepSpeedEngine(RankEngine):
    """An engine that trains one job on the ranks of a process group through DeepSpeed.

    Args:
        job: the job; its batches are the global ones.
        zero_stage: ZeRO stage, 0 to 3.
        seed: random seed for weights, batches and training.
        device: ``cpu``, or an accelerator's type; each rank takes the device with its local rank. ``None`` for the
            accelerator of this machine, if any.
        options: how to measure.
        config: the user's own DeepSpeed configuration; ``None`` for none.

    Attributes:
        zero_stage: ZeRO stage.

    Raises:
        InputError: if DeepSpeed is missing, the stage is unknown, the configuration contradicts the job, or ranks were
            started with different arguments.
        JobError: if the job cannot be used, or a batch has fewer samples than there are ranks.
    """

    title = "DeepSpeed"
    unscaled_because = "DeepSpeed scales losses itself, which the tuner cannot control"
    not_asked_because = "DeepSpeed has linear layers of its own"
    unreleased_because = "DeepSpeed keeps the gradients until its own update"

    def __init__(
        self,
        job: Job,
        *,
        zero_stage: int = 0,
        seed: int = 0,
        device: str | None = None,
        options: EngineOptions | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.zero_stage = zero_stage
        # Stage 3 learns the order of the modules in its first step and prefetches from the second on.
        self.settling_steps = 1 if zero_stage == 3 else 0
        self._config = engine_config(job, zero_stage, config)
        super().__init__(job, seed=seed, device=device, options=options)

    def connect(self, device: str) -> None:
        """Import DeepSpeed, and join the process group of the ranks, or make one of this process alone."""
        self._deepspeed = imported(device)
        connect(self._deepspeed, device)

    def settings(self) -> Mapping[str, Any]:
        """Return the configuration."""
        return {"config": self._config}

    def prepared(self, optimizer: torch.optim.Optimizer) -> stepping.Update:
        """Wrap the model and the optimizer in DeepSpeed's engine."""
        self.restrict_space()
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._config = sized(self._config, trained)
        # Keep DeepSpeed's output apart from this program's own.
        with redirect_stdout(sys.stderr):
            engine, *_ = self._deepspeed.initialize(model=self.model, optimizer=optimizer, config=self._config)
        self.called = engine
        return ShardedUpdate(engine, optimizer, trained, self.job.clip_norm)

    def close(self) -> None:
        """Release the model and DeepSpeed's engine; the process group stays."""
        super().close()
        self.called.destroy()


def sized(config: Mapping[str, Any], trained: Iterable[torch.nn.Parameter]) -> dict[str, Any]:
    """Return a configuration whose communication buffer is at most as large as the model, unless its size is set.

    DeepSpeed's default buffer takes 2 GB even for a small model.
    """
    entries = sum(parameter.numel() for parameter in trained)
    zero = {"reduce_bucket_size": min(entries, _BUCKET), **config["zero_optimization"]}
    return {**config, "zero_optimization": zero}

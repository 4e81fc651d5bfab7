"""What a live tuner was attached to, and the result of one of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from autotune.job import LearningRateRule
from autotune.live.asked_budget import BudgetFunction, Size
from autotune.live.limits import Limits, Mode, Stage
from autotune.plan import PlanSpace
from autotune.profiling.step_signature import Signature

Budget = float | str | None | Callable[[], float | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """What a tuner was attached to, and how.

    Attributes:
        name: what the run is called.
        model: the model, without what runs it in parallel.
        optimizer: its optimizer.
        device: where it lives.
        space: the plans that the mode allows.
        locks: why something is locked, by what.
        mode: what may change.
        stage: how far the tuner goes.
        limits: its limits.
        budget: the memory budget, or what returns it.
        total_steps: length of the run; ``None`` if it is not known.
        adaptive: whether a step consumes k batches.
        lr_rule: how the learning rate follows the samples of a step, where it does.
        accumulation_steps: micro-batches that the caller accumulates by itself in a step; then it is every plan's k.
        bucket_bytes: what is held besides for the gradients' reduction over ranks.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    space: PlanSpace
    locks: dict[str, str]
    mode: Mode
    stage: Stage
    limits: Limits
    budget: Size | BudgetFunction
    total_steps: int | None
    accumulation_steps: int
    adaptive: bool = False
    lr_rule: LearningRateRule = "none"
    bucket_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAhead:
    """What is known of a step before it runs.

    Attributes:
        batch_bytes: Bytes of its batch, or of the first that the caller accumulates.
        largest_bytes: Bytes of the largest batch that it is to hold.
        samples: Samples in its batch.
        signature: What else its memory depends on.
    """

    batch_bytes: int
    largest_bytes: int
    samples: int
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Result of one optimizer step of the run.

    Attributes:
        seconds: from its first micro-batch to the end of its update; where it consumes several batches, without what
            the caller did between them.
        samples: samples consumed.
        batch_bytes: bytes of its batch; of the largest, where the caller accumulates several.
        all_bytes: bytes of all batches that it consumed.
        later_bytes: bytes of the largest batch after the first one; 0 where there was one alone.
        losses: weighed losses of its micro-batches, still on the device.
        norm: 2-norm of its gradient.
        stepped: whether the optimizer stepped.
    """

    seconds: float
    samples: int
    batch_bytes: int
    all_bytes: int
    later_bytes: int
    losses: tuple[torch.Tensor, ...]
    norm: float
    stepped: bool

"""A run with a tuner attached, and its steps before and after they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from autotune.job import LearningRateRule
from autotune.live.asked_budget import BudgetFunction, Size
from autotune.live.limits import Limits, Mode, Stage
from autotune.mechanics.cutting import unevenness
from autotune.plan import PlanSpace
from autotune.profiling.step_signature import Signature

Budget = float | str | None | Callable[[], float | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A run, and how the tuner is attached to it.

    Attributes:
        name: name of the run.
        model: the model, without a parallel wrapper.
        optimizer: the model's optimizer.
        device: the model's device.
        space: the plans that the mode allows.
        locks: reasons for locks, by name.
        mode: what the tuner may change.
        stage: whether the tuner observes or acts.
        limits: limits of the tuner.
        budget: the memory budget, or the function that returns it.
        total_steps: length of the run in optimizer steps; ``None`` if it is not known.
        adaptive: whether a step consumes k batches.
        lr_rule: how the learning rate scales with the samples of a step.
        accumulation_steps: micro-batches that the caller accumulates in a step; if above 1, the k of every plan.
        learns_accumulation: whether the steps of a loop of ``begin_step()`` show how many that are.
        spread: whether the model's parameters are spread over ranks.
        bucket_bytes: bytes of buffers that reduce gradients over ranks; for an engine, also of its master weights.
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
    learns_accumulation: bool = False
    adaptive: bool = False
    lr_rule: LearningRateRule = "none"
    spread: bool = False
    bucket_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAhead:
    """A step before it runs.

    Attributes:
        batch_bytes: Bytes of its batch, or of the first batch that the caller accumulates.
        largest_bytes: Bytes of the largest batch that is expected in the step.
        samples: Number of samples in its batch.
        cut_samples: The same where k cuts them, as equally as it can; 0 where it cuts none, or ranks cut other batches.
        signature: What its memory depends on besides bytes.
    """

    batch_bytes: int
    largest_bytes: int
    samples: int
    cut_samples: int
    signature: Signature

    def as_equal_pieces(self, num_bytes: int, k: int, *, later: bool = False) -> int:
        """Return the bytes of a batch whose equal pieces are as large as the largest piece of this step's batch.

        Args:
            num_bytes: Bytes of this step's batch, or of its largest one.
            k: The accumulation steps of the step's plan.
            later: Whether the first piece is left out.
        """
        return round(num_bytes * unevenness(self.cut_samples, k, later=later))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Result of one optimizer step of the run.

    Attributes:
        seconds: time from its first micro-batch to the end of its update, without the caller's time between batches.
        samples: samples consumed.
        batch_bytes: bytes of its batch, or of the largest of several.
        all_bytes: bytes of all its batches.
        later_bytes: bytes of the largest batch after the first; 0 if there was only one.
        losses: weighted losses of its micro-batches, still on the device.
        norm: 2-norm of its gradient.
        stepped: whether the optimizer stepped.
        items: loss-bearing items of the step; ``None`` if they are not counted.
        handed: bytes that the counted units were handed of each batch, or of all of them together; none if no units are
            counted.
        handed_calls: calls of these units per forward pass.
        called: the units that it called, if steps call different ones; otherwise empty.
    """

    seconds: float
    samples: int
    batch_bytes: int
    all_bytes: int
    later_bytes: int
    losses: tuple[torch.Tensor, ...]
    norm: float
    stepped: bool
    items: int | None = None
    handed: tuple[int, ...] = ()
    handed_calls: int = 0
    called: frozenset[str] = frozenset()

    @property
    def handed_bytes(self) -> int:
        """Return the most bytes that the counted units were handed of one of its batches; 0 if none are counted."""
        return max(self.handed, default=0)

"""How far the form in which ranks send gradients and weights changes the gradient of a step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import distributed

from autotune import knobs
from autotune.engines.fsdp2_engine import Fsdp2Engine
from autotune.job import Job

# Steps before the measurement: by then the factors of PowerSGD point to where gradients are large.
_STEPS = 8
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SentError:
    """Difference of a step's gradient from the one that ranks make when they send all in its own form.

    Attributes:
        relative: 2-norm of the difference over that of the gradient.
        cosine: cosine between both gradients.
        noise: standard deviation of the gradient over batches, over its 2-norm; ``None`` if it cannot be told.
    """

    relative: float
    cosine: float
    noise: float | None

    def line(self, choice: str) -> str:
        """Return one line for users, about a launch choice."""
        noise = "" if self.noise is None else f", and the choice of the batch by {self.noise:.0%}"
        return f"+{choice} changes a step's gradient by {self.relative:.1%} (cosine {self.cosine:.3f}){noise}"


def sent_error(job: Job, make_engine: Callable[[Job], Fsdp2Engine]) -> SentError | None:
    """Measure the gradient of one step with a job's forms of sending and without; all ranks must call this.

    A few steps are trained first. Each rank has the model twice meanwhile.

    Args:
        job: the job.
        make_engine: function that returns an engine of a job on these ranks.

    Returns:
        The error; ``None`` if the job's ranks send all in its own form, or the gradient is 0 or not finite.
    """
    if knobs.of_ranks(job.launch.knobs) is None:
        return None
    plain = knobs.of_one_rank(job.launch.knobs)
    with (
        contextlib.closing(make_engine(job)) as engine,
        contextlib.closing(make_engine(replace(job, launch=replace(job.launch, knobs=plain)))) as exact,
    ):
        engine.run(_STEPS)
        exact.continue_at(engine)
        pairs = zip(engine.next_gradient(_SEED), exact.next_gradient(_SEED), strict=True)
        found = [_products(own, true) for own, true in pairs if own is not None and true is not None]
        sums = torch.stack(found).sum(0) if found else torch.zeros(4, dtype=torch.float64)
        distributed.all_reduce(sums)
        apart, own, true, product = sums.tolist()
        if not (math.isfinite(apart) and own > 0 and true > 0):
            return None
        exact.run(1)
        latest = exact.monitor.state.latest
        scale = None if latest is None else latest.noise_scale
        noise = None if scale is None or scale < 0 else math.sqrt(scale / job.batch_size)
    return SentError(relative=math.sqrt(apart / true), cosine=product / math.sqrt(own * true), noise=noise)


def _products(own: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the squared norms of the difference of two gradients and of each, and their product."""
    own, true = own.double().flatten(), true.double().flatten()
    apart = own - true
    return torch.stack([apart @ apart, own @ own, true @ true, own @ true]).cpu()

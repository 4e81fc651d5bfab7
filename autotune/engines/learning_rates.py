"""The learning rates of a run: those of the job's optimizer, scheduled and scaled as the job says."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch

from autotune.cost_model.learning_rate import batch_factor
from autotune.engines.job_checks import build_scheduler
from autotune.errors import JobError
from autotune.job import Job

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

logger = logging.getLogger(__name__)


class LearningRates:
    """The learning rates of one run's optimizer.

    Attributes:
        scale: factor on the rates beside those of the schedule and of the batch; a torch scheduler's rates ignore it.

    Args:
        job: the job.
        optimizer: its optimizer, before the first step.
        total_samples: samples of the whole run, over which the job's schedule extends.
    """

    def __init__(self, job: Job, optimizer: torch.optim.Optimizer, total_samples: int) -> None:
        self._job = job
        self._optimizer = optimizer
        self._total_samples = total_samples
        # Schedulers change momenta and others besides the rates.
        self._first = [_settings(group) for group in optimizer.param_groups]
        self._base_rates = [first["lr"] for first in self._first]
        self.scale = 1.0
        self._steps = 0
        self._ended = False
        self._scheduler: LRScheduler | None = build_scheduler(job, optimizer)

    def set(self, optimizer: torch.optim.Optimizer, *, k: int, samples: int) -> None:
        """Set the rates of the next step; a torch scheduler has set them already.

        Args:
            optimizer: the optimizer, or a wrapper of it with the same groups.
            k: the plan's accumulation steps.
            samples: samples of the run after that step.
        """
        if self._scheduler is not None:
            return
        job, factor = self._job, self.scale
        if job.batching == "adaptive":
            factor *= batch_factor(job.lr_rule, k, 1)
        if job.schedule is not None:
            factor *= job.schedule.factor(samples / self._total_samples)
        for group, base in zip(optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor

    def advance(self) -> None:
        """Note that a step has ended.

        Raises:
            JobError: if the job's scheduler raises before the run's last step; after it, the last rates stay.
        """
        self._steps += 1
        if self._scheduler is None or self._ended:
            return
        try:
            with warnings.catch_warnings():
                # It warns if an update was skipped for an overflow, and if the optimizer is a copy.
                warnings.simplefilter("ignore")
                self._scheduler.step()
        except Exception as error:
            where = f"job {self._job.name!r}"
            if self._steps < self._job.max_steps:
                allowed = f"a scheduler for max_steps = {self._job.max_steps} steps"
                told = f"scheduler raised at step {self._steps}: {type(error).__name__}: {error}"
                raise JobError(told, where=where, allowed=allowed) from error
            logger.info("%s: the scheduler ends after %d steps; its last rates stay", where, self._steps)
            self._ended = True

    def seek(self, steps: int) -> None:
        """Go to the rates after a number of steps; the optimizer's own state is to be loaded afterwards."""
        if self._scheduler is None:
            self._steps = steps
            return
        for group, first in zip(self._optimizer.param_groups, self._first, strict=True):
            for key in set(group) - set(first) - {"params"}:
                del group[key]
            group.update(_settings(first))
        self._scheduler = build_scheduler(self._job, self._optimizer)
        self._steps, self._ended = 0, False
        for _ in range(steps):
            self.advance()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group holds beside parameters; schedulers write in place to rates that are tensors."""
    own = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in own.items()}

"""The training job that a user provides.

A job takes a dozen lines of ordinary PyTorch; ``envs/`` contains the reference jobs. Other processes receive only the
job's name (``charlm``, ``pkg.module:attr`` or ``path/to/file.py:attr``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from autotune.errors import JobError
from autotune.plan import Launch

if TYPE_CHECKING:
    import torch
    from torch import nn

    ModelBuilder = Callable[[], nn.Module]
    LossFunction = Callable[[nn.Module, Any], torch.Tensor]
    OptimizerBuilder = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    Evaluation = Callable[[nn.Module], float]

Batching = Literal["fixed", "adaptive"]
LearningRateRule = Literal["linear", "sqrt", "none"]

_LONGEST_NAME = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Origin of a job's data.

    Attributes:
        name: name of the data.
        size_bytes: number of bytes that were read.
        sha256: hexadecimal SHA-256 of those bytes.
    """

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCosine:
    """Learning-rate schedule: linear warm-up, then a half cosine down to a minimum.

    Attributes:
        warmup_frac: share of the run with warm-up.
        minimum_frac: minimum as a share of the base learning rate.

    Source: eq. 10 of the paper, whose typical values are the defaults (5 %, 0.1).
    """

    warmup_frac: float = 0.05
    minimum_frac: float = 0.1

    def __post_init__(self) -> None:
        for name in ("warmup_frac", "minimum_frac"):
            if not 0 <= getattr(self, name) <= 1:
                raise JobError(f"{name} is {getattr(self, name)!r}", where="schedule", allowed="0 to 1")

    def factor(self, progress: float) -> float:
        """Return the factor on the base learning rate.

        Args:
            progress: share of the run that is done after this update; clipped to 0..1.
        """
        progress = min(max(progress, 0.0), 1.0)
        if progress <= self.warmup_frac:
            return progress / self.warmup_frac if self.warmup_frac else 1.0
        share = (progress - self.warmup_frac) / (1 - self.warmup_frac)
        return self.minimum_frac + (1 - self.minimum_frac) * 0.5 * (1 + math.cos(math.pi * share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A complete training job.

    Attributes:
        name: name of the job in reports.
        model: ``() -> nn.Module`` with fresh weights drawn from torch's global generator.
        batches: ``(seed) -> iterator of batches``; a batch is any tree of tensors with samples in dimension 0.
            When the iterator ends, a new one is made with another seed derived from the first.
        loss: ``(model, batch) -> scalar tensor``, the mean over the batch's loss-bearing items.
        count: ``(batch) -> int``, number of loss-bearing items; ``None`` counts samples.
        optimizer: ``(parameters) -> torch.optim.Optimizer``.
        evaluate: ``(model) -> float``, the metric to which ``target`` refers.
        target: value of the metric at which the job has reached its target.
        goal: whether the metric is minimised (``min``) or maximised (``max``).
        batch_size: samples in one batch of ``batches``.
        batching: ``fixed``: a step consumes one batch and k splits it (the same gradient in less memory);
            ``adaptive``: a step consumes k batches, and the learning rate follows ``lr_rule``.
        accumulation_choices: allowed k, in ascending order from 1.
        lr_rule: how the learning rate follows the effective batch under adaptive batching.
        schedule: the learning-rate schedule over the run; ``None`` keeps the optimizer's own rate.
        clip_norm: the largest 2-norm of a gradient; ``None`` never clips.
        units: names of the modules that are units; ``None`` finds them automatically.
        max_steps: steps (of one batch each) after which a run ends even if it has not reached the target.
        evaluate_every: steps between evaluations.
        data_sources: ``() -> sequence of DataSource``; recorded in every run.
        launch: launch choices that replace the job's own, set by ``autotune.launching``; engines apply ``fp32``.
    """

    name: str
    model: ModelBuilder
    batches: Callable[[int], Iterator[Any]]
    loss: LossFunction
    optimizer: OptimizerBuilder
    evaluate: Evaluation
    target: float
    batch_size: int
    count: Callable[[Any], int] | None = None
    goal: Literal["min", "max"] = "min"
    batching: Batching = "fixed"
    accumulation_choices: tuple[int, ...] = (1, 2, 4)
    lr_rule: LearningRateRule = "linear"
    schedule: WarmupCosine | None = None
    clip_norm: float | None = 1.0
    units: Sequence[str] | None = None
    max_steps: int = 400
    evaluate_every: int = 5
    data_sources: Callable[[], Sequence[DataSource]] | None = None
    launch: Launch = field(default_factory=Launch)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= _LONGEST_NAME:
            name = repr(self.name)[:80]
            raise JobError(f"name is {name}", where="job", allowed=f"text of at most {_LONGEST_NAME} characters")
        for name in ("model", "batches", "loss", "optimizer", "evaluate"):
            self._require(callable(getattr(self, name)), name, "a function")
        for name in ("count", "data_sources"):
            value = getattr(self, name)
            self._require(value is None or callable(value), name, "a function, or None")
        self._require(self.goal in ("min", "max"), "goal", "min, max")
        self._require(self.batching in ("fixed", "adaptive"), "batching", "fixed, adaptive")
        self._require(self.lr_rule in ("linear", "sqrt", "none"), "lr_rule", "linear, sqrt, none")
        self._require(_is_number(self.target) and math.isfinite(self.target), "target", "a number")
        for name in ("batch_size", "max_steps", "evaluate_every"):
            self._require(_is_positive_whole(getattr(self, name)), name, "a whole number >= 1")
        clip = self.clip_norm
        self._require(clip is None or (_is_number(clip) and clip > 0), "clip_norm", "a number > 0, or None")
        scheduled = self.schedule is None or isinstance(self.schedule, WarmupCosine)
        self._require(scheduled, "schedule", "a WarmupCosine, or None")
        named = self.units is None or (not isinstance(self.units, str) and _are_texts(self.units))
        self._require(named, "units", "a list of module names, or None")
        self._check_accumulation_choices()

    def _check_accumulation_choices(self) -> None:
        allowed = "ascending whole numbers that begin with 1"
        self._require(isinstance(self.accumulation_choices, Iterable), "accumulation_choices", allowed)
        choices = tuple(self.accumulation_choices)
        object.__setattr__(self, "accumulation_choices", choices)
        good = bool(choices) and all(_is_positive_whole(k) for k in choices) and choices[0] == 1
        self._require(good and list(choices) == sorted(set(choices)), "accumulation_choices", allowed)
        if self.batching == "fixed":
            limit = f"at most batch_size = {self.batch_size}"
            self._require(choices[-1] <= self.batch_size, "accumulation_choices", limit)

    def _require(self, holds: bool, name: str, allowed: str) -> None:
        if not holds:
            raise JobError(f"{name} is {getattr(self, name)!r}", where=f"job {self.name!r}", allowed=allowed)

    @property
    def total_samples(self) -> int:
        """Return the samples of a run of ``max_steps`` steps of one batch each."""
        return self.max_steps * self.batch_size

    def arrived(self, metric: float) -> bool:
        """Tell whether a metric meets the target; NaN never does."""
        return metric <= self.target if self.goal == "min" else metric >= self.target


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_texts(values: object) -> bool:
    return isinstance(values, Sequence) and all(isinstance(value, str) for value in values)


def _is_positive_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1

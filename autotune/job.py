"""The training job that a user provides.

A job takes a dozen lines of ordinary PyTorch; ``envs/`` contains the reference jobs. Other processes receive only the
job's name (``charlm``, ``pkg.module:attr`` or ``path/to/file.py:attr``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from autotune.choices import Storage
from autotune.errors import JobError
from autotune.plan import Launch

if TYPE_CHECKING:
    import torch
    from torch import nn

    ModelBuilder = Callable[[], nn.Module]
    LossFunction = Callable[[nn.Module, Any], torch.Tensor]
    OptimizerBuilder = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    SchedulerBuilder = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
    Evaluation = Callable[[nn.Module], float]

Batching = Literal["fixed", "adaptive"]
Split = Literal["samples", "tokens"]
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
        target: value of the metric at which the job has reached its target; ``None`` for a job without one, whose runs
            train all their samples: then time and memory are compared at equal samples.
        goal: whether the metric is minimised (``min``) or maximised (``max``).
        batch_size: samples in one batch of ``batches``.
        batching: ``fixed``: a step consumes one batch and k splits it (the same gradient in less memory);
            ``adaptive``: a step consumes k batches, and the learning rate follows ``lr_rule``.
        split: how k splits a batch: ``samples``: consecutive samples, as many in each micro-batch; ``tokens``: about
            equal cost in each, for batches of samples of different lengths. The update is the same up to rounding, but
            samples change their order, so that dropout, for example, draws other numbers for each of them.
        sample_cost: ``(batch) -> one number >= 0 per sample``, by which ``tokens`` balances; ``None`` counts the
            loss-bearing items of each sample. For attention over a sequence's length, ``length + length**2 / (12 *
            width)`` is about right.
        trim: ``(micro-batch) -> micro-batch`` without padding that none of its samples needs, used by ``tokens``, which
            then puts samples of like cost together; ``None`` leaves all padding.
        accumulation_choices: allowed k, in ascending order from 1.
        lr_rule: how the learning rate follows the effective batch under adaptive batching.
        schedule: the learning-rate schedule over the run; ``None`` keeps the optimizer's own rate.
        scheduler: ``(optimizer) -> torch scheduler`` in place of ``schedule``; it is stepped after each update, and
            keeps its last rates after its end. It needs fixed batching, under which the number of updates is known.
        clip_norm: the largest 2-norm of a gradient; ``None`` never clips.
        units: names of the modules that are units; ``None`` finds them automatically.
        tensor_parallel: how layers may be divided between ranks, by pattern of their names, such as ``{"blocks.*.up":
            "colwise", "blocks.*.down": "rowwise"}``; ``None`` for the model's own ``tp_plan``, if it has one. Meshes
            with ``tp`` need it.
        storages: names of the storages that plans may choose beside ``save`` and ``recompute``; ``None`` for none.
            Some, such as ``compress8``, give approximate gradients.
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
    target: float | None = None
    batch_size: int
    count: Callable[[Any], int] | None = None
    goal: Literal["min", "max"] = "min"
    batching: Batching = "fixed"
    split: Split = "samples"
    sample_cost: Callable[[Any], Any] | None = None
    trim: Callable[[Any], Any] | None = None
    accumulation_choices: tuple[int, ...] = (1, 2, 4)
    lr_rule: LearningRateRule = "linear"
    schedule: WarmupCosine | None = None
    scheduler: SchedulerBuilder | None = None
    clip_norm: float | None = 1.0
    units: Sequence[str] | None = None
    tensor_parallel: Mapping[str, str] | None = None
    storages: Sequence[str] | None = None
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
        for name in ("count", "scheduler", "data_sources", "sample_cost", "trim"):
            value = getattr(self, name)
            self._require(value is None or callable(value), name, "a function, or None")
        self._require(self.goal in ("min", "max"), "goal", "min, max")
        self._require(self.batching in ("fixed", "adaptive"), "batching", "fixed, adaptive")
        self._require(self.split in ("samples", "tokens"), "split", "samples, tokens")
        known = self.split == "samples" or self.count is not None or self.sample_cost is not None
        self._require(known, "split", "samples, unless count or sample_cost tells the tokens of a sample")
        self._require(self.lr_rule in ("linear", "sqrt", "none"), "lr_rule", "linear, sqrt, none")
        target = self.target
        self._require(target is None or (_is_number(target) and math.isfinite(target)), "target", "a number, or None")
        for name in ("batch_size", "max_steps", "evaluate_every"):
            self._require(_is_positive_whole(getattr(self, name)), name, "a whole number >= 1")
        clip = self.clip_norm
        self._require(clip is None or (_is_number(clip) and clip > 0), "clip_norm", "a number > 0, or None")
        scheduled = self.schedule is None or isinstance(self.schedule, WarmupCosine)
        self._require(scheduled, "schedule", "a WarmupCosine, or None")
        alone = self.scheduler is None or (self.schedule is None and self.batching == "fixed")
        self._require(alone, "scheduler", "None with a schedule, or with adaptive batching")
        named = self.units is None or (not isinstance(self.units, str) and _are_texts(self.units))
        self._require(named, "units", "a list of module names, or None")
        divides = self.tensor_parallel
        texts = isinstance(divides, Mapping) and _are_texts([*divides, *divides.values()])
        self._require(divides is None or texts, "tensor_parallel", "styles by name of layers, or None")
        allowed = f"a list of some of {', '.join(Storage)}; or None"
        known = self.storages is None or (_are_texts(self.storages) and set(self.storages) <= set(Storage))
        self._require(known and not isinstance(self.storages, str), "storages", allowed)
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

    @classmethod
    def from_loader(
        cls,
        model: nn.Module | ModelBuilder,
        loader: Iterable[Any],
        loss: Callable[..., torch.Tensor] | None,
        optimizer: torch.optim.Optimizer | OptimizerBuilder,
        scheduler: torch.optim.lr_scheduler.LRScheduler | SchedulerBuilder | None = None,
        evaluate: Evaluation | Iterable[Any] | None = None,
        *,
        target: float | None = None,
        goal: Literal["min", "max"] = "min",
        name: str | None = None,
        count: Callable[[Any], int] | None = None,
        clip_norm: float | None = None,
        max_steps: int = 400,
        evaluate_every: int = 5,
        batch_size: int | None = None,
        accumulation_choices: tuple[int, ...] | None = None,
        units: Sequence[str] | None = None,
    ) -> Job:
        """Return the job of a training loop, from the objects that the loop has.

        The job keeps copies of the model, the optimizer and the scheduler as they are now, with their state; each run
        begins with these, whatever its seed. The seed decides the order of the batches and what dropout drops.

        Args:
            model: the model, or a function that builds it.
            loader: a ``DataLoader``, or another iterable of batches that begins anew each time. Its batches of a seed
                are those that it gives after ``torch.manual_seed(seed)``; its own generators get that seed.
            loss: ``(model, batch) -> scalar``, the mean over the batch; or a loss module such as
                ``nn.CrossEntropyLoss()`` for batches of inputs and targets; or ``None`` for a model that computes its
                loss itself, as Hugging Face's do.
            optimizer: the optimizer, with its parameter groups, or a function ``(parameters) -> optimizer``.
            scheduler: a torch scheduler that is stepped after each update, or a function ``(optimizer) -> scheduler``.
            evaluate: ``(model) -> float``; or a loader, whose mean loss is the metric; or ``None`` for the mean loss of
                a few training batches, which are the same in each run.
            target: as for :class:`Job`; ``None`` compares time and memory per sample.
            goal: as for :class:`Job`.
            name: name of the job in reports; ``None`` for that of the model's class.
            count: as for :class:`Job`; ``None`` counts the targets that the loss module or the model does not ignore,
                and for other losses samples.
            clip_norm: as for :class:`Job`.
            max_steps: as for :class:`Job`.
            evaluate_every: as for :class:`Job`.
            batch_size: samples in one batch; ``None`` asks the loader.
            accumulation_choices: as for :class:`Job`; ``None`` for those of 1, 2 and 4 that the batch allows.
            units: as for :class:`Job`.

        Raises:
            JobError: if something cannot be rebuilt for each run; the message says what, and the remedy.
        """
        from autotune.own_loop import job_of

        return job_of(
            model,
            loader,
            loss,
            optimizer,
            scheduler=scheduler,
            evaluate=evaluate,
            target=target,
            goal=goal,
            name=name,
            count=count,
            clip_norm=clip_norm,
            max_steps=max_steps,
            evaluate_every=evaluate_every,
            batch_size=batch_size,
            accumulation_choices=accumulation_choices,
            units=units,
        )

    @classmethod
    def from_trainer(
        cls,
        trainer: Any,
        *,
        evaluate: Evaluation | Iterable[Any] | None = None,
        target: float | None = None,
        goal: Literal["min", "max"] = "min",
        name: str | None = None,
        max_steps: int | None = None,
        evaluate_every: int = 5,
        accumulation_choices: tuple[int, ...] | None = None,
        units: Sequence[str] | None = None,
    ) -> Job:
        """Return the job of a Hugging Face Trainer: its model, data, loss, optimizer, scheduler and clipping.

        The Trainer stays as it is. A batch of the job is what the Trainer consumes in one update: with
        ``gradient_accumulation_steps`` it is so many times as large, and k cuts it again. The Trainer's own precision
        (``bf16``, ``fp16``) and checkpointing are left out, since plans choose both.

        Args:
            trainer: a Trainer that has not trained yet, on one device. It may override ``compute_loss`` and its
                loaders.
            evaluate: as for :meth:`from_loader`; ``None`` for the mean loss of the first batches of ``eval_dataset``,
                or without one of the training data.
            target: as for :class:`Job`; ``None`` compares time and memory per sample.
            goal: as for :class:`Job`.
            name: name of the job in reports; ``None`` for that of the model's class.
            max_steps: updates of a compared run; ``None`` for all of the Trainer's, over which its scheduler extends in
                any case.
            evaluate_every: as for :class:`Job`.
            accumulation_choices: as for :class:`Job`; ``None`` for those of 1, 2 and 4 that the batch allows.
            units: as for :class:`Job`.

        Raises:
            JobError: if the Trainer does more than a job can repeat; the message says what, and the remedy.
        """
        from autotune.own_trainer import job_of_trainer

        return job_of_trainer(
            trainer,
            evaluate=evaluate,
            target=target,
            goal=goal,
            name=name,
            max_steps=max_steps,
            evaluate_every=evaluate_every,
            accumulation_choices=accumulation_choices,
            units=units,
        )

    @property
    def total_samples(self) -> int:
        """Return the samples of a run of ``max_steps`` steps of one batch each."""
        return self.max_steps * self.batch_size

    def required_target(self, *, where: str) -> float:
        """Return the target.

        Args:
            where: the command that needs it, for the error.

        Raises:
            JobError: if the job has none.
        """
        if self.target is None:
            raise JobError(f"job {self.name!r} has no target", where=where, allowed="a job with a target")
        return self.target

    def arrived(self, metric: float) -> bool:
        """Return whether a metric meets the target; NaN never does, and nothing meets a target that is not there."""
        if self.target is None:
            return False
        return metric <= self.target if self.goal == "min" else metric >= self.target


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_texts(values: object) -> bool:
    return isinstance(values, Sequence) and all(isinstance(value, str) for value in values)


def _is_positive_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1

"""Copies of a job that train side by side, one batch at a time: unchanged, under given plans, or with a tuner."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autotune.engines.job_checks import build_model, build_optimizer
from autotune.job import Job
from autotune.live.attach import attach
from autotune.mechanics import controls, cutting, devices, randomness
from autotune.mechanics.cutting import Cutting
from autotune.plan import Plan


class Arm:
    """One copy of a job that trains one batch at a time, with its own random number generator state.

    Attributes:
        seconds: wall-clock seconds of each batch.
        cpu_seconds: CPU seconds of each batch, which other processes barely affect.
        losses: loss of each batch; if a batch is split, the loss of its last piece.

    Args:
        job: the job.
        seed: random seed for the weights and everything else that is random.
    """

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        devices.require_fp32_choice(job.launch.fp32, "cpu", where=f"job {job.name!r}")
        with randomness.isolated():
            randomness.seed_all(seed)
            self.model = build_model(job)
            self.model.train()
            self.optimizer = build_optimizer(job, self.model)
            self.random = randomness.capture()
        self.k = 1
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.losses: list[float] = []

    def take(self, batch: Any) -> None:
        """Train on one batch, and record the time."""
        with randomness.isolated():
            randomness.restore(self.random)
            computed, began = time.process_time(), time.perf_counter()
            loss = self.step(batch)
            devices.synchronize(loss.device)
            self.seconds.append(time.perf_counter() - began)
            self.cpu_seconds.append(time.process_time() - computed)
            self.random = randomness.capture()
        self.losses.append(float(loss.detach()))

    def step(self, batch: Any) -> torch.Tensor:
        """Train on one batch, in k pieces, as the job's own loop would; return the last piece's loss."""
        if self.k == 1:
            loss = self.job.loss(self.model, batch)
            loss.backward()
        else:
            pieces = Cutting.of(self.job).pieces(batch, self.k)
            weights = cutting.weights([cutting.count_items(piece, self.job.count) for piece in pieces])
            for piece, weight in zip(pieces, weights, strict=True):
                loss = self.job.loss(self.model, piece)
                (loss * weight).backward()
        self.update()
        return loss

    def update(self) -> None:
        """Clip, step and clear the gradients."""
        if self.job.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


class PlacedArm(Arm):
    """Arm that trains under a given plan for each batch; choosing the plan is not timed.

    Args:
        job: the job.
        seed: random seed for the weights.
        choose: returns the plan for a batch.
    """

    def __init__(self, job: Job, seed: int, choose: Callable[[Any], Plan]) -> None:
        super().__init__(job, seed)
        self._choose = choose
        self.plan: Plan | None = None

    def take(self, batch: Any) -> None:
        """Train on one batch under its plan."""
        plan = self._choose(batch)
        if plan is not self.plan:
            controls.apply(self.model, plan)
            self.plan, self.k = plan, plan.accumulation_steps
        super().take(batch)


class LiveArm(Arm):
    """Arm that trains with a tuner attached.

    Attributes:
        tuner: the tuner.
        plans: plan of each batch.
        updated: whether the optimizer stepped after each batch; if a step consumes several, only after the last.
        learning: whether each batch was used to profile the run.

    Args:
        job: the job.
        seed: random seed for the weights.
        arguments: arguments of ``attach``.
    """

    def __init__(self, job: Job, seed: int, arguments: Mapping[str, Any]) -> None:
        super().__init__(job, seed)
        settings = {"clip_norm": job.clip_norm, "runs_dir": None, **arguments}
        self.tuner = attach(self.model, self.optimizer, **settings)
        self.plans: list[Plan] = []
        self.updated: list[bool] = []
        self.learning: list[bool] = []

    def take(self, batch: Any) -> None:
        """Train on one batch, and record the time and whether the batch was used to profile the run."""
        super().take(batch)
        self.learning.append(self.tuner.learning)

    def step(self, batch: Any) -> torch.Tensor:
        """Train on one batch through the tuner's three calls."""
        for micro in self.tuner.micro_batches(batch, self.job.count):
            loss = self.job.loss(self.model, micro)
            self.tuner.backward(loss)
        self.plans.append(self.tuner.plan)
        self.updated.append(self.tuner.step())
        return loss


def take_turns(arms: Mapping[str, Arm], batch: Any, number: int) -> None:
    """Train every arm on the same batch, in an order that changes from step to step."""
    names = list(arms)
    names = names[number % len(names) :] + names[: number % len(names)]
    for name in names if (number // len(names)) % 2 == 0 else reversed(names):
        arms[name].take(batch)


def endless(job: Job, seed: int) -> Iterator[Any]:
    """Yield a job's batches endlessly, with a different seed for each pass over them."""
    return itertools.chain.from_iterable(job.batches(seed + number) for number in itertools.count())

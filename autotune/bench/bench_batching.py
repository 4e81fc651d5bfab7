"""Measure adaptive batching where the gradient's noise grows: time to target of a live run against every constant k.

Small batches learn most per sample while the loss falls steeply, large ones later: no constant k is right throughout.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autotune.bench.attached_arms import Arm, LiveArm, endless
from autotune.catalog import load_job
from autotune.cost_model.learning_rate import batch_factor
from autotune.errors import InputError
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.live.limits import Limits
from autotune.live.settings import Settings
from autotune.mechanics import randomness, stepping
from autotune.mechanics.devices import device_name
from autotune.stats import mean_with_interval

# A budget that binds nobody: what is compared is the size of the step.
_AMPLE = 2**45
# Evaluations that a metric is averaged over, so that no lucky one ends a run.
_SMOOTHED = 3


class ConstantArm(Arm):
    """Train with steps of always the same number of batches.

    Args:
        job: the job.
        seed: of its weights.
        k: batches of a step; the learning rate follows the job's rule.
    """

    def __init__(self, job: Job, seed: int, k: int) -> None:
        super().__init__(job, seed)
        self._left = self._batches = k
        factor = batch_factor(job.lr_rule, k, 1)
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def step(self, batch: Any) -> Any:
        """Accumulate a batch's gradient, and update with the step's last one."""
        loss = self.job.loss(self.model, batch)
        (loss / self._batches).backward()
        self._left -= 1
        if self._left == 0:
            self._left = self._batches
            self.update()
        return loss


@dataclass(slots=True)
class _Way:
    """Follow an arm to its target.

    Attributes:
        arm: the arm.
        batches: its batches, the same for every arm.
        metrics: evaluations so far.
        seconds: seconds of training to the target; ``None`` while it is not reached.
        samples: samples so far.
    """

    arm: Arm
    batches: Iterator[Any]
    metrics: list[float] = field(default_factory=list)
    seconds: float | None = None
    samples: int = 0

    def go_on(self, job: Job) -> None:
        """Train until the next evaluation, and evaluate."""
        for _ in range(job.evaluate_every):
            batch = next(self.batches)
            self.arm.take(batch)
            self.samples += stepping.num_samples(batch)
        with randomness.isolated():
            self.arm.model.eval()
            self.metrics.append(float(job.evaluate(self.arm.model)))
            self.arm.model.train()
        if job.arrived(statistics.fmean(self.metrics[-_SMOOTHED:])) and self.seconds is None:
            self.seconds = sum(self.arm.seconds)


def bench_growing_noise(
    reference: str | Job, *, seeds: int, policy: str = "ppo", reporter: Reporter | None = None
) -> dict[str, Any]:
    """Return the time to target of a live run with adaptive batching over that of every constant k, paired.

    All arms take turns from evaluation to evaluation, on the same batches. What is not reached counts as the whole
    run's time. Evaluations are not counted.

    Args:
        reference: a job with adaptive batching.
        seeds: paired runs.
        policy: what is attached.
        reporter: shows progress.

    Raises:
        InputError: if the job's batching is not adaptive.
    """
    shows = reporter or Silent()
    job = load_job(reference)
    if job.batching != "adaptive":
        raise InputError(f"batching of {job.name} is {job.batching!r}", where="bench batching", allowed="adaptive")
    job = replace(job, schedule=None)
    rounds = math.ceil(job.max_steps / job.evaluate_every)
    shows.stage(f"growing noise: constant k and live in turn on {job.name}", seeds * rounds)
    runs = [_race(job, seed, policy, shows, rounds) for seed in range(seeds)]
    names = list(runs[0]["seconds"])
    means = {name: statistics.fmean(run["seconds"][name] for run in runs) for name in names}
    constant = [name for name in names if name != "live"]
    best = min(constant, key=lambda name: means[name])
    return {
        "version": 1,
        "benchmark": "batching",
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "job": job.name,
        "policy": policy,
        "target": job.target,
        "constant_over_best": {
            name: mean_with_interval([run["seconds"][name] / run["seconds"][best] for run in runs]) for name in constant
        },
        "best_constant": best,
        "live_over_best": mean_with_interval([run["seconds"]["live"] / run["seconds"][best] for run in runs]),
        "runs": runs,
    }


def _race(job: Job, seed: int, policy: str, shows: Reporter, rounds: int) -> dict[str, Any]:
    attaching = {
        "policy": policy,
        "mode": "tolerant",
        "settings": Settings(batching="adaptive", lr_rule=job.lr_rule, accumulation_choices=job.accumulation_choices),
        "memory_budget_bytes": _AMPLE,
        "total_steps": job.max_steps,
        # Steps of a few milliseconds: what the tuner costs is part of the time, and no reason to leave.
        "limits": Limits(overhead_frac=0.2),
    }
    live = LiveArm(job, seed, attaching)
    arms: dict[str, Arm] = {f"k={k}": ConstantArm(job, seed, k) for k in job.accumulation_choices}
    ways = {name: _Way(arm, endless(job, seed)) for name, arm in {**arms, "live": live}.items()}
    for number in range(rounds):
        names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for name in names:
            if ways[name].seconds is None:
                ways[name].go_on(job)
        shows.advance(seed * rounds + number + 1)
    status = live.tuner.status
    live.tuner.detach()
    return {
        "seed": seed,
        "seconds": {name: way.seconds or sum(way.arm.seconds) for name, way in ways.items()},
        "reached": {name: way.seconds is not None for name, way in ways.items()},
        "samples": {name: way.samples for name, way in ways.items()},
        "metric": {name: way.metrics[-1] for name, way in ways.items()},
        # One k for every run of steps with it.
        "ks": [list(pair) for pair in _runs_of([plan.accumulation_steps for plan in live.plans])],
        "attached": status["attached"],
        "noise_scale": status.get("noise_scale"),
        "overhead_frac": status.get("overhead_frac"),
        "trips": status.get("trips"),
    }


def _runs_of(values: list[int]) -> list[tuple[int, int]]:
    """Return (value, how often in a row)."""
    found: list[tuple[int, int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1] = value, found[-1][1] + 1
        else:
            found.append((value, 1))
    return found

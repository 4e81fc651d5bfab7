"""Adaptive batching under growing gradient noise: time to target of a live run against every constant k.

Small batches are best while the loss falls steeply, and large ones later, so no constant k is best throughout.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.bench.attached_arms import Arm, LiveArm, endless
from autotune.bench.harness import SILENT, document_of, interval_text
from autotune.catalog import load_job
from autotune.cost_model.learning_rate import batch_factor
from autotune.errors import InputError
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.live.limits import Limits
from autotune.live.settings import Settings
from autotune.mechanics import cutting, randomness
from autotune.stats import mean_with_interval

# A budget that never binds, since only step sizes are compared.
_AMPLE = 2**45
# Number of evaluations whose mean decides whether the target is reached: one lucky evaluation must not end a run.
_SMOOTHED = 3


class ConstantArm(Arm):
    """An arm whose steps all consume the same number of batches.

    Args:
        job: the job.
        seed: random seed for the weights.
        k: batches per step; the learning rate follows the job's rule.
    """

    def __init__(self, job: Job, seed: int, k: int) -> None:
        super().__init__(job, seed)
        self._left = self._batches = k
        factor = batch_factor(job.lr_rule, k, 1)
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def step(self, batch: Any) -> Any:
        """Accumulate the gradient of a batch, and update after the last batch of a step."""
        loss = self.job.loss(self.model, batch)
        (loss / self._batches).backward()
        self._left -= 1
        if self._left == 0:
            self._left = self._batches
            self.update()
        return loss


@dataclass(slots=True)
class _Racer:
    """An arm and its progress towards the target.

    Attributes:
        arm: the arm.
        batches: its batches, the same for every arm.
        metrics: metric of each evaluation so far.
        seconds: seconds of training to the target; ``None`` until it is reached.
        samples: number of samples so far.
    """

    arm: Arm
    batches: Iterator[Any]
    metrics: list[float] = field(default_factory=list)
    seconds: float | None = None
    samples: int = 0

    def train(self, job: Job) -> None:
        """Train until the next evaluation, and evaluate."""
        for _ in range(job.evaluate_every):
            batch = next(self.batches)
            self.arm.take(batch)
            self.samples += cutting.num_samples(batch)
        with randomness.isolated():
            self.arm.model.eval()
            self.metrics.append(float(job.evaluate(self.arm.model)))
            self.arm.model.train()
        if job.arrived(statistics.fmean(self.metrics[-_SMOOTHED:])) and self.seconds is None:
            self.seconds = sum(self.arm.seconds)


def bench_growing_noise(
    reference: str | Job, *, seeds: int, policy: str = "ppo", reporter: Reporter = SILENT
) -> dict[str, Any]:
    """Return paired times to target of a live run and of every constant k, relative to the best constant k.

    All arms take turns after each evaluation, on the same batches. An arm that does not reach the target counts with
    the time of its whole run. Evaluations are not timed.

    Args:
        reference: a job with adaptive batching.
        seeds: number of paired runs.
        policy: the policy that is attached.
        reporter: shows progress.

    Raises:
        InputError: if the job's batching is not adaptive.
    """
    job = load_job(reference)
    if job.batching != "adaptive":
        raise InputError(f"batching of {job.name} is {job.batching!r}", where="bench batching", allowed="adaptive")
    target = job.required_target(where="bench batching")
    job = replace(job, schedule=None)
    rounds = math.ceil(job.max_steps / job.evaluate_every)
    reporter.stage(f"growing noise: constant k and live in turn on {job.name}", seeds * rounds)
    runs = [_race(job, seed, policy, reporter, rounds) for seed in range(seeds)]
    constant = [name for name in runs[0]["seconds"] if name != "live"]
    best = min(constant, key=lambda name: statistics.fmean(run["seconds"][name] for run in runs))

    def over_best(name: str) -> dict[str, Any]:
        return mean_with_interval([run["seconds"][name] / run["seconds"][best] for run in runs])

    figures = {
        "job": job.name,
        "policy": policy,
        "target": target,
        "constant_over_best": {name: over_best(name) for name in constant},
        "best_constant": best,
        "live_over_best": over_best("live"),
        "runs": runs,
    }
    return document_of("batching", figures)


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the results in words."""
    of_best = f"of the time of {document['best_constant']}"
    constant = [f"{name}: {interval_text(one)} {of_best}" for name, one in document["constant_over_best"].items()]
    return [*constant, f"live: {interval_text(document['live_over_best'])} {of_best}, the best of these"]


def _race(job: Job, seed: int, policy: str, reporter: Reporter, rounds: int) -> dict[str, Any]:
    attaching = {
        "policy": policy,
        "mode": "tolerant",
        "settings": Settings(batching="adaptive", lr_rule=job.lr_rule, accumulation_choices=job.accumulation_choices),
        "memory_budget_bytes": _AMPLE,
        "total_steps": job.max_steps,
        # Steps take a few milliseconds: the tuner's overhead counts as time, and must not make it detach.
        "limits": Limits(overhead_frac=0.2),
    }
    live = LiveArm(job, seed, attaching)
    arms: dict[str, Arm] = {f"k={k}": ConstantArm(job, seed, k) for k in job.accumulation_choices}
    racers = {name: _Racer(arm, endless(job, seed)) for name, arm in {**arms, "live": live}.items()}
    for number in range(rounds):
        names = list(racers)[number % len(racers) :] + list(racers)[: number % len(racers)]
        for name in names:
            if racers[name].seconds is None:
                racers[name].train(job)
        reporter.advance(seed * rounds + number + 1)
    status = live.tuner.status
    live.tuner.detach()
    return {
        "seed": seed,
        "seconds": {name: racer.seconds or sum(racer.arm.seconds) for name, racer in racers.items()},
        "reached": {name: racer.seconds is not None for name, racer in racers.items()},
        "samples": {name: racer.samples for name, racer in racers.items()},
        "metric": {name: racer.metrics[-1] for name, racer in racers.items()},
        # Each k with its number of consecutive batches.
        "ks": [[k, len(list(steps))] for k, steps in itertools.groupby(plan.accumulation_steps for plan in live.plans)],
        "attached": status["attached"],
        "noise_scale": status.get("noise_scale"),
        "overhead_frac": status.get("overhead_frac"),
        "trips": status.get("trips"),
    }

"""Batch and learning rate at equal cost: every constant, a plain ramp, the noise scale, and branches of the run.

Costs are counted in samples with a given fixed cost per update, as several ranks or a large optimizer have it, so that
figures do not depend on how busy the machine is. Evaluations cost nothing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from autotune.bench.harness import SILENT, document_of, interval_text
from autotune.campaign.batch_ramp import Branching, CostedRun, Costs, Ramp, Setting, find_ramp, first_setting, follow
from autotune.catalog import load_job
from autotune.cost_model.goodput import goodput
from autotune.cost_model.learning_rate import batch_factor
from autotune.errors import InputError
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.records.protocol import paired_seeds
from autotune.stats import mean_with_interval

# Factors on the job's learning rate with which constants and plain ramps are tuned; the number of constant batches.
RATES = (1.0, 2.0, 4.0, 8.0)
BATCHES = 5
# Settings of each kind that go on with the other seeds, after all were trained on the first.
FINALISTS = 3
# Shares of the whole cost at which a plain ramp doubles its batch.
RAMP_AT = (0.25, 0.5)
# What the names of arms begin with: constants, plain ramps, and the noise rule.
CONSTANT, PLAIN, NOISE = KINDS = ("k=", "ramp", "noise scale")
# Runs that find their learning rate themselves: with a batch that grows at fixed points, or where branches say so.
BRANCHED = {"rate by branches": Branching(), "rate and batch by branches": Branching(larger_at=None)}
# Number of readings of the metric that are averaged.
_SMOOTHED = 3

Curve = Sequence[tuple[float, float]]


def bench_ramp(
    reference: str | Job,
    *,
    fixed_samples: float,
    total_samples: float | None = None,
    seeds: int,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Return the cost at which arms reach the same loss, over that of the best constant.

    Constants, plain ramps and the noise rule are tuned for free: all their settings are trained on the first seed, the
    best three of each kind on all seeds, and the best of these by its mean is the one that counts. What their tuning
    would have cost is no part of their figures; what branches cost is.

    Args:
        reference: a job with adaptive batching.
        fixed_samples: fixed cost of an update, in samples of equal cost.
        total_samples: cost of each run; ``None`` for that of the job's ``max_steps`` updates of one batch.
        seeds: number of paired runs.
        reporter: shows progress.

    Raises:
        InputError: if the job's batching is not adaptive, a cost is no number of samples, or there is but one seed.
    """
    job = load_job(reference)
    if job.batching != "adaptive":
        raise InputError(f"batching of {job.name} is {job.batching!r}", where="bench batching", allowed="adaptive")
    total = job.max_steps * (fixed_samples + job.batch_size) if total_samples is None else total_samples
    costs = Costs(fixed_samples=fixed_samples, total_samples=total)
    arms, paired = arms_of(job, costs), paired_seeds(seeds)
    reporter.stage(f"ramps of {job.name}: settings of constants, ramps and the noise rule", len(arms))
    curves: dict[str, list[Curve]] = {}
    for number, (name, choose) in enumerate(arms.items()):
        curves[name] = [_trained(job, costs, paired[0], choose)]
        reporter.advance(number + 1)
    finalists = [name for kind in KINDS for name in _ranked(curves, kind)[:FINALISTS]]
    reporter.stage(
        f"ramps of {job.name}: the best of them and branches, in turn", seeds * (len(finalists) + len(BRANCHED))
    )
    ramps: dict[str, list[Ramp]] = {name: [] for name in BRANCHED}
    for number, seed in enumerate(paired):
        for name in finalists if number else ():
            curves[name].append(_trained(job, costs, seed, arms[name]))
        for name, branching in BRANCHED.items():
            ramps[name].append(find_ramp(job, costs, seed=seed, branching=branching))
        reporter.advance((number + 1) * (len(finalists) + len(BRANCHED)))
    curves |= {name: [ramp.curve for ramp in own] for name, own in ramps.items()}
    best = {kind: _ranked({name: curves[name] for name in finalists}, kind)[0] for kind in KINDS}
    figures = {
        "job": job.name,
        "fixed_samples": fixed_samples,
        "total_samples": total,
        "seeds": list(paired),
        "best": best,
        "tuning_runs": {kind: sum(name.startswith(kind) for name in arms) for kind in KINDS}
        | dict.fromkeys(BRANCHED, 0),
        "arms": {name: _figures(own, curves[best[CONSTANT]], job) for name, own in curves.items()},
        "ramps": {name: [asdict(ramp) for ramp in own] for name, own in ramps.items()},
    }
    return document_of("ramp", figures)


def arms_of(job: Job, costs: Costs) -> dict[str, Callable[[CostedRun], Setting]]:
    """Return what chooses the setting of each arm beside the branches, by name.

    Constants have the five choices of k from a quarter of the fixed cost on. Plain ramps begin there, or at the batch
    at which branches begin.
    """
    choices, first = job.accumulation_choices, first_setting(job, costs).accumulation_steps
    begins = choices.index(max(k for k in choices if k == 1 or 4 * k <= first))
    arms: dict[str, Callable[[CostedRun], Setting]] = {}
    for k, rate in itertools.product(choices[begins : begins + BATCHES], RATES):
        arms[f"k={k}, rate {rate:g}"] = _Constant(Setting(accumulation_steps=k, rate=rate))
    for k, rate in itertools.product(dict.fromkeys((choices[begins], first)), RATES):
        arms[f"ramp from k={k}, rate {rate:g}"] = _PlainRamp(choices[choices.index(k) :], rate)
    for rate in RATES:
        arms[f"noise scale, rate {rate:g}"] = _NoiseRule(first, rate)
    return arms


class _Constant:
    """The same setting throughout.

    Args:
        setting: the setting.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def __call__(self, run: CostedRun) -> Setting:
        """Return the setting."""
        return self._setting


class _PlainRamp:
    """The next larger batch at fixed points, at a constant learning rate.

    Args:
        choices: batches per update, ascending.
        rate: factor on the job's learning rate.
    """

    def __init__(self, choices: Sequence[int], rate: float) -> None:
        self._choices, self._rate = choices, rate

    def __call__(self, run: CostedRun) -> Setting:
        """Return the setting at what the run has cost so far."""
        passed = sum(run.spent >= share * run.costs.total_samples for share in RAMP_AT)
        return Setting(accumulation_steps=self._choices[min(passed, len(self._choices) - 1)], rate=self._rate)


class _NoiseRule:
    """The batch with the most progress per cost at the measured noise scale; the learning rate follows the job's rule.

    Args:
        first: batches per update at first; one batch alone shows no noise.
        rate: factor on the job's learning rate at that many.
    """

    def __init__(self, first: int, rate: float) -> None:
        self._first, self._rate = first, rate

    def __call__(self, run: CostedRun) -> Setting:
        """Return the best setting, at most one choice away from the running one."""
        choices = [k for k in run.job.accumulation_choices if k > 1] or [1]
        current = run.settings[-1][1].accumulation_steps if run.settings else max(self._first, choices[0])
        at, noise = choices.index(current), run.noise_scale
        near = choices[max(at - 1, 0) : at + 2] if noise is not None else [current]
        k = max(near, key=lambda k: _progress(k * run.job.batch_size, noise or 0.0, run))
        return Setting(accumulation_steps=k, rate=self._rate * batch_factor("sqrt", k, self._first))


def _progress(samples: float, noise_scale: float, run: CostedRun) -> float:
    """Return the progress of an update per cost."""
    return goodput(samples / run.costs.of_update(samples), samples, noise_scale, run.job.batch_size)


def _trained(job: Job, costs: Costs, seed: int, choose: Callable[[CostedRun], Setting]) -> Curve:
    run = CostedRun(job, costs, seed=seed, statistics=isinstance(choose, _NoiseRule))
    follow(run, choose)
    run.close()
    return tuple(run.curve)


def _ranked(curves: Mapping[str, Sequence[Curve]], kind: str) -> list[str]:
    """Return the names of the arms of a kind, those whose runs end best on average first."""
    names = [name for name in curves if name.startswith(kind)]
    return sorted(names, key=lambda name: statistics.fmean(end_of(curve) for curve in curves[name]))


def end_of(curve: Curve) -> float:
    """Return the metric at the end of a run, averaged over its last readings."""
    return statistics.fmean(metric for _, metric in curve[-_SMOOTHED:])


def cost_ratio(own: Curve, other: Curve) -> float | None:
    """Return the cost at which one run reaches the worse of two ends, over that at which the other does.

    Args:
        own: the run.
        other: the run to compare with.

    Returns:
        The ratio; ``None`` if a run failed.
    """
    level = max(end_of(own), end_of(other))
    return reached(own, level) / reached(other, level) if math.isfinite(level) else None


def reached(curve: Curve, level: float) -> float:
    """Return the cost at which the averaged metric of a run first is at a level or better; its whole cost if never."""
    former: tuple[float, float] | None = None
    for number in range(_SMOOTHED, len(curve) + 1):
        cost, metric = curve[number - 1][0], end_of(curve[:number])
        if metric <= level:
            if former is None or not math.isfinite(former[1]) or former[1] == metric:
                return cost
            return former[0] + (cost - former[0]) * (former[1] - level) / (former[1] - metric)
        former = cost, metric
    return curve[-1][0]


def _figures(curves: Sequence[Curve], best: Sequence[Curve], job: Job) -> dict[str, Any]:
    ratios = [cost_ratio(own, other) for own, other in zip(curves, best, strict=False)]
    ends = [end_of(curve) for curve in curves]
    sign = 1 if job.goal == "min" else -1
    whole = [ratio for ratio in ratios if ratio is not None]
    failed = len(whole) < len(ratios)
    return {
        "metric": [sign * end if math.isfinite(end) else None for end in ends],
        "cost_over_best": None if failed else mean_with_interval(whole),
    }


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the results in words."""
    best, arms = document["best"], document["arms"]
    rows = {"plain ramp, tuned": best[PLAIN], "noise scale, tuned": best[NOISE], **{name: name for name in BRANCHED}}
    told = [f"best constant of {document['tuning_runs'][CONSTANT]}: {best[CONSTANT]}"]
    for shown, name in rows.items():
        ratio = arms[name]["cost_over_best"]
        told.append(f"{shown}: {'failed' if ratio is None else interval_text(ratio) + ' of its cost to the same loss'}")
    return told

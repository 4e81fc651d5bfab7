"""Exactness and speed of the solvers: against brute force on small jobs, and timed on large ones."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.bench.harness import SILENT, document_of
from autotune.choices import DEFAULT_STORAGES, STORAGES
from autotune.cost_model.cost_arrays import CostArrays, Plans
from autotune.cost_model.price_solver import PriceSolver
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import SAFETY_MARGIN, smallest, solve
from autotune.io.progress import Reporter
from autotune.plan import Precision
from autotune.simulator.random_jobs import Shape, draw_profile

_PRECISIONS = (Precision.FP32, Precision.BF16, Precision.FP16)
_LARGE = 1000
# Budgets, as shares of the way from the smallest peak to that of the fastest plan.
_TIGHTNESS = (0.1, 0.4, 0.8)


def bench_solver(*, instances: int, seed: int, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Return how far the solvers are from brute force, and how long the exact one takes for 1,000 units.

    Args:
        instances: number of small jobs, with one to three recomputable units, three precisions and two or three k.
        seed: random seed for the draws.
        reporter: shows progress.
    """
    reporter.stage(f"{instances} small jobs by brute force, then 1,000 units", instances)
    generator = np.random.default_rng(seed)
    gaps, price_gaps = [], []
    for number in range(instances):
        profile = draw_profile(
            generator,
            Shape(
                # An embedding and a head, which always save, make two more units.
                units=int(generator.integers(1, 4)),
                precisions=_PRECISIONS,
                accumulation_choices=(1, 2, 4) if generator.random() < 0.7 else (1, 2),
                identical=bool(generator.random() < 0.3),
                storages=STORAGES if generator.random() < 0.5 else DEFAULT_STORAGES,
            ),
        )
        exact, price = _against_brute_force(profile, float(generator.choice(_TIGHTNESS)))
        gaps.append(exact)
        price_gaps.append(price)
        reporter.advance(number + 1)
    large = {name: _large(generator, identical=name == "identical") for name in ("distinct", "identical")}
    figures = {
        "instances": instances,
        "gap_to_brute_force_max": max(gaps),
        "price_solver_gap_median": float(np.median(price_gaps)),
        "price_solver_gap_p95": float(np.quantile(price_gaps, 0.95)),
        "seconds_1000_units": max(entry["seconds_per_k_max"] for entry in large.values()),
        "options_per_unit": len(STORAGES) * len(_PRECISIONS),
        "large": large,
    }
    return document_of("solver", figures)


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the results in words."""
    return [
        f"exact solver: {document['gap_to_brute_force_max']:.2e} from brute force at worst; 1,000 units with "
        f"{document['options_per_unit']} choices each in {document['seconds_1000_units']:.2f} s per k. "
        f"Price solver: {document['price_solver_gap_median']:.2%} (median), "
        f"{document['price_solver_gap_p95']:.2%} (p95)"
    ]


def _against_brute_force(profile: Profile, tightness: float) -> tuple[float, float]:
    """Return the shares by which the plans of both solvers are slower than the fastest plan that fits."""
    arrays = CostArrays([profile])
    peaks, seconds = _every_plan(arrays)
    least, free = smallest(profile).peak_bytes, solve(profile).peak_bytes
    budget = (least + tightness * max(free - least, 0)) / (1 - SAFETY_MARGIN) + 1
    usable = budget * (1 - SAFETY_MARGIN)
    best = seconds[peaks <= usable].min()
    exact = solve(profile, int(budget)).seconds_per_step / best - 1
    plans, _ = PriceSolver(arrays).solve(np.array([0]), np.array([usable]))
    return float(max(exact, 0.0)), float(arrays.seconds_per_step(plans)[0] / best - 1)


def _every_plan(arrays: CostArrays) -> tuple[np.ndarray, np.ndarray]:
    """Return the predicted peak and seconds of every plan of the only job."""
    profile, each = arrays.profiles[0], len(arrays.numbering.storages)
    options = [
        [each * p + s for p in range(len(profile.precisions)) for s in (range(each) if unit.recomputable else (0,))]
        for unit in profile.units
    ]
    choices = np.array(list(itertools.product(*options)), dtype=np.int64)
    peaks, seconds = [], []
    for k in range(len(profile.tables)):
        for part in np.array_split(choices, -(-len(choices) // 20_000)):
            plans = Plans(np.zeros(len(part), dtype=np.int64), np.full(len(part), k), part)
            peaks.append(arrays.peak_bytes(plans))
            seconds.append(arrays.seconds_per_step(plans))
    return np.concatenate(peaks), np.concatenate(seconds)


def _large(generator: np.random.Generator, *, identical: bool) -> dict[str, Any]:
    """Time the exact solver on a job of 1,000 units with one k, at three budgets."""
    shape = Shape(
        units=_LARGE - 2, precisions=_PRECISIONS, accumulation_choices=(4,), identical=identical, storages=STORAGES
    )
    profile = draw_profile(generator, shape)
    least, free = smallest(profile).peak_bytes, solve(profile).peak_bytes
    times, gaps = [], []
    for tightness in _TIGHTNESS:
        budget = int((least + tightness * (free - least)) / (1 - SAFETY_MARGIN)) + 1
        began = time.perf_counter()
        gaps.append(solve(profile, budget).gap)
        times.append(time.perf_counter() - began)
    return {"seconds_per_k": times, "seconds_per_k_max": max(times), "gap_max": max(gaps)}

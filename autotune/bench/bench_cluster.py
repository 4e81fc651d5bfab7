"""Measure how much faster several workers try plans than one: the same windows on one and on all, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from autotune.engines.cluster_pool import workers_on
from autotune.engines.pool_engine import PoolEngine
from autotune.engines.ray_cluster import Cluster, ClusterOptions
from autotune.engines.torch_engine import EngineOptions
from autotune.engines.tuning_windows import WINDOW_STEPS
from autotune.errors import InputError
from autotune.mechanics.devices import device_name
from autotune.plan import Plan
from autotune.stats import median_interval


def bench_cluster(
    job: str,
    options: ClusterOptions,
    *,
    pairs: int = 6,
    windows: int = 24,
    seed: int = 0,
    on_pair: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Return how many trials a minute one worker and all of them manage, and how much of what was added arrives.

    A pair is the same windows, as a random search would ask for them, run by one worker and by all; pairs alternate in
    their order. Whole trials are timed, with what is sent to and fro; what it takes to start workers is not.

    Args:
        job: the job's reference; its steps are real.
        options: where workers run; at least two.
        pairs: how many pairs.
        windows: in each half of a pair.
        seed: of the job and of the plans.
        on_pair: is told how many pairs are done.

    Raises:
        InputError: if the cluster has a single worker, or a window fails.
    """
    with Cluster(options) as cluster:
        if len(cluster.places) < 2:
            raise InputError("has one worker", where=f"cluster {options.address}", allowed="at least 2")
        workers = workers_on(cluster, job, seed=seed, measuring=EngineOptions(discard_steps=1))
        engines = {"one": PoolEngine(workers[:1]), "all": PoolEngine(workers)}
        generator = np.random.default_rng(seed)
        for engine in engines.values():
            _seconds(engine, _plans(engine, generator, 2 * len(workers)))
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(pairs):
            asked = _plans(engines["one"], generator, windows)
            for name in ("one", "all") if number % 2 == 0 else ("all", "one"):
                seconds[name].append(_seconds(engines[name], asked))
            if on_pair is not None:
                on_pair(number + 1)
    speedups = [one / every for one, every in zip(seconds["one"], seconds["all"], strict=True)]
    efficiencies = [speedup / len(workers) for speedup in speedups]
    low, high = median_interval(efficiencies)
    return {
        "version": 1,
        "benchmark": "cluster",
        "job": job,
        "device": device_name(),
        "torch": torch.__version__,
        "cluster": options.address,
        "workers": len(workers),
        "cores_per_worker": options.cores,
        "windows": windows,
        "window_steps": WINDOW_STEPS,
        "trials_per_minute": {name: 60 * windows / float(np.median(values)) for name, values in seconds.items()},
        "speedups": speedups,
        "efficiency_median": float(np.median(efficiencies)),
        "efficiency_ci95": [low, high],
    }


def _plans(engine: PoolEngine, generator: np.random.Generator, count: int) -> list[Plan]:
    found: dict[Plan, None] = {}
    while len(found) < count:
        found[engine.space.sample(generator)] = None
    return list(found)


def _seconds(engine: PoolEngine, plans: Sequence[Plan]) -> float:
    """Return the seconds that an engine takes for windows, asked for as far ahead as a search would."""
    began, asked = time.perf_counter(), iter(plans)
    for plan, _ in zip(asked, range(engine.ahead), strict=False):
        engine.prepare(plan, WINDOW_STEPS)
    for plan in plans:
        engine.apply(plan)
        found = engine.run(WINDOW_STEPS)
        if found.failure is not None:
            raise InputError(f"a window fails: {found.failure_detail}", where="job", allowed="a job that runs")
        following = next(asked, None)
        if following is not None:
            engine.prepare(following, WINDOW_STEPS)
    return time.perf_counter() - began

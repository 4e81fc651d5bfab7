"""Speed-up from a cluster: the same windows on one worker and on all workers, in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autotune.bench.harness import SILENT, alternating, document_of
from autotune.engines.cluster_pool import workers_on
from autotune.engines.pool_engine import PoolEngine
from autotune.engines.ray_cluster import Cluster, ClusterOptions
from autotune.engines.torch_engine import EngineOptions
from autotune.engines.tuning_windows import WINDOW_STEPS
from autotune.errors import InputError
from autotune.io.progress import Reporter
from autotune.plan import Plan
from autotune.stats import median_interval


def bench_cluster(
    job: str,
    options: ClusterOptions,
    *,
    pairs: int = 6,
    windows: int = 24,
    seed: int = 0,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Return the trials per minute of one worker and of all workers, and the parallel efficiency.

    Both run the same windows, requested as in a random search. Whole trials are timed, communication included; the
    start of the workers is not.

    Args:
        job: the job's reference; its steps are real.
        options: the cluster, with at least two workers.
        pairs: number of pairs of turns.
        windows: windows in each turn.
        seed: random seed for the job and the plans.
        reporter: shows progress.

    Raises:
        InputError: if the cluster has a single worker, or a window fails.
    """
    reporter.stage(f"{job}: one worker against all", pairs)
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
            for name in alternating(list(engines), number):
                seconds[name].append(_seconds(engines[name], asked))
            reporter.advance(number + 1)
    speedups = [one / every for one, every in zip(seconds["one"], seconds["all"], strict=True)]
    efficiencies = [speedup / len(workers) for speedup in speedups]
    figures = {
        "job": job,
        "cluster": options.address,
        "workers": len(workers),
        "cores_per_worker": options.cores,
        "windows": windows,
        "window_steps": WINDOW_STEPS,
        "trials_per_minute": {name: 60 * windows / float(np.median(values)) for name, values in seconds.items()},
        "speedups": speedups,
        "efficiency_median": float(np.median(efficiencies)),
        "efficiency_ci95": list(median_interval(efficiencies)),
    }
    return document_of("cluster", figures)


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the results in words."""
    rates, (low, high) = document["trials_per_minute"], document["efficiency_ci95"]
    return [
        f"{rates['one']:.0f} trials a minute with one worker, {rates['all']:.0f} with {document['workers']}: "
        f"efficiency {document['efficiency_median']:.2f} (95 % interval {low:.2f} to {high:.2f})"
    ]


def _plans(engine: PoolEngine, generator: np.random.Generator, count: int) -> list[Plan]:
    """Return distinct random plans."""
    found: dict[Plan, None] = {}
    while len(found) < count:
        found[engine.space.sample(generator)] = None
    return list(found)


def _seconds(engine: PoolEngine, plans: Sequence[Plan]) -> float:
    """Return an engine's seconds for one window per plan, requested as far ahead as in a search."""
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

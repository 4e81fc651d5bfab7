"""The engine on which tuning measures plans, and the length of its windows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from autotune.engines.cluster_pool import cluster_pool
from autotune.engines.engine import Engine
from autotune.engines.isolated_engine import IsolatedEngine
from autotune.engines.ray_cluster import ClusterOptions
from autotune.engines.registry import RankOptions
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.job import Job
from autotune.measurement import ABSENT, Measurement
from autotune.mechanics.processor_wait import mean_wait
from autotune.step_parts import mean_parts

# An untimed step, usually the metered one, and two timed ones, or one if the other is split or metered instead.
WINDOW_STEPS = 3
_DISCARDED = 1


def make_engine(
    job: Job,
    seed: int,
    *,
    isolate: str | None = None,
    ranks: RankOptions | None = None,
    cluster: ClusterOptions | None = None,
    watts: float | None = None,
) -> Engine:
    """Return the engine on which tuning measures plans.

    Args:
        job: the job.
        seed: random seed for weights, batches and training.
        isolate: the job's reference, to train it in a separate process; ``None`` for this process.
        ranks: options of several such processes that train the job together; ``None`` for one process.
        cluster: the cluster on which several such processes measure plans at once; ``None`` for this machine.
        watts: power from which energy is estimated if it cannot be measured; ``None`` makes no estimate.
    """
    options = EngineOptions(discard_steps=_DISCARDED, split_to_learn_noise=True, watts=watts)
    if isolate is not None and cluster is not None:
        return cluster_pool(cluster, isolate, seed=seed, measuring=options)
    if isolate is not None:
        threads = torch.get_num_threads() if ranks is None else None
        return IsolatedEngine(isolate, seed=seed, options=options, ranks=ranks, threads=threads)
    return TorchEngine(job, seed=seed, options=options)


def merge_windows(windows: Sequence[Measurement]) -> Measurement:
    """Merge several windows of one plan into one with all timed steps; a failed window is returned as it is."""
    failed = [window for window in windows if window.failure is not None]
    if failed:
        return failed[0]
    steps = [seconds for window in windows for seconds in window.step_s]
    energies = [window.energy_j for window in windows if window.energy_j is not None]
    totals = [window.total_energy_j for window in windows if window.total_energy_j is not None]
    return replace(
        windows[-1],
        steps=sum(window.steps for window in windows),
        samples=sum(window.samples for window in windows),
        items=sum(window.items for window in windows),
        total_s=sum(window.total_s for window in windows),
        step_s=tuple(steps),
        seconds_per_step=statistics.median(steps) if steps else None,
        energy_j=sum(energies) if len(energies) == len(windows) else None,
        total_energy_j=sum(totals) if len(totals) == len(windows) else None,
        energy_source=windows[-1].energy_source if len(energies) == len(windows) else ABSENT,
        parts=mean_parts([(len(window.step_s), window.parts) for window in windows]),
        waited_frac=mean_wait([(window.total_s, window.waited_frac) for window in windows]),
    )

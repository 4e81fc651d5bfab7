"""Measure a job's plans on the machines of a cluster.

Each worker trains in a child process that may die: a job's crash is a value of its window, and only the loss of the
worker, its process or its machine, is a lost worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.engines.pool_engine import PoolEngine, Worker
from autotune.engines.ray_cluster import Cluster, ClusterOptions, Place
from autotune.engines.torch_engine import EngineOptions
from autotune.errors import InputError, WorkerLostError
from autotune.mechanics.devices import device_kind

# Seconds in which a worker must have built the job's model.
_OPENING_S = 600.0


def cluster_pool(options: ClusterOptions, job: str, *, seed: int, measuring: EngineOptions) -> PoolEngine:
    """Return an engine whose windows run on a cluster's workers.

    Args:
        options: where.
        job: the job's reference, which every machine of the cluster must be able to load.
        seed: of weights, batches and everything random, on each worker.
        measuring: how to measure.

    Raises:
        InputError: if the cluster does not answer, or the job cannot be used.
    """
    cluster = Cluster(options)
    try:
        return PoolEngine(workers_on(cluster, job, seed=seed, measuring=measuring), on_close=cluster.close)
    except BaseException:
        cluster.close()
        raise


def workers_on(cluster: Cluster, job: str, *, seed: int, measuring: EngineOptions) -> list[Worker]:
    """Return a worker at each of a cluster's places; arguments as for :func:`cluster_pool`."""
    opening = {"job": job, "seed": seed, "options": asdict(measuring), "path": sys.path, "folder": str(Path.cwd())}
    return [_ClusterWorker(cluster, place, opening) for place in cluster.places]


class Trainer:
    """Train a job where the cluster says.

    Args:
        opening: the job's reference, seed and options, and where the caller runs.
        gpu: whether a GPU was given to it.
    """

    def __init__(self, opening: Mapping[str, Any], gpu: bool) -> None:
        self._opening, self._gpu = opening, gpu
        self._engine: Any = None

    def describe(self) -> dict[str, Any]:
        """Build the model, and return what plans it allows, or what is wrong with it."""
        if self._engine is None:
            try:
                self._engine = self._open()
            except InputError as error:
                return {"input_error": error.to_json()}
        return {"space": self._engine.space.to_json(), "locks": {**self._engine.locks}}

    def run(self, plan: dict[str, Any], steps: int, memory_budget_bytes: int | None) -> dict[str, Any]:
        """Return a window's measurement, or what is wrong with the job here."""
        from autotune.plan import Plan

        found = self.describe()
        if "input_error" in found:
            return found
        self._engine.memory_budget_bytes = memory_budget_bytes
        self._engine.apply(Plan.from_json(plan))
        measured: dict[str, Any] = self._engine.run(steps).to_json()
        return measured

    def _open(self) -> Any:
        from autotune.engines.isolated_engine import IsolatedEngine

        if Path(self._opening["folder"]).is_dir():
            os.chdir(self._opening["folder"])
        sys.path.extend(entry for entry in self._opening["path"] if entry and entry not in sys.path)
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        engine = IsolatedEngine(
            self._opening["job"],
            seed=self._opening["seed"],
            device=device_kind() if self._gpu else "cpu",
            options=EngineOptions(**self._opening["options"]),
            threads=threads,
        )
        # The cost of a process's first step is not the plan's.
        engine.run(1)
        return engine


class _ClusterWorker:
    """A trainer on another machine."""

    def __init__(self, cluster: Cluster, place: Place, opening: Mapping[str, Any]) -> None:
        self._trainer = cluster.start(Trainer, place, opening, bool(place.gpus))
        # All build their models at once.
        self._described = self._trainer.begin("describe")

    def describe(self) -> dict[str, Any]:
        """Return what plans the job allows."""
        found: dict[str, Any] = self._described(_OPENING_S)
        if "input_error" in found:
            raise InputError.from_json(found["input_error"])
        return found

    def run(self, plan: dict[str, Any], steps: int, memory_budget_bytes: int | None) -> dict[str, Any]:
        """Return a window's measurement."""
        found: dict[str, Any] = self._trainer.begin("run", plan, steps, memory_budget_bytes)(None)
        if "input_error" in found:
            # The first worker could: this machine lacks something.
            raise WorkerLostError(f"the job cannot be used there: {found['input_error']['problem']}")
        return found

    def close(self) -> None:
        """End the trainer, and the process that it trains in with it."""
        self._trainer.kill()

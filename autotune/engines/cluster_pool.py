"""Measure a job's plans on the machines of a cluster.

Each worker trains in a child process, so that a job's crash is a failure of its window. A worker is lost only if its
own process or machine is gone, does not answer, or cannot use the job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.engines.engine_calls import described, measured
from autotune.engines.pool_engine import PoolEngine, Worker
from autotune.engines.ray_cluster import Cluster, ClusterOptions, Place
from autotune.engines.torch_engine import EngineOptions
from autotune.errors import InputError, WorkerLostError
from autotune.mechanics.devices import device_kind

# Seconds for a worker to build the job's model.
_OPENING_S = 600.0


def cluster_pool(options: ClusterOptions, job: str, *, seed: int, measuring: EngineOptions) -> PoolEngine:
    """Return an engine whose windows run on the workers of a cluster.

    Args:
        options: the cluster and its workers.
        job: the job's reference, which every machine of the cluster must be able to load.
        seed: random seed for weights, batches and training on each worker.
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
    """Return one worker for each place of a cluster; arguments as for :func:`cluster_pool`."""
    opening = {"job": job, "seed": seed, "options": asdict(measuring), "path": sys.path, "folder": str(Path.cwd())}
    return [_ClusterWorker(cluster, place, opening) for place in cluster.places]


class Trainer:
    """A job's training on one machine of the cluster.

    Args:
        opening: the job's reference, seed and options, and the caller's folder and module search path.
        gpu: whether the worker has a GPU.
    """

    def __init__(self, opening: Mapping[str, Any], gpu: bool) -> None:
        self._opening, self._gpu = opening, gpu
        self._engine: Any = None

    def describe(self) -> dict[str, Any]:
        """Build the model, and return the plans that the job allows, or the error in the job."""
        if self._engine is None:
            try:
                self._engine = self._open()
            except InputError as error:
                return {"input_error": error.to_json()}
        return described(self._engine)

    def run(self, plan: dict[str, Any], steps: int, memory_budget_bytes: int | None) -> dict[str, Any]:
        """Run a window, and return its measurement, or the error in the job on this machine."""
        found = self.describe()
        if "input_error" in found:
            return found
        return measured(self._engine, plan, steps, memory_budget_bytes)

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
        # The first step of a process includes start-up costs that do not depend on the plan.
        engine.run(1)
        return engine


class _ClusterWorker:
    """A worker of the pool whose trainer runs on another machine."""

    def __init__(self, cluster: Cluster, place: Place, opening: Mapping[str, Any]) -> None:
        self._trainer = cluster.start(Trainer, place, opening, bool(place.gpus))
        # All workers build their models at the same time.
        self._described = self._trainer.begin("describe")

    def describe(self) -> dict[str, Any]:
        """Return the plans that the job allows."""
        found: dict[str, Any] = self._described(_OPENING_S)
        if "input_error" in found:
            raise InputError.from_json(found["input_error"])
        return found

    def run(self, plan: dict[str, Any], steps: int, memory_budget_bytes: int | None) -> dict[str, Any]:
        """Run a window, and return its measurement."""
        found: dict[str, Any] = self._trainer.begin("run", plan, steps, memory_budget_bytes)(None)
        if "input_error" in found:
            # The first worker could use the job, so this machine lacks something.
            raise WorkerLostError(f"the job cannot be used there: {found['input_error']['problem']}")
        return found

    def close(self) -> None:
        """End the trainer and its child process."""
        self._trainer.kill()

"""Make a pool of workers on a Ray cluster: the only file that knows Ray.

Each worker is an actor that is pinned to cores of its own, or to a GPU, and trains in a child process that may die: a
job's crash is a value of its window, and only the loss of the actor, its process or its machine, is a lost worker.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.engines.pool_engine import PoolEngine, Worker, WorkerLostError
from autotune.engines.torch_engine import EngineOptions
from autotune.errors import InputError

_ALLOWED = "auto, local:N, ray://HOST:PORT or HOST:PORT"
_INSTALL = "pip install 'autotune-rl[ray]'"
# Seconds that a cluster may take to answer.
_CONNECT_S = 20.0
# Seconds in which a worker must have built the job's model.
_OPENING_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Say where workers run.

    Attributes:
        address: ``auto`` for the cluster that this machine belongs to, ``local:N`` for N workers on this machine, or a
            cluster's ``ray://HOST:PORT`` or ``HOST:PORT``.
        cores: cores that each worker is pinned to; on a machine with GPUs there is one worker per GPU instead, and its
            cores are shared out.
    """

    address: str
    cores: int = 1

    def __post_init__(self) -> None:
        kind, _, rest = self.address.partition(":")
        fine = self.address == "auto" or (kind == "local" and rest.isdigit() and int(rest) >= 1)
        host = self.address.removeprefix("ray://").rpartition(":")
        if not fine and (kind == "local" or not host[0] or not host[2].isdigit()):
            raise InputError(f"cluster is {self.address!r}", where="--cluster", allowed=_ALLOWED)
        if self.cores < 1:
            raise InputError(f"cores is {self.cores}", where="--worker-cores", allowed="at least 1")

    @property
    def local(self) -> int | None:
        """Return how many workers are asked for on this machine; ``None`` for a cluster that is there already."""
        return int(self.address.partition(":")[2]) if self.address.startswith("local:") else None


@dataclass(frozen=True, slots=True)
class _Place:
    """Say where one worker runs: on which node, on which of its machine's cores (by rank), with how many GPUs."""

    node: str
    cores: tuple[int, ...]
    gpus: int


def ray_pool(cluster: ClusterOptions, job: str, *, seed: int, options: EngineOptions) -> PoolEngine:
    """Return an engine whose windows run on a cluster's workers.

    Args:
        cluster: where.
        job: the job's reference, which every machine of the cluster must be able to load.
        seed: of weights, batches and everything random, on each worker.
        options: how to measure.

    Raises:
        InputError: if Ray is missing, the cluster does not answer, or the job cannot be used.
    """
    workers, leave = ray_workers(cluster, job, seed=seed, options=options)
    return PoolEngine(workers, on_close=leave)


def ray_workers(
    cluster: ClusterOptions, job: str, *, seed: int, options: EngineOptions
) -> tuple[list[Worker], Callable[[], None]]:
    """Return a cluster's workers, and what leaves the cluster again; arguments and errors as for :func:`ray_pool`."""
    ray = _imported()
    _connect(ray, cluster)
    try:
        opening = {"job": job, "seed": seed, "options": asdict(options), "path": sys.path, "folder": str(Path.cwd())}
        workers: list[Worker] = [_RayWorker(ray, place, opening) for place in places(ray.nodes(), cluster)]
        if not workers:
            raise InputError("offers no core", where=f"cluster {cluster.address}", allowed="a node with one")
    except BaseException:
        ray.shutdown()
        raise
    return workers, ray.shutdown


class Trainer:
    """Train a job where Ray says: the body of an actor.

    Args:
        opening: the job's reference, seed and options, and where the caller runs.
        cores: which of this machine's cores it is pinned to, by rank; empty for all.
        gpu: whether a GPU was given to it.
    """

    def __init__(self, opening: Mapping[str, Any], cores: Sequence[int], *, gpu: bool) -> None:
        self._opening, self._gpu = opening, gpu
        self._engine: Any = None
        if hasattr(os, "sched_setaffinity"):
            mine = sorted(os.sched_getaffinity(0))
            # A machine may have fewer cores than it was told to offer.
            os.sched_setaffinity(0, {mine[core % len(mine)] for core in cores} or set(mine))

    def describe(self) -> dict[str, Any]:
        """Build the model, and return what plans it allows, or what is wrong with it."""
        if self._engine is None:
            try:
                self._engine = self._open()
            except InputError as error:
                told = {"problem": error.problem, "where": error.where, "allowed": error.allowed}
                return {"input_error": told, "kind": type(error).__name__}
        return {"space": self._engine.space.to_json(), "locks": {**self._engine.locks}}

    def run(self, plan: dict[str, Any], steps: int, memory_budget_bytes: int | None) -> dict[str, Any]:
        """Return a window's measurement."""
        from autotune.plan import Plan

        found = self.describe()
        if "input_error" in found:
            raise RuntimeError(found["input_error"]["problem"])
        self._engine.memory_budget_bytes = memory_budget_bytes
        self._engine.apply(Plan.from_json(plan))
        measured: dict[str, Any] = self._engine.run(steps).to_json()
        return measured

    def close(self) -> None:
        """End the process that trains."""
        if self._engine is not None:
            self._engine.close()

    def _open(self) -> Any:
        from autotune.engines.isolated_engine import IsolatedEngine

        if Path(self._opening["folder"]).is_dir():
            os.chdir(self._opening["folder"])
        sys.path.extend(entry for entry in self._opening["path"] if entry and entry not in sys.path)
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        engine = IsolatedEngine(
            self._opening["job"],
            seed=self._opening["seed"],
            device="cuda" if self._gpu else "cpu",
            options=EngineOptions(**self._opening["options"]),
            threads=threads,
        )
        # What the first step of a process costs is no plan's fault.
        engine.run(1)
        return engine


class _RayWorker:
    """Hold an actor."""

    def __init__(self, ray: Any, place: _Place, opening: Mapping[str, Any]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray = ray
        self._actor = (
            ray.remote(Trainer)
            .options(
                num_cpus=len(place.cores),
                num_gpus=place.gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=place.node, soft=False),
            )
            .remote(opening, place.cores, gpu=bool(place.gpus))
        )
        # All build their models at once.
        self._described = self._actor.describe.remote()

    def describe(self) -> dict[str, Any]:
        """Return what plans the job allows."""
        found = self._got(self._described, _OPENING_S)
        if "input_error" in found:
            from autotune import errors

            kind: Any = getattr(errors, found["kind"], InputError)
            raise kind(**found["input_error"])
        return found

    def run(self, plan: dict[str, Any], steps: int, memory_budget_bytes: int | None) -> dict[str, Any]:
        """Return a window's measurement."""
        return self._got(self._actor.run.remote(plan, steps, memory_budget_bytes), None)

    def close(self) -> None:
        """End the actor, and the process that it trains in with it."""
        self._ray.kill(self._actor)

    def _got(self, reference: Any, timeout_s: float | None) -> dict[str, Any]:
        errors = self._ray.exceptions
        try:
            found: dict[str, Any] = self._ray.get(reference, timeout=timeout_s)
        except errors.RayTaskError:
            raise
        except errors.RayError as error:
            raise WorkerLostError(" ".join(str(error).split())[:200]) from error
        return found


def _imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray gives its processes a hint about GPUs that changes with its version.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise InputError("Ray is not installed", where="--cluster", allowed=_INSTALL) from error
    return ray


def _connect(ray: Any, cluster: ClusterOptions) -> None:
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    search = {"env_vars": {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}}
    if cluster.local is not None:
        cores = cluster.local * cluster.cores
        ray.init(address="local", num_cpus=cores, include_dashboard=False, runtime_env=search, **common)
        return
    try:
        if cluster.address != "auto":
            # Ray itself would try for minutes.
            host, _, port = cluster.address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        ray.init(address=cluster.address, **common)
    except Exception as error:  # what Ray raises that reaches nobody differs from version to version
        said = " ".join(str(error).split()).partition(". ")[0]
        raise InputError(
            f"no cluster answers ({said[:200]})",
            where=f"cluster {cluster.address}",
            allowed="the address of a running one (ray start --head), or local:N",
        ) from error


def places(nodes: Sequence[Mapping[str, Any]], cluster: ClusterOptions) -> list[_Place]:
    """Return a place for each worker: of nodes that share a machine, each has cores of its own."""
    used: Counter[str] = Counter()
    found = []
    for node in sorted((node for node in nodes if node["Alive"]), key=lambda node: str(node["NodeID"])):
        host, offered = node["NodeManagerHostname"], node["Resources"]
        cpus, gpus = int(offered.get("CPU", 0)), int(offered.get("GPU", 0))
        each = max(cpus // gpus, 1) if gpus else cluster.cores
        for _ in range(gpus or cpus // each):
            first = used[host]
            used[host] += each
            found.append(_Place(node["NodeID"], tuple(range(first, first + each)), 1 if gpus else 0))
    return found

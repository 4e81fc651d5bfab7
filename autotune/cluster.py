"""Reach the machines of a Ray cluster: the only file that knows Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from autotune.errors import InputError, WorkerLostError

_ALLOWED = "auto, local:N, ray://HOST:PORT or HOST:PORT"
_INSTALL = "pip install 'autotune-rl[ray]'"
# Seconds that a cluster may take to answer.
_CONNECT_S = 20.0
# Memory that Ray sets aside on this machine for what is passed on: plans and measurements are small.
_STORE_BYTES = 100 * 2**20
# Characters of what Ray says that are passed on.
_QUOTED = 200


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
        host, _, port = self.address.removeprefix("ray://").rpartition(":")
        if not fine and (kind == "local" or not host or not port.isdigit()):
            raise InputError(f"cluster is {self.address!r}", where="--cluster", allowed=_ALLOWED)
        if self.cores < 1:
            raise InputError(f"cores is {self.cores}", where="--worker-cores", allowed="at least 1")

    @property
    def local(self) -> int | None:
        """Return how many workers are asked for on this machine; ``None`` for a cluster that is there already."""
        return int(self.address.partition(":")[2]) if self.address.startswith("local:") else None


@dataclass(frozen=True, slots=True)
class Place:
    """Say where one worker runs: on which node, on which of its machine's cores (by rank), with how many GPUs."""

    node: str
    cores: tuple[int, ...]
    gpus: int


class Cluster:
    """Be connected to a cluster, until it is closed.

    Args:
        options: which.

    Attributes:
        places: where workers can run, at least one.

    Raises:
        InputError: if Ray is missing, or the cluster does not answer or offers nothing.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self._ray = _imported()
        _connect(self._ray, options)
        self.places = places(self._ray.nodes(), options)
        if not self.places:
            self.close()
            raise InputError("offers no core", where=f"cluster {options.address}", allowed="a node with one")

    def start(self, body: type, place: Place, *arguments: Any) -> Remote:
        """Make an object on a node, in a process of its own that is pinned to the place's cores.

        Args:
            body: its class, which every machine of the cluster can import.
            place: where.
            arguments: for its constructor.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = {
            "num_cpus": len(place.cores),
            "num_gpus": place.gpus,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=place.node, soft=False),
        }
        return Remote(self._ray, self._ray.remote(_Pinned).options(**options).remote(body, place.cores, arguments))

    def close(self) -> None:
        """Leave the cluster; what was started there ends."""
        self._ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Remote:
    """Call the methods of an object on another machine."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def begin(self, method: str, *arguments: Any) -> Callable[[float | None], Any]:
        """Begin a call; return what waits for its answer, so many seconds at most.

        What is returned raises :class:`WorkerLostError` if the object's process or machine is gone, or does not answer
        in time, and what the method raises.
        """
        reference = self._actor.call.remote(method, *arguments)

        def wait(timeout_s: float | None = None) -> Any:
            errors = self._ray.exceptions
            try:
                return self._ray.get(reference, timeout=timeout_s)
            except errors.RayTaskError:
                raise
            except errors.RayError as error:
                raise WorkerLostError(" ".join(str(error).split())[:_QUOTED]) from error

        return wait

    def kill(self) -> None:
        """End the object's process."""
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor)


class _Pinned:
    """Hold an object in a process that keeps to some cores: the body of an actor.

    Args:
        body: the object's class.
        cores: which of this machine's cores, by rank.
        arguments: for its constructor.
    """

    def __init__(self, body: type, cores: Sequence[int], arguments: Sequence[Any]) -> None:
        if hasattr(os, "sched_setaffinity"):
            mine = sorted(os.sched_getaffinity(0))
            # A machine may have fewer cores than it was told to offer.
            os.sched_setaffinity(0, {mine[core % len(mine)] for core in cores})
        self._object = body(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object."""
        return getattr(self._object, method)(*arguments)


def places(nodes: Sequence[Mapping[str, Any]], options: ClusterOptions) -> list[Place]:
    """Return a place for each worker: of nodes that share a machine, each has cores of its own.

    Args:
        nodes: as Ray describes them.
        options: how many cores a worker has.
    """
    used: Counter[str] = Counter()
    found = []
    for node in sorted((node for node in nodes if node["Alive"]), key=lambda node: str(node["NodeID"])):
        host, offered = node["NodeManagerHostname"], node["Resources"]
        cpus, gpus = int(offered.get("CPU", 0)), int(offered.get("GPU", 0))
        each = max(cpus // gpus, 1) if gpus else options.cores
        for _ in range(gpus or cpus // each):
            first = used[host]
            used[host] += each
            found.append(Place(node["NodeID"], tuple(range(first, first + each)), 1 if gpus else 0))
    return found


def _imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise InputError("Ray is not installed", where="--cluster", allowed=_INSTALL) from error
    return ray


def _connect(ray: Any, options: ClusterOptions) -> None:
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if options.local is not None:
        search = {"env_vars": {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}}
        cores = options.local * options.cores
        common |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        ray.init(address="local", num_cpus=cores, runtime_env=search, **common)
        return
    try:
        if options.address != "auto":
            # Ray itself would try for minutes.
            host, _, port = options.address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        ray.init(address=options.address, **common)
    except Exception as error:  # what Ray raises that reaches nobody differs from version to version
        said = " ".join(str(error).split()).partition(". ")[0]
        raise InputError(
            f"no cluster answers ({said[:_QUOTED]})",
            where=f"cluster {options.address}",
            allowed="a running one's (ray start --head; RAY_AUTH_MODE=token if it asks for a token), or local:N",
        ) from error

"""Reach the machines of a Ray cluster: the only file that knows Ray."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from autotune.errors import InputError, WorkerLostError
from autotune.io.environment_variables import variable
from autotune.io.scratch import ScratchFolder

# Workers on one machine, cores of one worker, and ports.
_MOST, _LAST_PORT = 1024, 65_535
_ALLOWED = f"auto, local:N up to {_MOST}, ray://HOST:PORT or HOST:PORT"
# A name or an address: whatever else is written there, such as a password, would be looked up in the network.
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_INSTALL = "pip install 'autotune-rl[ray]'"
# Seconds that a cluster may take to answer.
_CONNECT_S = 20.0
# Memory that Ray sets aside on this machine for what is passed on: plans and measurements are small.
_STORE_BYTES = 100 * 2**20
# Characters of what Ray says that are passed on.
_QUOTED = 200
# Has Ray use the loopback interface alone, as it does where it knows no clusters; by default it listens on all.
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# Characters of a folder in which Ray's sockets, whose paths may have a hundred, still have room.
_SHORT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Where workers run.

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
        fine = self.address == "auto" or (kind == "local" and _is_whole(rest, _MOST))
        host, _, port = self.address.removeprefix("ray://").rpartition(":")
        if not fine and (kind == "local" or _HOST.fullmatch(host) is None or not _is_whole(port, _LAST_PORT)):
            raise InputError(f"cluster is {self.address!r}", where="--cluster", allowed=_ALLOWED)
        if not 1 <= self.cores <= _MOST:
            raise InputError(f"cores is {self.cores}", where="--worker-cores", allowed=f"1 to {_MOST}")

    @property
    def local(self) -> int | None:
        """Return how many workers are asked for on this machine; ``None`` for a cluster that is there already."""
        return int(self.address.partition(":")[2]) if self.address.startswith("local:") else None


@dataclass(frozen=True, slots=True)
class Place:
    """Where one worker runs: on which node, on which of its machine's cores (by rank), with how many GPUs."""

    node: str
    cores: tuple[int, ...]
    gpus: int


class Cluster:
    """A connection to a cluster, until it is closed.

    Args:
        options: which.

    Attributes:
        places: where workers can run, at least one.

    Raises:
        InputError: if Ray is missing, or the cluster does not answer or offers nothing.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self._ray = _imported()
        self._folder = None if options.local is None else ScratchFolder(_short_folder())
        try:
            _connect(self._ray, options, self._folder)
        except BaseException:
            self.close()
            raise
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
        if self._folder is not None:
            self._folder.close()

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
    """An object in a process that is bound to some cores: the body of an actor.

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


def _is_whole(text: str, most: int) -> bool:
    """Tell whether text is a number from 1 on, in plain digits."""
    return text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most


def _imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise InputError("Ray is not installed", where="--cluster", allowed=_INSTALL) from error
    return ray


def _connect(ray: Any, options: ClusterOptions, folder: ScratchFolder | None) -> None:
    """Connect to a cluster; to one of this machine's own, for which there is a folder."""
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not options.address.startswith("ray://"):
        # By default Ray's workers look for libraries in this process's working directory first. They need this package.
        package = str(Path(__file__).resolve().parents[2])
        common["job_config"] = ray.job_config.JobConfig(_py_driver_sys_path=[package], _client_job=True)
    if options.local is not None and folder is not None:
        cores = options.local * options.cores
        common |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES, "_temp_dir": str(folder.path)}
        with _loopback_alone():
            ray.init(address="local", num_cpus=cores, **common)
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


@contextlib.contextmanager
def _loopback_alone() -> Iterator[None]:
    """Have what Ray starts meanwhile listen on the loopback interface alone."""
    from ray._private import ray_constants

    # It reads the variable when it is imported, which may be long ago.
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        with variable(_CLUSTERS, "0"):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _short_folder() -> Path:
    """Return a folder for temporary files whose path is short."""
    usual = Path(tempfile.gettempdir())
    return usual if len(str(usual)) <= _SHORT else Path("/tmp")  # noqa: S108 - as Ray itself does

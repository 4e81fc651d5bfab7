"""Connect to the machines of a Ray cluster; no other file uses Ray."""

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
from typing import Any

from autotune import extras
from autotune.errors import InputError, WorkerLostError
from autotune.io.documents import document
from autotune.io.environment_variables import variable
from autotune.io.scratch import ScratchFolder

# Largest number of workers on one machine and of cores of one worker, and the largest port.
_MOST, _LAST_PORT = 1024, 65_535
_ALLOWED = f"auto, local:N up to {_MOST}, ray://HOST:PORT or HOST:PORT"
# A name or an address. Anything else, such as a password, must not be looked up in the network.
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
# Seconds for a cluster to answer.
_CONNECT_S = 20.0
# Memory that Ray reserves on this machine for messages: plans and measurements are small.
_STORE_BYTES = 100 * 2**20
# Characters of a message of Ray that are quoted.
_QUOTED = 200
# Variable that makes Ray use only the loopback interface, as on systems without clusters; by default it uses all.
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# Longest path of a folder for Ray's sockets, whose own paths may have about a hundred characters.
_SHORT = 16


@document
class ClusterOptions:
    """The cluster on which workers run.

    Attributes:
        address: ``auto`` for the cluster that this machine belongs to, ``local:N`` for N workers on this machine, or a
            cluster's ``ray://HOST:PORT`` or ``HOST:PORT``.
        cores: number of cores to which each worker is pinned; a machine with GPUs instead has one worker per GPU, and
            its cores are divided among them.
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
        """Return the number of workers on this machine; ``None`` for a running cluster."""
        return int(self.address.partition(":")[2]) if self.address.startswith("local:") else None


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one worker: its node, the indices of its cores on that machine, and its number of GPUs."""

    node: str
    cores: tuple[int, ...]
    gpus: int


class Cluster:
    """A connection to a cluster, which is started first if it is local.

    Args:
        options: the cluster and its workers.

    Attributes:
        places: the places for workers, at least one.

    Raises:
        InputError: if Ray is missing, the cluster does not answer, or it has no cores.
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
            raise InputError(
                "has no cores", where=f"cluster {options.address}", allowed="a node with at least one core"
            )

    def start(self, body: type, place: Place, *arguments: Any) -> Remote:
        """Create an object in a separate process that is pinned to the cores of a place.

        Args:
            body: class of the object, which every machine of the cluster can import.
            place: the place.
            arguments: arguments of the class.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = {
            "num_cpus": len(place.cores),
            "num_gpus": place.gpus,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=place.node, soft=False),
        }
        return Remote(self._ray, self._ray.remote(_Pinned).options(**options).remote(body, place.cores, arguments))

    def close(self) -> None:
        """Disconnect from the cluster; processes started there end."""
        self._ray.shutdown()
        if self._folder is not None:
            self._folder.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Remote:
    """An object on another machine."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def begin(self, method: str, *arguments: Any) -> Callable[[float | None], Any]:
        """Begin a call, and return a function that waits for its answer, with a timeout in seconds.

        That function raises :class:`WorkerLostError` if the object's process or machine is gone or does not answer in
        time, and passes on exceptions of the method.
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
    """An object in a process that is pinned to some cores: the body of an actor.

    Args:
        body: class of the object.
        cores: indices of cores in the sorted list of those that this process may use.
        arguments: arguments of the class.
    """

    def __init__(self, body: type, cores: Sequence[int], arguments: Sequence[Any]) -> None:
        if hasattr(os, "sched_setaffinity"):
            mine = sorted(os.sched_getaffinity(0))
            # A machine may have fewer cores than its node offers.
            os.sched_setaffinity(0, {mine[core % len(mine)] for core in cores})
        self._object = body(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object."""
        return getattr(self._object, method)(*arguments)


def places(nodes: Sequence[Mapping[str, Any]], options: ClusterOptions) -> list[Place]:
    """Return a place for each worker; nodes that share a machine get different cores.

    Args:
        nodes: Ray's descriptions of the nodes.
        options: options with the number of cores per worker.
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
    """Return whether a text is a whole number from 1 to a limit, in plain digits."""
    return text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most


def _imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise extras.missing("ray", where="--cluster") from error
    return ray


def _connect(ray: Any, options: ClusterOptions, folder: ScratchFolder | None) -> None:
    """Connect to a cluster, or start one on this machine in a folder."""
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not options.address.startswith("ray://"):
        # By default Ray's workers search this working directory for libraries first; they need only this package.
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
            # Checked first, because Ray itself would retry for minutes.
            host, _, port = options.address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        ray.init(address=options.address, **common)
    except Exception as error:  # the exceptions of Ray differ between versions
        said = " ".join(str(error).split()).partition(". ")[0]
        raise InputError(
            f"the cluster does not answer ({said[:_QUOTED]})",
            where=f"cluster {options.address}",
            allowed="a running cluster (ray start --head; RAY_AUTH_MODE=token if it asks for a token), or local:N",
        ) from error


@contextlib.contextmanager
def _loopback_alone() -> Iterator[None]:
    """Let the processes that Ray starts in the body listen only on the loopback interface."""
    from ray._private import ray_constants

    # Ray reads the variable only when it is imported.
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        with variable(_CLUSTERS, "0"):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _short_folder() -> Path:
    """Return a folder for temporary files with a short path."""
    usual = Path(tempfile.gettempdir())
    return usual if len(str(usual)) <= _SHORT else Path("/tmp")  # noqa: S108 - as Ray itself does

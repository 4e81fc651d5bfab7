"""Training of seeds in separate processes, on this machine or on a cluster.

Files that a seed writes on a cluster are copied to the run directory while it trains. If its machine is lost, the seed
continues on another machine from the last copied checkpoint.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from autotune.campaign.seed_files import SeedFiles
from autotune.engines.ray_cluster import Cluster, ClusterOptions, Place
from autotune.engines.supervisor import die_with_parent
from autotune.errors import WorkerLostError
from autotune.io.environment_variables import variable
from autotune.io.files import write_atomic
from autotune.io.scratch import ScratchFolder

# Trains one seed. Arguments: recipe as a JSON object, seed, folder of its files, process id of the parent process.
Train = Callable[[dict[str, Any], int, str, int], None]
# Time limit in seconds for a machine to send the files of a seed.
_NEWS_S = 60.0


class SeedProcess(Protocol):
    """Interface of a seed's training, which :class:`multiprocessing.Process` has."""

    @property
    def exitcode(self) -> int | None:
        """Return the exit code, negative for a signal; ``None`` while it trains.

        Raises:
            WorkerLostError: if its machine is lost.
        """
        ...

    def terminate(self) -> None:
        """Stop the training."""
        ...

    def join(self) -> None:
        """Wait for the end of the training."""
        ...


def begin_seed(train: Train, recipe: dict[str, Any], seed: int, folder: Path) -> BaseProcess:
    """Start the training of a seed in a separate process, which ends with this one.

    Args:
        train: trains the seed.
        recipe: the recipe as a JSON object.
        seed: the seed.
        folder: folder of the seed's files.
    """
    arguments = (train, recipe, seed, str(folder), os.getpid())
    process = multiprocessing.get_context("spawn").Process(target=_train, args=arguments)
    # Python with ``-c``, as multiprocessing runs it, would search the working directory first, even for its library.
    with variable("PYTHONSAFEPATH", "1"):
        process.start()
    return process


def _train(train: Train, recipe: dict[str, Any], seed: int, folder: str, parent: int) -> None:
    # A process that outlived its parent would write to the same files as a resumed training.
    die_with_parent(parent)
    # An interrupt from the keyboard reaches the whole process group; the parent stops its seeds itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    train(recipe, seed, folder, parent)


class LocalSeeds:
    """Training of seeds on this machine.

    Args:
        train: trains one seed.
        processes: number of parallel processes; ``None`` for the number of cores.

    Attributes:
        at_once: number of seeds that train in parallel.
    """

    def __init__(self, train: Train, processes: int | None) -> None:
        self._train = train
        self.at_once = processes or max(os.cpu_count() or 1, 1)

    def begin(self, recipe: dict[str, Any], seed: int, folder: Path) -> SeedProcess:
        """Start the training of a seed, or continue it from its files."""
        return begin_seed(self._train, recipe, seed, folder)

    def close(self) -> None:
        """Do nothing."""


class ClusterSeeds:
    """Training of seeds on a cluster, one in each place.

    Args:
        train: trains one seed; every machine of the cluster can import it.
        options: address of the cluster and cores per place.
        processes: number of parallel processes; ``None`` for the number of places.

    Raises:
        InputError: if the cluster does not answer.
    """

    def __init__(self, train: Train, options: ClusterOptions, processes: int | None) -> None:
        self._train = train
        self._cluster = Cluster(options)
        self._free = self._cluster.places[:processes]
        self._running: list[_RemoteSeed] = []

    @property
    def at_once(self) -> int:
        """Return the number of seeds that can train in parallel; it decreases when machines are lost.

        Raises:
            WorkerLostError: if all machines are lost.
        """
        count = len(self._free) + sum(seed.holds_its_place for seed in self._running)
        if not count:
            raise WorkerLostError("all workers of the cluster were lost")
        return count

    def begin(self, recipe: dict[str, Any], seed: int, folder: Path) -> SeedProcess:
        """Start the training of a seed, or continue it from its files."""
        begun = _RemoteSeed(self._cluster, self._free.pop(0), self._free, self._train, recipe, seed, folder)
        self._running.append(begun)
        return begun

    def close(self) -> None:
        """Disconnect from the cluster."""
        self._cluster.close()


class SeedHost:
    """Training of a seed on a machine of the cluster, in a separate process and folder.

    Args:
        train: trains the seed.
        recipe: the recipe as a JSON object.
        seed: the seed.
        files: contents of the seed's existing files, by name.
    """

    def __init__(self, train: Train, recipe: dict[str, Any], seed: int, files: dict[str, bytes]) -> None:
        # Never closed: the process of this object is killed at the end.
        self._folder = ScratchFolder()
        self._path = self._folder.path
        self._files = SeedFiles(folder=self._path, seed=seed)
        for path in self._files.all:
            if path.name in files:
                path.write_bytes(files[path.name])
        self._sent: dict[str, tuple[int, int]] = {}
        self._process = begin_seed(train, recipe, seed, self._path)

    def news(self) -> tuple[int | None, dict[str, bytes | None]]:
        """Return the exit code and the files that changed since the last call; ``None`` for a removed file."""
        # Read the exit code first: once the process has ended, its files are complete.
        code = self._process.exitcode
        # Read the result before the files that it depends on, since it is written after them.
        seen: dict[str, tuple[int, int]] = {}
        changed: dict[str, bytes | None] = {}
        for path in reversed(self._files.all):
            # A seed removes its checkpoints when it ends.
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                mark = status.st_mtime_ns, status.st_size
                if self._sent.get(path.name) != mark:
                    changed[path.name] = path.read_bytes()
                seen[path.name] = mark
        changed.update(dict.fromkeys(self._sent.keys() - seen.keys()))
        self._sent = seen
        return code, changed


class _RemoteSeed:
    """A seed that trains on another machine."""

    def __init__(
        self,
        cluster: Cluster,
        place: Place,
        free: list[Place],
        train: Train,
        recipe: dict[str, Any],
        seed: int,
        folder: Path,
    ) -> None:
        self._place, self._free = place, free
        self._files = SeedFiles(folder=folder, seed=seed)
        self._host = cluster.start(SeedHost, place, train, recipe, seed, self._files.contents())
        self._code: int | None = None
        self.holds_its_place = True

    @property
    def exitcode(self) -> int | None:
        """Copy the files that the seed has changed, and return its exit code."""
        if self._code is None:
            try:
                self._code, changed = self._host.begin("news")(_NEWS_S)
            except WorkerLostError:
                self.holds_its_place = False
                raise
            # In this order, the result is written last.
            for path in self._files.all:
                content = changed.get(path.name)
                if content is not None:
                    write_atomic(path, content)
                elif path.name in changed:
                    path.unlink(missing_ok=True)
            if self._code is not None:
                self._leave()
        return self._code

    def terminate(self) -> None:
        """Stop the training."""
        self._host.kill()

    def join(self) -> None:
        """Do nothing: the other machine stops the training."""

    def _leave(self) -> None:
        self._host.kill()
        self.holds_its_place = False
        self._free.append(self._place)

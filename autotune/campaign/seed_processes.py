"""Train seeds in processes: on this machine, or on a cluster, whose files come here while they train.

Wherever a seed trains, what it reached lies in the run directory: a seed whose machine is lost goes on elsewhere from
the last checkpoint that arrived.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
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

# Trains one seed: the recipe as a JSON object, the seed, the folder of its files, the process that waits for it.
Train = Callable[[dict[str, Any], int, str, int], None]
# Seconds that a machine may take to send what a seed wrote.
_NEWS_S = 60.0


class SeedProcess(Protocol):
    """A seed in training."""

    @property
    def exitcode(self) -> int | None:
        """Return how it ended; ``None`` while it trains.

        Raises:
            WorkerLostError: if its machine is gone.
        """
        ...

    def terminate(self) -> None:
        """End it."""
        ...

    def join(self) -> None:
        """Wait until it has ended."""
        ...


def begin_seed(train: Train, recipe: dict[str, Any], seed: int, folder: Path) -> BaseProcess:
    """Begin to train a seed in a process of its own, which ends with this one.

    Args:
        train: trains it.
        recipe: the recipe as a JSON object.
        seed: the seed.
        folder: where its files are.
    """
    arguments = (train, recipe, seed, str(folder), os.getpid())
    process = multiprocessing.get_context("spawn").Process(target=_train, args=arguments)
    with _without_working_directory():
        process.start()
    return process


def _train(train: Train, recipe: dict[str, Any], seed: int, folder: str, parent: int) -> None:
    # One that goes on alone would write where whoever takes the training up writes.
    die_with_parent(parent)
    # The keyboard interrupts the whole group, and the parent ends its seeds itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    train(recipe, seed, folder, parent)


def _without_working_directory() -> AbstractContextManager[None]:
    """Have Python processes that are started meanwhile not look into the working directory for libraries.

    What is started with ``-c``, as multiprocessing does it, looks there first, for the standard library too.
    """
    return variable("PYTHONSAFEPATH", "1")


class LocalSeeds:
    """Train seeds on this machine.

    Args:
        train: trains one.
        processes: at once; ``None`` takes the number of cores.

    Attributes:
        at_once: how many train at once.
    """

    def __init__(self, train: Train, processes: int | None) -> None:
        self._train = train
        self.at_once = processes or max(os.cpu_count() or 1, 1)

    def begin(self, recipe: dict[str, Any], seed: int, folder: Path) -> SeedProcess:
        """Begin to train a seed, or go on from its files."""
        return begin_seed(self._train, recipe, seed, folder)

    def close(self) -> None:
        """Do nothing: nothing is open."""


class ClusterSeeds:
    """Train seeds on a cluster, one at each place.

    Args:
        train: trains one; every machine of the cluster can import it.
        options: which cluster.
        processes: at once; ``None`` takes as many as there are places.

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
        """Return how many can train at once; fewer after machines were lost.

        Raises:
            WorkerLostError: if all machines were.
        """
        count = len(self._free) + sum(seed.holds_its_place for seed in self._running)
        if not count:
            raise WorkerLostError("all of the cluster's workers were lost")
        return count

    def begin(self, recipe: dict[str, Any], seed: int, folder: Path) -> SeedProcess:
        """Begin to train a seed, or go on from its files."""
        begun = _RemoteSeed(self._cluster, self._free.pop(0), self._free, self._train, recipe, seed, folder)
        self._running.append(begun)
        return begun

    def close(self) -> None:
        """Leave the cluster."""
        self._cluster.close()


class SeedHost:
    """Train a seed on a machine of the cluster, in a process and a folder of its own.

    Args:
        train: trains it.
        recipe: the recipe as a JSON object.
        seed: the seed.
        files: what it has reached so far, by file name.
    """

    def __init__(self, train: Train, recipe: dict[str, Any], seed: int, files: dict[str, bytes]) -> None:
        # Never closed: whoever is done with this object kills its process.
        self._folder = ScratchFolder()
        self._path = self._folder.path
        self._files = SeedFiles(folder=self._path, seed=seed)
        for path in self._files.all:
            if path.name in files:
                path.write_bytes(files[path.name])
        self._sent: dict[str, tuple[int, int]] = {}
        self._process = begin_seed(train, recipe, seed, self._path)

    def news(self) -> tuple[int | None, dict[str, bytes | None]]:
        """Return how the process ended, and what changed in the folder since the last time; ``None`` is gone."""
        # Asked first: what is written until then is whole.
        code = self._process.exitcode
        # The result comes first: where it is, all that it rests on was written before.
        seen: dict[str, tuple[int, int]] = {}
        changed: dict[str, bytes | None] = {}
        for path in reversed(self._files.all):
            # A seed that ends takes its saves away.
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
    """Follow a seed that trains elsewhere."""

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
        """Take in what it wrote, and return how it ended."""
        if self._code is None:
            try:
                self._code, changed = self._host.begin("news")(_NEWS_S)
            except WorkerLostError:
                self.holds_its_place = False
                raise
            # And the result is written last.
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
        """End it."""
        self._host.kill()

    def join(self) -> None:
        """Do nothing: its machine ends it."""

    def _leave(self) -> None:
        self._host.kill()
        self.holds_its_place = False
        self._free.append(self._place)

"""Train seeds in processes: on this machine, or on a cluster, whose files come here while they train.

Wherever a seed trains, what it reached lies in the run directory: a seed whose machine is lost goes on elsewhere from
the last checkpoint that arrived.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from autotune.cluster import Cluster, ClusterOptions, Place
from autotune.errors import WorkerLostError
from autotune.files import write_atomic

# Trains one seed: the recipe as a JSON object, the seed, the folder of its files, the process that waits for it.
Train = Callable[[dict[str, Any], int, str, int], None]
# Seconds that a machine may take to send what a seed wrote.
_NEWS_S = 60.0


class SeedProcess(Protocol):
    """Be a seed in training."""

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
        self._context = multiprocessing.get_context("spawn")
        self.at_once = processes or max(os.cpu_count() or 1, 1)

    def begin(self, recipe: dict[str, Any], seed: int, folder: Path) -> SeedProcess:
        """Begin to train a seed, or go on from its files."""
        process = self._context.Process(target=self._train, args=(recipe, seed, str(folder), os.getpid()))
        process.start()
        return process

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
        self._folder = tempfile.TemporaryDirectory(prefix="autotune-seed-")
        self._path = Path(self._folder.name)
        for name, content in files.items():
            (self._path / name).write_bytes(content)
        self._sent: dict[str, tuple[int, int]] = {}
        arguments = (recipe, seed, str(self._path), os.getpid())
        self._process = multiprocessing.get_context("spawn").Process(target=train, args=arguments)
        self._process.start()

    def news(self) -> tuple[int | None, dict[str, bytes | None]]:
        """Return how the process ended, and what changed in the folder since the last time; ``None`` is gone."""
        # Asked first: what is written until then is whole.
        code = self._process.exitcode
        # By name, so that the result comes first: where it is, all that it rests on was written before.
        now = {path.name: path.stat() for path in sorted(self._path.glob("seed-*.*"))}
        seen = {name: (status.st_mtime_ns, status.st_size) for name, status in now.items()}
        changed: dict[str, bytes | None] = {
            name: (self._path / name).read_bytes() for name, mark in seen.items() if self._sent.get(name) != mark
        }
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
        self._place, self._free, self._folder = place, free, folder
        files = {path.name: path.read_bytes() for path in folder.glob(f"seed-{seed}.*")}
        self._host = cluster.start(SeedHost, place, train, recipe, seed, files)
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
            for name, content in sorted(changed.items(), reverse=True):
                if content is None:
                    (self._folder / name).unlink(missing_ok=True)
                else:
                    write_atomic(self._folder / name, content)
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

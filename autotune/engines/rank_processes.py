"""Run a module on ranks, or in one process of its own: tell it what to do, and return what it answers."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from autotune.engines.wire import Wire
from autotune.engines.worker_processes import Workers, WorkersError, fail, leave, opened
from autotune.errors import EngineError
from autotune.measurement import Failure

# Seconds between two looks at whether the ranks have printed anything.
_POLL_S = 0.5
# Seconds that the rest of a document may take to arrive.
_ARRIVING_S = 60.0


class RanksError(EngineError):
    """Report that ranks ended before they answered.

    Args:
        message: one line about it.
        failure: its class.
        tried: what they said last that they would try; ``None`` if nothing.
    """

    def __init__(self, message: str, failure: Failure, tried: str | None) -> None:
        super().__init__(message)
        self.failure = failure
        self.tried = tried


@dataclass(frozen=True, slots=True)
class Report:
    """Tell whoever asked how far the work is; rank 0 speaks for all.

    Attributes:
        wire: leads to whoever asked; ``None`` on the other ranks.
    """

    wire: Wire | None

    def done(self, share: float) -> None:
        """Tell which share is done."""
        self._tell({"done": share})

    def tries(self, what: str) -> None:
        """Tell what is tried next, in case that it ends the ranks."""
        self._tell({"tries": what})

    def _tell(self, document: dict[str, Any]) -> None:
        if self.wire is not None:
            self.wire.send(document)


def run_on_ranks(
    module: str,
    asked: Mapping[str, Any],
    *,
    ranks: int,
    threads: int | None = 1,
    patience_s: float = math.inf,
    on_progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Run a module as so many ranks on this machine, and return what rank 0 answers.

    Args:
        module: the module; run, it calls :func:`be_rank`.
        asked: what the ranks are told.
        ranks: how many.
        threads: of each rank, where the environment does not say; one rank alone has one as well, or ranks would not be
            what scales. ``None`` for one of each of several ranks, and for torch's default in a single one.
        patience_s: seconds without news from the ranks after which they are ended.
        on_progress: is told of the share that is done.

    Raises:
        InputError: if a rank refuses what it was asked.
        RanksError: if a rank fails; what it raised is quoted; or if there is no news from them for too long.
    """
    own = {} if threads is None or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}
    tried: list[str] = []
    with Workers(module, asked, ranks=ranks, environment=own) as workers:
        try:
            found = _followed(workers, patience_s, on_progress, tried)
        except WorkersError as error:
            raise RanksError(
                f"{ranks} ranks end with {error.failure}: {error}", error.failure, tried[-1] if tried else None
            ) from error
    if found is None:
        silent = f"{ranks} ranks have no news for {patience_s:.0f} s"
        raise RanksError(silent, Failure.TIMEOUT, tried[-1] if tried else None)
    return found


def run_elsewhere(module: str, asked: Mapping[str, Any], *, threads: int) -> dict[str, Any]:
    """Run a module in a process of its own, and return what it answers.

    Args:
        module: the module; run, it calls :func:`be_rank`.
        asked: what it is told.
        threads: of the process.

    Raises:
        InputError: if the process refuses what it was asked.
        WorkersError: if it fails.
    """
    with Workers(module, asked, environment={"OMP_NUM_THREADS": str(threads)}) as workers:
        found = _followed(workers, math.inf, None, [])
    assert found is not None
    return found


def _followed(
    workers: Workers, patience_s: float, on_progress: Callable[[float], None] | None, tried: list[str]
) -> dict[str, Any] | None:
    """Return what the first worker answers in the end; ``None`` if there was no news for too long."""
    printed, silent_since = 0, time.monotonic()
    while time.monotonic() - silent_since < patience_s:
        if workers.ready(_POLL_S):
            document = workers.first(_ARRIVING_S)
            if "found" in document:
                found: dict[str, Any] = document["found"]
                return found
            if "tries" in document:
                tried.append(document["tries"])
            elif on_progress is not None:
                on_progress(document["done"])
        elif workers.printed() == printed:
            continue
        printed, silent_since = workers.printed(), time.monotonic()
    return None


def be_rank(work: Callable[[dict[str, Any], Report], Mapping[str, Any]]) -> NoReturn:
    """Do what :func:`run_on_ranks` or :func:`run_elsewhere` asks of this process, and end.

    Args:
        work: does what is asked, and returns the answer; it may tell how far it is.
    """
    wire, asked, number = opened()
    try:
        found = work(asked, Report(wire if number == 0 else None))
    except Exception as error:  # noqa: BLE001 - whatever the job raises, whoever asked names
        fail(wire, number, error)
    if number == 0:
        wire.send({"found": found})
    leave(0)

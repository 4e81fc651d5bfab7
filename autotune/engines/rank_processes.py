"""Run a module in several ranks or in one separate process, and return its answer."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from autotune.engines.wire import Wire
from autotune.engines.worker_processes import Workers, WorkersError, fail, leave, opened, send_answer
from autotune.errors import EngineError
from autotune.measurement import Failure

# Seconds between two checks for printed output.
_POLL_S = 0.5
# Seconds for the rest of a document to arrive.
_ARRIVING_S = 60.0


class RanksError(EngineError):
    """The ranks ended or fell silent before they answered.

    Args:
        message: one line about the failure.
        failure: the kind of failure.
        tried: the last attempt that they reported; ``None`` if they reported none.
    """

    def __init__(self, message: str, failure: Failure, tried: str | None) -> None:
        super().__init__(message)
        self.failure = failure
        self.tried = tried


@dataclass(frozen=True, slots=True)
class Report:
    """Progress reports to the caller; rank 0 reports for all ranks.

    Attributes:
        wire: wire to the caller; ``None`` on the other ranks.
    """

    wire: Wire | None

    def done(self, share: float) -> None:
        """Report the share of the work that is done, 0 to 1."""
        self._tell({"done": share})

    def tries(self, what: str) -> None:
        """Report the next attempt, in case it ends the ranks."""
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
    """Run a module in several ranks on this machine, and return the answer of rank 0.

    Args:
        module: the module, which calls :func:`be_rank`.
        asked: the document that every rank receives.
        ranks: number of ranks.
        threads: torch threads of each rank, unless the environment sets them; also for a single rank, so that runs with
            different numbers of ranks are comparable. ``None`` for one thread in each of several ranks, and for torch's
            default in a single rank.
        patience_s: seconds without any report or output after which the ranks are ended.
        on_progress: called with the share of the work that is done.

    Raises:
        InputError: if a rank refuses its input.
        RanksError: if a rank fails, with its exception quoted, or if the ranks are silent for too long.
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
        silent = f"{ranks} ranks reported nothing for {patience_s:.0f} s"
        raise RanksError(silent, Failure.TIMEOUT, tried[-1] if tried else None)
    return found


def run_elsewhere(module: str, asked: Mapping[str, Any], *, threads: int) -> dict[str, Any]:
    """Run a module in a separate process, and return its answer.

    Args:
        module: the module, which calls :func:`be_rank`.
        asked: the document that the process receives.
        threads: torch threads of the process.

    Raises:
        InputError: if the process refuses its input.
        WorkersError: if the process fails.
    """
    with Workers(module, asked, environment={"OMP_NUM_THREADS": str(threads)}) as workers:
        found = _followed(workers, math.inf, None, [])
    assert found is not None
    return found


def _followed(
    workers: Workers, patience_s: float, on_progress: Callable[[float], None] | None, tried: list[str]
) -> dict[str, Any] | None:
    """Return the first worker's answer; ``None`` if the workers were silent for too long."""
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
    """Do the work that :func:`run_on_ranks` or :func:`run_elsewhere` requests, and end this process.

    Args:
        work: function of the received document and the progress report that returns the answer.
    """
    wire, asked, number = opened()
    try:
        found = work(asked, Report(wire if number == 0 else None))
    except Exception as error:  # noqa: BLE001 - the caller reports whatever the job raises
        fail(wire, number, error)
    if number == 0:
        send_answer(wire, "found", found)
    leave()

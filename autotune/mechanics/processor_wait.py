"""How long this process waited for a processor that others had, as Linux's scheduler counts it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import InputError

# Environment variable with the share of waiting from which a measurement counts as disturbed.
BUSY_VARIABLE = "AUTOTUNE_BUSY_FRAC"
_BUSY_FRAC = 0.1
_TASKS = Path("/proc/self/task")
_STAT = Path("/proc/stat")


class ProcessorWait:
    """A watch that begins when it is created.

    A thread waits if it could run and other threads have all processors: those of other programs, or this program's
    own if it has more of them than there are processors. What a hypervisor takes for other machines counts too.
    Source: schedstat and the steal time of proc(5).
    """

    def __init__(self) -> None:
        self._began_ns = time.perf_counter_ns()
        self._began = _threads()
        self._began_stolen = _stolen()

    def frac(self) -> float | None:
        """Return the share of the time since the beginning, from 0 to 1, that threads waited in; ``None`` if unknown.

        The time is the sum over all threads of the seconds in which they ran or could have run, but at least the time
        that has passed: a process that mostly sleeps is not disturbed.
        """
        ended = _threads()
        if self._began is None or ended is None:
            return None
        ran = waited = 0
        for thread, (after_ran, after_waited) in ended.items():
            before_ran, before_waited = self._began.get(thread, (0, 0))
            ran += max(after_ran - before_ran, 0)
            waited += max(after_waited - before_waited, 0)
        passed = time.perf_counter_ns() - self._began_ns
        share = waited / max(ran + waited, passed, 1)
        busy, stolen = (after - before for after, before in zip(_stolen(), self._began_stolen, strict=True))
        taken = stolen / busy if busy > 0 and stolen > 0 else 0.0
        return 1 - (1 - share) * (1 - min(taken, 1.0))


def busy_frac() -> float:
    """Return the share of waiting from which a measurement counts as disturbed.

    Raises:
        InputError: if the environment variable is not a number from 0 to 1.
    """
    text = os.environ.get(BUSY_VARIABLE, "").strip()
    if not text:
        return _BUSY_FRAC
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise InputError(f"is {text!r}", where=BUSY_VARIABLE, allowed="a number from 0 to 1; 1 accepts a busy machine")
    return share


def is_disturbed(frac: float | None) -> bool:
    """Tell whether a share of waiting makes a measurement's times doubtful."""
    return frac is not None and frac > busy_frac()


def mean_wait(parts: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the share of waiting of several windows together; ``None`` if that of one is unknown.

    Args:
        parts: seconds and share of waiting of each window.
    """
    if any(frac is None for _, frac in parts):
        return None
    total = sum(seconds for seconds, _ in parts)
    return sum(seconds * (frac or 0.0) for seconds, frac in parts) / total if total else None


def _threads() -> dict[str, tuple[int, int]] | None:
    """Return the nanoseconds in which each thread ran and waited; ``None`` if the system does not count them."""
    try:
        threads = list(_TASKS.iterdir())
    except OSError:
        return None
    found = {}
    for thread in threads:
        try:
            ran, waited, _ = (thread / "schedstat").read_text().split()
        except FileNotFoundError:
            # The thread has ended, or the system does not count.
            continue
        except (OSError, ValueError):
            return None
        found[thread.name] = (int(ran), int(waited))
    return found or None


def _stolen() -> tuple[int, int]:
    """Return the ticks in which the processors were busy, and in which the hypervisor took them; 0 if unknown."""
    try:
        ticks = [int(tick) for tick in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    if len(ticks) < 8:
        return 0, 0
    user, nice, system, _, _, irq, soft, steal = ticks
    return user + nice + system + irq + soft + steal, steal

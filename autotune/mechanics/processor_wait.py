"""How long this process waited for a processor that other programs had, as Linux counts it."""

from __future__ import annotations

import contextlib
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
_MOST_THREADS = 32
# Repetitions in succession that were disturbed too, after which no more are made.
_VAIN = 3
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class ProcessorWait:
    """A watch that begins when it is created.

    A thread waits if it could run and other threads have all processors. What this process and its children (a loader's
    workers, say) take from each other does not count: waiting is bounded by the share of all processors that others
    used. What a hypervisor takes for other machines counts as used by others.
    Source: schedstat, stat and children of proc(5).
    """

    def __init__(self) -> None:
        self._began_ns = time.perf_counter_ns()
        self._began = _threads()
        self._began_used, self._began_own = _used_s(), _own_s()

    def frac(self) -> float | None:
        """Return the share of the time since the beginning, from 0 to 1, that threads waited in; ``None`` if unknown.

        The time is the sum over the threads of the seconds in which they ran or could have run, but at least the time
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
        passed = max(time.perf_counter_ns() - self._began_ns, 1)
        share = waited / max(ran + waited, passed)
        used = _used_s()
        if used is None or self._began_used is None:
            return share
        others = (used - self._began_used) - (_own_s() - self._began_own)
        return min(share, max(others, 0.0) / (passed * 1e-9 * (os.cpu_count() or 1)))


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
    """Return whether a share of waiting makes a measurement's times doubtful."""
    return frac is not None and frac > busy_frac()


class Repetitions:
    """Decides whether disturbed measurements are repeated.

    Where a machine stays busy, repeating every measurement would double the time for nothing: after three repetitions
    in succession that were disturbed too, no more are made until a measurement is undisturbed.
    """

    def __init__(self) -> None:
        self._vain = 0

    def is_due(self, frac: float | None) -> bool:
        """Return whether a measurement is to be repeated.

        Args:
            frac: the share of the time that it waited.
        """
        if is_disturbed(frac):
            return self._vain < _VAIN
        self._vain = 0
        return False

    def made(self, frac: float | None) -> None:
        """Note a repetition that was made.

        Args:
            frac: the share of the time that it waited.
        """
        self._vain = self._vain + 1 if is_disturbed(frac) else 0


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
    """Return the nanoseconds in which threads ran and waited; ``None`` if the system does not count them.

    The oldest threads are enough, which are the main thread and those that compute with it.
    """
    main = os.getpid()
    try:
        names = os.listdir(_TASKS)  # noqa: PTH208 - a path for each would cost more
        # After the highest number, the system begins again at low ones.
        names = sorted(names, key=lambda name: (int(name) < main, int(name)))[:_MOST_THREADS]
    except (OSError, ValueError):
        return None
    found = {}
    for name in names:
        try:
            ran, waited, _ = (int(number) for number in Path(_TASKS, name, "schedstat").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            # The thread has ended, or the system does not count.
            continue
        except (OSError, ValueError):
            return None
        found[name] = (ran, waited)
    return found or None


def _used_s() -> float | None:
    """Return the seconds for which all processors were used, by this machine or its hypervisor; ``None`` if unknown."""
    try:
        ticks = [int(tick) for tick in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    if len(ticks) < 8:
        return None
    user, nice, system, _, _, irq, soft, steal = ticks
    return (user + nice + system + irq + soft + steal) / _TICKS_PER_S


def _own_s() -> float:
    """Return the seconds of processor time of this process and its children, those of the main thread."""
    spent = os.times()
    total = spent.user + spent.system + spent.children_user + spent.children_system
    with contextlib.suppress(OSError):
        children = Path(_TASKS, str(os.getpid()), "children").read_text().split()
        total += sum(_spent_s(child) for child in children[:_MOST_THREADS])
    return total


def _spent_s(process: str) -> float:
    """Return the seconds of processor time of a process and its ended children; 0 if it has ended."""
    try:
        # The name in brackets may contain spaces.
        fields = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()
        return sum(int(tick) for tick in fields[11:15]) / _TICKS_PER_S
    except (OSError, ValueError):
        return 0.0

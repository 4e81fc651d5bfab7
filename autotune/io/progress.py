"""Progress reports of commands."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Receiver of progress reports: the command line draws bars, a library user needs none."""

    def stage(self, title: str, total: float) -> None:
        """Begin a stage with a total amount of work."""
        ...

    def advance(self, done: float, detail: str = "") -> None:
        """Report the amount of work that is done in the stage."""
        ...


class Silent:
    """Receiver that ignores progress reports."""

    def stage(self, title: str, total: float) -> None:
        """Do nothing."""

    def advance(self, done: float, detail: str = "") -> None:
        """Do nothing."""


class Numbered:
    """Receiver that numbers the stages of a command, as in ``stage 2 of 5``, for another receiver.

    Args:
        reporter: the other receiver.
        count: number of stages that the command announces.
    """

    def __init__(self, reporter: Reporter, count: int) -> None:
        self._reporter, self._count, self._begun = reporter, count, 0

    def stage(self, title: str, total: float) -> None:
        """Begin the next stage."""
        self._begun += 1
        self._reporter.stage(f"stage {self._begun} of {self._count}: {title}", total)

    def advance(self, done: float, detail: str = "") -> None:
        """Report the amount of work that is done in the stage."""
        self._reporter.advance(done, detail)

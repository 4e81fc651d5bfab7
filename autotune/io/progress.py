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

"""State how long work is followed: the command line draws bars, a library user may pass nothing."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Show how far a command is. The command line draws bars; a library user may pass nothing."""

    def stage(self, title: str, total: float) -> None:
        """Begin a stage of so much work."""
        ...

    def advance(self, done: float, detail: str = "") -> None:
        """Report how much of the stage is done."""
        ...


class Silent:
    """Show nothing."""

    def stage(self, title: str, total: float) -> None:
        """Do nothing."""

    def advance(self, done: float, detail: str = "") -> None:
        """Do nothing."""

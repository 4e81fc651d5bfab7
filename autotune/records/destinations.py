"""Experiment trackers to which the records of a run directory are sent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.report_to import Name


class LeftOutError(Exception):
    """A record that must not be sent."""


class Destination:
    """An experiment tracker, as the sender of records needs it; this one takes nothing: records stay in the spool.

    Every method may raise; the sender then keeps this record and all later ones. Times are POSIX milliseconds, ``None``
    for now. A run is named by the id that ``begin`` returned, also in later processes.

    Attributes:
        address: where the records go, for messages.
    """

    address = "none"

    def connect(self) -> None:
        """Import the tracker's library, and open or create what holds the runs."""

    def begin(self, name: str, parent: str | None, at_ms: int | None, key: str) -> str:
        """Begin a run, nested in its parent if it has one, and return its id.

        Args:
            name: name of the run.
            parent: the parent's id.
            at_ms: when it began.
            key: hexadecimal digits that no other run has. A process that was killed may have begun this run already.
        """
        return name

    def params(self, run: str, values: Mapping[str, str]) -> None:
        """Log parameters."""

    def tags(self, run: str, values: Mapping[str, str]) -> None:
        """Log tags."""

    def metrics(self, run: str, values: Mapping[str, float], step: int, at_ms: int | None) -> None:
        """Log metrics of one step."""

    def artifact(self, run: str, path: Path) -> None:
        """Log a file or folder; raise :class:`LeftOutError` if it must not be sent."""

    def end(self, run: str, status: str, at_ms: int | None) -> None:
        """End a run with ``FINISHED``, ``FAILED`` or ``KILLED``."""

    def flush(self) -> None:
        """Write what is buffered; more records may follow."""

    def refuses(self, error: Exception) -> bool:
        """Return whether the tracker works, but will never accept the record that raised this error."""
        return False


def destination(report_to: Name, runs: Path, folder: Path) -> Destination:
    """Return a tracker; nothing is imported or connected yet.

    Args:
        report_to: its name, as :func:`autotune.report_to.chosen` returns it.
        runs: the runs folder, in which trackers without a server keep their files.
        folder: the run directory whose records are sent.
    """
    if report_to == "tensorboard":
        from autotune.records.to_tensorboard import ToTensorBoard

        return ToTensorBoard(runs, folder)
    if report_to == "wandb":
        from autotune.records.to_wandb import ToWandb

        return ToWandb(runs, folder)
    if report_to == "none":
        return Destination()
    from autotune.records.to_mlflow import ToMLflow

    return ToMLflow(runs)

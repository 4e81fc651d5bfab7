"""Records as TensorBoard's event files, one folder per run in ``tensorboard/`` of the runs folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import InputError, one_line
from autotune.io.files import inside
from autotune.records.destinations import Destination, LeftOutError

FOLDER = "tensorboard"
# Characters of a folder's name.
_LONGEST = 100


@dataclass(slots=True)
class _Open:
    """A run being written, and what its row in the table of hyperparameters shows."""

    writer: Any
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class ToTensorBoard(Destination):
    """TensorBoard. Files are not logged: they remain in the run directory."""

    def __init__(self, runs: Path, folder: Path) -> None:
        self.address = str(runs / FOLDER)
        self._root = runs / FOLDER
        self._folder = folder
        self._open: dict[str, _Open] = {}

    def connect(self) -> None:
        """Import the library, and open or create what holds the runs."""
        if self._root.is_symlink():
            raise InputError("is a link", where=self.address, allowed="a folder")
        self._root.mkdir(parents=True, exist_ok=True)
        import tensorboard  # noqa: F401 - fails now, before anything is written

    def begin(self, name: str, parent: str | None, at_ms: int | None, key: str) -> str:
        """Begin a run and return its id."""
        own = re.sub(r"[^A-Za-z0-9_=-]+", "-", name)[:_LONGEST]
        base = self._folder.name if parent is None else f"{self._folder.name}/{own}"
        run, number = base, 2
        while parent is not None and (self._root / run).exists():
            run, number = f"{base}-{number}", number + 1
        self._of(run).writer.add_text("name", name, walltime=_seconds(at_ms))
        return run

    def params(self, run: str, values: Mapping[str, str]) -> None:
        """Log parameters as texts, and keep them until the run ends: a row of hyperparameters needs its metrics."""
        self.tags(run, values)
        self._of(run).params.update(values)

    def tags(self, run: str, values: Mapping[str, str]) -> None:
        """Log tags as texts."""
        for name, value in values.items():
            self._of(run).writer.add_text(name, value)

    def metrics(self, run: str, values: Mapping[str, float], step: int, at_ms: int | None) -> None:
        """Log metrics of one step."""
        found = self._of(run)
        for name, value in values.items():
            found.metrics[name] = float(value)
            found.writer.add_scalar(name, float(value), step, walltime=_seconds(at_ms))

    def end(self, run: str, status: str, at_ms: int | None) -> None:
        """End a run."""
        found = self._of(run)
        found.writer.add_text("status", status, walltime=_seconds(at_ms))
        if found.params:
            from torch.utils.tensorboard.summary import hparams

            # Not add_hparams(), which would log each metric once more, at step 0.
            for summary in hparams(found.params, found.metrics):
                found.writer.file_writer.add_summary(summary)
        found.writer.close()
        del self._open[run]

    def flush(self) -> None:
        """Write what is buffered."""
        for found in self._open.values():
            found.writer.flush()

    def _of(self, run: str) -> _Open:
        from torch.utils.tensorboard import SummaryWriter

        if run not in self._open:
            try:
                folder = inside(self._root, run)
            except InputError as error:
                raise LeftOutError(one_line(error)) from error
            if folder.is_symlink() or folder.parent.is_symlink():
                raise LeftOutError(f"{folder}: a link leads elsewhere")
            self._open[run] = _Open(SummaryWriter(str(folder)))
        return self._open[run]


def _seconds(at_ms: int | None) -> float | None:
    return None if at_ms is None else at_ms / 1e3

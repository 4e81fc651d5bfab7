"""Records as runs of Weights & Biases, grouped by command."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from autotune.records.destinations import Destination

PROJECT = "autotune"
# Modes in which wandb needs no key.
_WITHOUT_KEY = ("offline", "dryrun", "disabled")
_REMEDY = "a key, by `wandb login`; or WANDB_MODE=offline"


class ToWandb(Destination):
    """Weights & Biases, as ``WANDB_MODE`` says.

    Without that variable and without a key, runs are written to ``wandb/`` in the runs folder, and ``wandb sync`` sends
    them. What wandb's own process has not yet written when the command is killed is lost for it; it stays in
    ``tracking.jsonl``.
    """

    address = "wandb"

    def __init__(self, runs: Path, folder: Path) -> None:
        self._runs = runs
        self._folder = folder
        self._mode: Any = None
        self._open: dict[str, Any] = {}

    def connect(self) -> None:
        """Import the library, and open or create what holds the runs."""
        import wandb

        if (self._runs / "wandb").is_symlink():
            raise InputError("is a link", where=str(self._runs / "wandb"), allowed="a folder")
        self._mode = os.environ.get("WANDB_MODE")
        if self._mode not in _WITHOUT_KEY and not wandb.login(prompt=False, verify=False):
            # Otherwise wandb would ask for a key at the terminal.
            if self._mode is not None:
                raise InputError(f"WANDB_MODE is {self._mode!r} without a key", where="wandb", allowed=_REMEDY)
            self._mode = "offline"

    def begin(self, name: str, parent: str | None, at_ms: int | None, key: str) -> str:
        """Begin a run and return its id."""
        # An id of its own, since the environment may name the user's run, and the same one when it is begun again.
        began = {} if at_ms is None else {"x_start_time": at_ms / 1e3}
        self._open[key] = self._init(began, id=key, name=name, job_type="command" if parent is None else "run")
        return key

    def params(self, run: str, values: Mapping[str, str]) -> None:
        """Log parameters."""
        self._of(run).config.update(dict(values), allow_val_change=True)

    def tags(self, run: str, values: Mapping[str, str]) -> None:
        """Log tags as values of the summary."""
        self._of(run).summary.update(dict(values))

    def metrics(self, run: str, values: Mapping[str, float], step: int, at_ms: int | None) -> None:
        """Log metrics of one step."""
        times = {} if at_ms is None else {"_timestamp": at_ms / 1e3}
        self._of(run).log({**values, "step": step, **times})

    def artifact(self, run: str, path: Path) -> None:
        """Log a file or folder."""
        import wandb

        logged = wandb.Artifact(re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{self._folder.name}-{path.name}"), type="autotune")
        for file in [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file()):
            logged.add_file(str(file), name=str(file.relative_to(path.parent)))
        self._of(run).log_artifact(logged)

    def end(self, run: str, status: str, at_ms: int | None) -> None:
        """End a run."""
        if at_ms is not None:
            self._of(run).summary["ended"] = datetime.fromtimestamp(at_ms / 1e3, UTC).isoformat()
        self._of(run).finish(exit_code=int(status != "FINISHED"))
        del self._open[run]

    def _of(self, run: str) -> Any:
        if run not in self._open:
            # Another process began it.
            self._open[run] = self._init({}, id=run)
        return self._open[run]

    def _init(self, also: Mapping[str, Any], **about: Any) -> Any:
        import wandb

        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, **also)
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=self._folder.name,
            dir=str(self._runs),
            mode=self._mode,
            reinit="create_new",
            resume="allow",
            settings=settings,
            **about,
        )
        # Metrics of a run may arrive in any order of their steps.
        run.define_metric("*", step_metric="step")
        return run

"""Hold what the frameworks' callbacks have in common: how they attach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from autotune.errors import AttachError
from autotune.live.attach import attach
from autotune.live.attached import Budget
from autotune.live.limits import Limits, Mode
from autotune.live.tuner import LiveTuner

WHERE = "AutotuneCallback"


class Attaches:
    """Attach to the run of a framework's trainer, which fixes k when training begins, or the precision as well.

    Attributes:
        tuner: of the training that runs, or of the last one; ``None`` before the first.

    Args:
        policy: as :func:`autotune.attach` takes it.
        mode: as :func:`autotune.attach` takes it, of those that the framework leaves.
        stage: ``observe`` changes nothing and scores its own advice; ``act`` switches.
        memory_budget_bytes: as :func:`autotune.attach` takes it.
        limits: how far the tuner may go; ``statistics_every`` is not used.
        runs_dir: where a run directory with the decision log is made; ``None`` writes nothing.
        show: as :func:`autotune.attach` takes it; the first process of several shows.
        mlflow: as :func:`autotune.attach` takes it.

    Raises:
        AttachError: for another mode; and, when training begins, naming what cannot be attached to and the remedy.
    """

    framework: ClassVar[str]
    modes: ClassVar[tuple[Mode, ...]] = (Mode.EXACT,)
    # What the framework does not leave to a callback, and the k that plans may choose from.
    fixed: ClassVar[str] = "k and the precision"
    accumulation_choices: ClassVar[tuple[int, ...]] = (1,)

    def __init__(
        self,
        policy: object = "ppo",
        *,
        mode: str = "exact",
        stage: str = "act",
        memory_budget_bytes: Budget = None,
        limits: Limits | None = None,
        runs_dir: str | Path | None = "runs",
        show: bool = False,
        mlflow: bool = False,
    ) -> None:
        if mode not in self.modes:
            raise AttachError(
                f"mode is {mode!r}, but {self.framework} fixes {self.fixed} when training begins",
                where=WHERE,
                allowed=f"{', '.join(self.modes)}; another mode in a loop of your own, by autotune.attach()",
            )
        self._mode = mode
        self._policy = policy
        self._stage = stage
        self._budget = memory_budget_bytes
        self._limits = limits
        self._runs_dir = runs_dir
        self._show, self._mlflow = show, mlflow
        self.tuner: LiveTuner | None = None

    def _attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        total_steps: int | None,
        accumulation_steps: int,
        is_first: bool,
    ) -> LiveTuner:
        """Return a tuner of the run that begins; the first process of several writes its log."""
        limits = self._limits
        if limits is None or isinstance(limits, Limits):
            # A framework shows its gradients clipped, if at all.
            limits = replace(limits or Limits(), statistics_every=None)
        return attach(
            model,
            optimizer,
            self._policy,
            mode=self._mode,
            stage=self._stage,
            memory_budget_bytes=self._budget,
            total_steps=total_steps,
            accumulation_steps=accumulation_steps,
            accumulation_choices=self.accumulation_choices,
            limits=limits,
            runs_dir=self._runs_dir if is_first else None,
            show=self._show and is_first,
            mlflow=self._mlflow and is_first,
        )

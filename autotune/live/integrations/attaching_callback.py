"""The common base of the frameworks' callbacks: it attaches a tuner to a training."""

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
from autotune.live.settings import Settings, settings_of, without_settings
from autotune.live.tuner import LiveTuner

WHERE = "AutotuneCallback"


class Attaches:
    """Attach to the run of a framework's trainer, which fixes k when training begins, or the precision as well.

    Attributes:
        tuner: the tuner of the present or last training; ``None`` before the first.

    Args:
        policy: as :func:`autotune.attach` takes it.
        mode: as :func:`autotune.attach` takes it, of those that the framework leaves.
        stage: ``observe`` changes nothing and scores its own advice; ``act`` switches.
        memory_budget_bytes: as :func:`autotune.attach` takes it.
        limits: how far the tuner may go; ``statistics_every`` is not used.
        runs_dir: where a run directory with the decision log is made; ``None`` writes nothing.
        settings: as :func:`autotune.attach` takes them; batching is fixed, and so is k where the framework fixes it.

    Raises:
        AttachError: for another mode or such a setting; and, when training begins, naming what cannot be attached to
            and the remedy.
    """

    framework: ClassVar[str]
    modes: ClassVar[tuple[Mode, ...]] = (Mode.EXACT,)
    # What the framework does not leave to a callback, and whether k is left to it.
    fixed: ClassVar[str] = "k and the precision"
    tunes_k: ClassVar[bool] = False

    @without_settings
    def __init__(
        self,
        policy: object = "ppo",
        *,
        mode: str = "exact",
        stage: str = "act",
        memory_budget_bytes: Budget = None,
        limits: Limits | None = None,
        runs_dir: str | Path | None = "runs",
        settings: Settings | None = None,
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
        self._settings = self._settings_of(settings)
        self.tuner: LiveTuner | None = None

    def _settings_of(self, settings: object) -> Settings:
        """Return the settings that were given, as far as they are left to a callback."""
        found = settings_of(settings)
        if found.batching != "fixed":
            problem = f"batching is adaptive, but {self.framework} fixes what a step consumes"
            raise AttachError(problem, where=WHERE, allowed="fixed")
        if self.tunes_k:
            return found
        if found.accumulation_choices not in (Settings().accumulation_choices, (1,)):
            problem = f"accumulation_choices is {found.accumulation_choices}, but {self.framework} fixes k"
            raise AttachError(problem, where=WHERE, allowed="(1,)")
        return replace(found, accumulation_choices=(1,))

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
            limits=limits,
            runs_dir=self._runs_dir if is_first else None,
            settings=replace(self._settings, mlflow=self._settings.mlflow and is_first),
        )

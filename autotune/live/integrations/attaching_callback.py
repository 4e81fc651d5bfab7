"""The base class of the callbacks for frameworks, which attaches a tuner to a training run."""

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
    """Base of callbacks that attach a tuner to the run of a framework's trainer.

    Attributes:
        tuner: the tuner of the current or last training run; ``None`` before the first.

    Args:
        policy: as for :func:`autotune.attach`.
        mode: as for :func:`autotune.attach`, if the framework supports it.
        stage: ``observe`` only measures and logs decisions; ``act`` switches plans.
        memory_budget_bytes: as for :func:`autotune.attach`.
        limits: limits on what the tuner may do; ``statistics_every`` is not used.
        runs_dir: folder for the run directory with the decision log; ``None`` writes nothing.
        settings: as for :func:`autotune.attach`, but without adaptive batching, and without choices of k if the
            framework fixes k.

    Raises:
        AttachError: if a mode or setting is not supported, or when training begins, if the run cannot be attached to.
    """

    framework: ClassVar[str]
    modes: ClassVar[tuple[Mode, ...]] = (Mode.EXACT,)
    # What the framework fixes when training begins, and whether the callback may tune k.
    fixed: ClassVar[str] = "k and the precision"
    tunes_k: ClassVar[bool] = False

    @without_settings
    def __init__(
        self,
        policy: object = "planner",
        *,
        mode: str = "exact",
        stage: str = "act",
        memory_budget_bytes: Budget = None,
        limits: Limits | None = None,
        runs_dir: str | Path | None = "runs",
        settings: Settings | None = None,
    ) -> None:
        if mode not in list(Mode):
            raise AttachError(f"mode is {mode!r:.80}", where=WHERE, allowed=", ".join(self.modes))
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
        """Return the given settings; refuse those that the framework does not support."""
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
        """Attach a tuner to the run that begins; of several processes, only the first writes a log."""
        limits = self._limits
        if limits is None or isinstance(limits, Limits):
            # A framework shows gradients only after clipping, if at all.
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
            settings=self._settings if is_first else replace(self._settings, report_to="none"),
        )

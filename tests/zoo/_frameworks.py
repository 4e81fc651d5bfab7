"""Attach to loops that a framework runs, replay plans in them, and keep the status of their tuners before detaching."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo import Alone, Run


class Ended:
    """A tuner that its framework has detached, with its last status."""

    def __init__(self, tuner: Any) -> None:
        self.status, self.locks = dict(tuner.status), dict(tuner.locks)

    def detach(self) -> None:
        """Do nothing."""


class Watch:
    """Counterpart of ``Alone`` and ``Recorded`` for steps that a framework delimits.

    Args:
        run: the run.
        attached: the package's callback; ``None`` for an unattached run.
    """

    def __init__(self, run: Run, attached: Any = None) -> None:
        self._run, self._attached = run, attached
        self._alone: Alone | None = None

    def begin_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Begin a step; call this after the package's callback."""
        if self._attached is not None:
            self._run.used.append(self._attached.tuner.plan)
        elif self._run.plans is not None:
            self._alone = self._alone or Alone(self._run, model, optimizer)
            self._alone.begin_step(batch)

    def end_step(self) -> None:
        """End a step."""
        if self._alone is not None:
            self._alone.end_step()

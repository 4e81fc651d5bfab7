"""Attach to loops that a framework runs, replay plans in them, and hold what their tuners said before they detached."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo import Alone, Run


class Ended:
    """A tuner that its framework has detached, with what it said just before."""

    def __init__(self, tuner: Any) -> None:
        self.status, self.locks = dict(tuner.status), dict(tuner.locks)

    def detach(self) -> None:
        """Do nothing."""


class Watch:
    """Do at the bounds of a framework's steps what ``Alone`` and ``Recorded`` do in loops of one's own.

    Args:
        run: the run.
        attached: the package's callback; ``None`` for a run alone.
    """

    def __init__(self, run: Run, attached: Any = None) -> None:
        self._run, self._attached = run, attached
        self._alone: Alone | None = None

    def begin_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Begin a step; call it after the package's callback did."""
        if self._attached is not None:
            self._run.used.append(self._attached.tuner.plan)
        elif self._run.plans is not None:
            self._alone = self._alone or Alone(self._run, model, optimizer)
            self._alone.begin_step(batch)

    def end_step(self) -> None:
        """End a step."""
        if self._alone is not None:
            self._alone.end_step()

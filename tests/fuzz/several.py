"""The jobs that the specimens were recorded with, and versions of them that stop where training would begin."""

from __future__ import annotations

from typing import Any

import tiny_job
import torch

from autotune import Job


class Trained(BaseException):
    """Raised when training would begin."""


def tiny() -> Job:
    """Return the job that most specimens were recorded with."""
    return tiny_job.make(evaluate_every=4, target=4.2, max_steps=24)


def narrow() -> Job:
    """Return the same job under another name."""
    return tiny_job.make(name="narrow", evaluate_every=4, target=4.3, max_steps=24)


class _Still(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        raise Trained


def untrained(**changes: Any) -> Job:
    """Return the recorded job, cut off where its first step would end."""
    arguments = {"evaluate_every": 4, "target": 4.2, "max_steps": 24, "optimizer": _Still, **changes}
    return tiny_job.make(**arguments)


def untrained_tiny() -> Job:
    """Return :func:`tiny`, cut off."""
    return untrained()


def untrained_narrow() -> Job:
    """Return :func:`narrow`, cut off."""
    return untrained(name="narrow", target=4.3)

"""Dynamic loss scaling as a state machine: the reference for torch's own scaler."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The loss scale and the number of good steps since it changed.

    Attributes:
        scale: s of eqs. 15-16.
        good_steps: steps without overflow since the scale last changed.
        growth_interval: good steps after which the scale doubles.

    Source: eqs. 15-16 of the paper; Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2.
    """

    scale: float = 65536.0
    good_steps: int = 0
    growth_interval: int = 2000

    def after(self, *, overflow: bool) -> LossScale:
        """Return the state after a step: halved on overflow, doubled after enough good steps."""
        if overflow:
            return replace(self, scale=self.scale * 0.5, good_steps=0)
        if self.good_steps + 1 == self.growth_interval:
            return replace(self, scale=self.scale * 2.0, good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)


def master_update(master: float, gradient: float, learning_rate: float) -> float:
    """Return one fp32 master weight after a step on a 16-bit gradient.

    Source: eq. 13 of the paper; eq. 14, the 16-bit copy, is what autocast makes at each use.
    """
    return master - learning_rate * gradient

"""What the probes of a live run's first steps have found about its units."""

from __future__ import annotations

import torch

from autotune.live.step_uses import Probing

# Steps in a row without a call of a further unit after which uncalled units are locked: chance may leave out units.
_STEPS = 4
_UNCALLED = "it was not called in the first steps, or not as a module (is the whole model compiled, or a copy trained?)"
_UNTRAINED = "it was only called without gradients, and keeps nothing"


class ProbeResults:
    """The results of probes.

    Attributes:
        hooks: Number of hooks that a unit's parts had when it was probed, by unit.
        seconds: Seconds that probes added to forward passes.
        autocast: The dtype of the user's own autocast; ``None`` for none.
        uncalled: The units that no step has called yet.
        left_out: The units that a first step has not called.
    """

    def __init__(self) -> None:
        self.hooks: dict[str, int] = {}
        self.seconds = 0.0
        self.autocast: torch.dtype | None = None
        self.uncalled: list[str] = []
        self.left_out: set[str] = set()
        self._steps = 0
        self._untrained: set[str] = set()

    def read(self, use: Probing) -> dict[str, str]:
        """Read the probes of a step.

        Args:
            use: The step.

        Returns:
            The reasons against the recomputation of units, by unit.
        """
        self.uncalled = []
        locks = {}
        for name, probe in use.probes.items():
            self.seconds += probe.spent_s
            if probe.calls:
                self.hooks[name] = probe.hooks
            self.autocast = self.autocast or probe.autocast
            if probe.reason is not None:
                locks[name] = probe.reason
            elif probe.calls == 0:
                self.uncalled.append(name)
                self._untrained |= {name} if probe.runs_untrained else set()
        self.left_out.update(self.uncalled)
        self._steps = self._steps + 1 if len(self.uncalled) == len(use.probes) else 1
        if self._steps == _STEPS:
            locks |= {name: _UNTRAINED if name in self._untrained else _UNCALLED for name in self.uncalled}
            self.uncalled = []
        return locks

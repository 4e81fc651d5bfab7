"""The tuner's own share of a run's time."""

from __future__ import annotations

# One-off costs are spread over at least this many steps.
_SPREAD_OVER = 1000
# The share is checked after this many steps, when profiling is over.
_JUDGED_AFTER = 200


class OwnTime:
    """Counter of the tuner's own seconds and those of the run.

    Attributes:
        run_s: Seconds of the run's steps.
        learns: Whether the seconds counted now are one-off costs of the profile.

    Args:
        total_steps: Length of the run in optimizer steps; ``None`` if it is not known.
    """

    def __init__(self, total_steps: int | None) -> None:
        self._total_steps = total_steps or 0
        self.run_s = 0.0
        self.learns = True
        self._own_s = 0.0
        self._once_s = 0.0
        # One-off costs when the share is first checked; leaving the run would not win them back.
        self._sunk_s: float | None = None

    def spend(self, seconds: float) -> None:
        """Add seconds that the tuner took."""
        if self.learns:
            self._once_s += seconds
        else:
            self._own_s += seconds

    def frac(self, steps: int, probe_s: float) -> float:
        """Return the tuner's share of the run's time, with one-off costs spread over at least 1,000 steps.

        Args:
            steps: Number of steps so far.
            probe_s: Seconds of the run's steps that probes took, which count as the tuner's.
        """
        return self._frac(steps, probe_s, 0.0)

    def is_too_expensive(self, steps: int, probe_s: float, limit_frac: float) -> bool:
        """Return whether the tuner takes more of the run's time than the limit, the first profile apart.

        That one is over when this is first judged, so that leaving the run would not win its cost back.
        """
        if steps < _JUDGED_AFTER:
            return False
        if self._sunk_s is None:
            self._sunk_s = self._once_s + probe_s
        return self._frac(steps, probe_s, self._sunk_s) > limit_frac

    def _frac(self, steps: int, probe_s: float, sunk_s: float) -> float:
        if not self.run_s:
            return 0.0
        spread = max(steps, _SPREAD_OVER, self._total_steps)
        once_s, run_s = self._once_s + probe_s, self.run_s - probe_s
        return self._own_s / run_s + (once_s - sunk_s) / (run_s / steps * spread)

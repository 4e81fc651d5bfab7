"""Rules that every proposal must pass; they lie outside the policy, so that no policy can override them.

This module only judges: it applies no plan and does not import torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.cost_model.solver import samples_of_progress
from autotune.errors import PlanError
from autotune.live.limits import Limits
from autotune.live.placement import Placements
from autotune.plan import Plan, PlanSpace, Storage

# Each pause is this many times as long as the last one.
_LONGER = 2
# Steps of a check, half of them under the baseline.
_CHECKED_STEPS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict on a proposal.

    Attributes:
        plan: the plan to run; the current one if the proposal was refused.
        rules: result of each rule that was checked: ``ok``, ``repaired`` or the reason for a refusal.
        illegal: whether the proposal can only come from a broken policy.
    """

    plan: Plan
    rules: Mapping[str, str]
    illegal: bool = False

    @property
    def refused(self) -> str | None:
        """Return the rule that refused the proposal; ``None`` if it was accepted."""
        return next((name for name, said in self.rules.items() if said not in ("ok", "repaired")), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Input of the rules.

    Attributes:
        space: the plans that the mode allows.
        locks: reasons for locks, by unit or choice.
        placements: plans with predicted peaks.
        usable_bytes: bytes that plans may use now, after the safety margin; infinite without a budget.
        length: size of the largest recent batch relative to the profiled batch.
        current: the plan that was decided on last.
        since_switch: optimizer steps since the last switch.
        switches: number of switches so far.
        noise_scale: noise scale of the gradient, in samples; ``None`` while unknown.
    """

    space: PlanSpace
    locks: Mapping[str, str]
    placements: Placements
    usable_bytes: float
    length: float
    current: Plan
    since_switch: int
    switches: int
    noise_scale: float | None = None


def judge(proposal: object, now: Situation, limits: Limits) -> Verdict:
    """Judge a policy's proposal, which may be any object."""
    rules: dict[str, str] = {}
    if not isinstance(proposal, Plan):
        return _refused(now, rules, "plan", f"expected a Plan, got {type(proposal).__name__}", illegal=True)
    # Memory ran out for smaller values of k.
    smallest = now.space.accumulation_choices[0]
    is_below = 0 < proposal.accumulation_steps < smallest
    if is_below:
        proposal = proposal.changed(accumulation_steps=smallest)
    try:
        plan = now.space.check(proposal)
    except PlanError as error:
        return _refused(now, rules, "space", str(error), illegal=True)
    rules["space"] = "ok"
    kept = [name for name in now.locks if plan.storage_of(name) is not Storage.SAVE]
    if kept:
        plan = plan.storing(kept, Storage.SAVE)
    rules["locks"] = "repaired" if kept or is_below else "ok"
    known = now.placements.with_known_storages(plan)
    rules["predictable"] = "ok" if known == plan else "repaired"
    plan, peak = known, now.placements.peak_bytes(known, now.length)
    if peak == float("inf"):
        # For a batch that is much larger than the profiled one, no plan's peak is predicted.
        illegal = now.placements.reaches(now.length)
        return _refused(now, rules, "predictable", "its peak cannot be predicted", illegal=illegal)
    rules["budget"] = "ok"
    if peak > now.usable_bytes:
        fitting = _fitting(plan, now)
        if fitting is None:
            return _refused(now, rules, "budget", f"needs {peak:.0f} bytes of {now.usable_bytes:.0f}")
        plan, rules["budget"] = fitting, "repaired"
    if plan == now.current or now.placements.peak_bytes(now.current, now.length) > now.usable_bytes:
        # Nothing changes, or the running plan does not fit and must be left at once.
        return Verdict(plan=plan, rules=rules)
    return _worth_it(plan, now, limits, rules)


def _worth_it(plan: Plan, now: Situation, limits: Limits, rules: dict[str, str]) -> Verdict:
    """Judge whether switching to an allowed plan is worthwhile now."""
    wait = max(limits.min_steps_between_switches, limits.canary_steps if now.switches == 1 else 0)
    if now.since_switch < wait:
        return _refused(now, rules, "interval", f"{now.since_switch} steps since the last switch, of {wait}")
    rules["interval"] = "ok"
    gain = gain_of(plan, now.current, now.placements, now.noise_scale)
    if gain < limits.gain_frac:
        return _refused(now, rules, "gain", f"{gain:.1%} of the step, of {limits.gain_frac:.1%}")
    rules["gain"] = "ok"
    return Verdict(plan=plan, rules=rules)


def _refused(now: Situation, rules: Mapping[str, str], rule: str, reason: str, *, illegal: bool = False) -> Verdict:
    return Verdict(plan=now.current, rules={**rules, rule: reason}, illegal=illegal)


def gain_of(plan: Plan, current: Plan, placements: Placements, noise_scale: float | None = None) -> float:
    """Return the predicted time saved for the same progress, as a share of the current plan's time.

    Args:
        plan: the other plan.
        current: the running plan.
        placements: plans with predicted times.
        noise_scale: noise scale of the gradient in samples, which determines the progress of steps of several batches;
            ``None`` while unknown.
    """

    def cost(one: Plan) -> float:
        worth = samples_of_progress(placements.profile, one.accumulation_steps, noise_scale)
        return placements.seconds_of(one) / worth

    return 1 - cost(plan) / cost(current)


def fallback(baseline: Plan, placements: Placements | None, usable_bytes: float, length: float) -> Plan:
    """Return the plan to run when no policy is trusted: the baseline, or if it does not fit, one that does."""
    if placements is None or placements.peak_bytes(baseline, length) <= usable_bytes:
        return baseline
    rows = placements.group(baseline)
    fitting = None if rows is None else placements.fastest(usable_bytes, length, rows)
    return fitting or placements.leanest()


def _fitting(plan: Plan, now: Situation) -> Plan | None:
    rows = now.placements.group(plan)
    return None if rows is None else now.placements.fastest(now.usable_bytes, now.length, rows)


@dataclass(slots=True)
class Breaker:
    """Circuit breaker: each trip pauses acting for longer than the last, and too many end it for good.

    Attributes:
        limits: the limits of the run.
        trips: steps and reasons of the trips so far.
        paused_until: step until which no plan is switched.
        open: whether acting has ended for good.
    """

    limits: Limits
    trips: list[tuple[int, str]]
    paused_until: int = 0
    open: bool = False

    @classmethod
    def closed(cls, limits: Limits) -> Breaker:
        """Return a breaker that has not tripped."""
        return cls(limits, [])

    def trip(self, step: int, reason: str) -> None:
        """Record a trip."""
        self.trips.append((step, reason))
        self.paused_until = step + self.limits.pause_steps * _LONGER ** (len(self.trips) - 1)
        self.open = len(self.trips) >= self.limits.max_trips

    def allows(self, step: int) -> bool:
        """Return whether acting is allowed at a step."""
        return not self.open and step >= self.paused_until


class SlowdownCheck:
    """Comparison of the current plan with the baseline, by alternating steps of both.

    On a shared machine any plan can be slow for a while. So slow windows only start the check, and the alternating
    steps decide.

    Attributes:
        runs_baseline: whether the next step runs under the baseline.
    """

    def __init__(self) -> None:
        self.runs_baseline = False
        self._slow = 0
        self._own: list[float] = []
        self._baseline: list[float] = []
        self._left = 0

    def begin_if_slow(self, ratio: float | None, limits: Limits, *, possible: bool) -> None:
        """Begin a check after two slow windows.

        Args:
            ratio: ratio of measured to predicted step times in a window; ``None`` if unknown.
            limits: the limits of the run.
            possible: whether the run can go back to the baseline.
        """
        if ratio is None or self._left:
            return
        self._slow = self._slow + 1 if ratio > 1 + limits.slowdown_frac else 0
        if self._slow >= 2 and possible:
            self._slow, self._left = 0, _CHECKED_STEPS
            self._own, self._baseline = [], []

    def note(self, seconds: float) -> None:
        """Record a step's seconds per byte of its batches, and choose the plan of the next step."""
        if not self._left:
            return
        (self._baseline if self.runs_baseline else self._own).append(seconds)
        self._left -= 1
        # The order A B B A cancels a drift of the machine's speed. The first step of each pair is a warm-up.
        self.runs_baseline = self._left > 0 and (self._left // 2) % 2 == 1

    def verdict(self, limits: Limits) -> str | None:
        """Return a reason to trip if a finished check found the plan slower, else ``None``."""
        if self._left or not self._baseline or not self._own:
            return None
        ratio = statistics.median(self._own) / statistics.median(self._baseline)
        self._own, self._baseline = [], []
        if ratio > 1 + limits.slowdown_frac:
            return f"steps take {ratio:.2f} of what the baseline's take, measured turn by turn"
        return None

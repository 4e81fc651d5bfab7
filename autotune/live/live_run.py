"""What the parts of a live run's controller share: the run's instruments, and the state that its steps change."""

from __future__ import annotations

from autotune.live.agreement import Agreement
from autotune.live.attached import Attached
from autotune.live.decision_log import DecisionLog
from autotune.live.guard import Breaker, SlowdownCheck
from autotune.live.limits import Stage
from autotune.live.live_profiler import LiveProfiler
from autotune.live.memory_budget import BudgetReader
from autotune.live.phases import Profiled, Unprofiled
from autotune.live.placement import Placements
from autotune.live.rank_channel import Ranks
from autotune.live.step_room import StepRoom
from autotune.live.step_times import StepTimes
from autotune.mechanics import controls
from autotune.mechanics.gradient_stats import GradientMonitor
from autotune.plan import Plan
from autotune.profiling.own_time import OwnTime
from autotune.profiling.step_peaks import StepPeaks
from autotune.profiling.unit_calls import UnitCalls

# A budget is ample if it has room for so many times what is predicted.
_AMPLE = 2.0


class LiveRun:
    """The instruments and the state of one run.

    Attributes:
        attached: The run as it was attached to.
        log: The decision log.
        ranks: The connection to the other ranks.
        agreement: Until all ranks have a profile, each asks for its own steps; then the first rank decides for all.
        switcher: Switches the model's units.
        calls: The calls of units.
        profiler: What is learnt of the run's costs.
        budget: The reader of the memory budget.
        peaks: The measured peaks of steps.
        step_room: What is left of the budget for a step.
        monitor: The statistics of gradients.
        time: The time that the tuner itself takes.
        times: Where the time of each step goes.
        breaker: What stops switching after trips.
        check: The check whether the decided plans are slower than the baseline.
        phase: The phase of the run, which makes the predictions.
        news: Whether there is a newer profile than the one in use.
        plan: The plan that is applied.
        placed: Number of times that the applied plan has changed, for any reason.
        step: Number of optimizer steps since the tuner was attached.
        over_budget: Number of steps for which no plan was known to fit, or whose measured peak exceeded the budget.
        size: Bytes of the running step's largest micro-batch under its plan.
        least: Predicted peak of the leanest plan if no plan is known to fit the running step; ``None`` if one is.

    Args:
        attached: As the attribute.
        log: As the attribute.
        ranks: As the attribute.
        former: The same run as it was taken to be, whose counters, trips, warnings and locks of units go on.
    """

    def __init__(self, attached: Attached, log: DecisionLog, ranks: Ranks, former: LiveRun | None = None) -> None:
        self.attached, self.log, self.ranks = attached, log, ranks
        self.agreement = Agreement(ranks)
        # Where all steps are cut and computed alike, they may call different units.
        alike = len(attached.space.accumulation_choices) == len(attached.space.precisions) == 1
        may_take_turns = alike and not ranks.many
        self.profiler = LiveProfiler(attached, may_take_turns=may_take_turns)
        self.switcher = controls.Switcher(attached.model, [unit.name for unit in attached.space.units])
        self.switcher.hooks = self.profiler.probes.hooks
        self.calls = UnitCalls(self.switcher, tells_apart=may_take_turns)
        self.budget: BudgetReader = BudgetReader(attached, log) if former is None else former.budget
        self.peaks = StepPeaks(attached.device)
        self.step_room = StepRoom(attached, self.budget, self.peaks, self.profiler.knowledge, self.calls)
        self.monitor = GradientMonitor(attached.model, attached.space.units)
        self.time: OwnTime = OwnTime(attached.total_steps)
        self.times = StepTimes(attached.device)
        if ranks.many:
            self.times.watch_collectives()
        self.breaker: Breaker = Breaker.closed(attached.limits)
        self.check = SlowdownCheck()
        self.phase: Unprofiled | Profiled = Unprofiled(attached.space)
        self.news = False
        self.plan = self.phase.baseline
        self.placed: int = 0
        self.step: int = 0
        self.over_budget: int = 0
        self.size: int = 0
        self.least: float | None = None
        if former is not None:
            self.time, self.breaker = former.time, former.breaker
            self.step, self.placed, self.over_budget = former.step, former.placed, former.over_budget
            units = set(attached.space.recomputable)
            self.profiler.bar({name: reason for name, reason in former.profiler.locks.items() if name in units})

    @property
    def placements(self) -> Placements | None:
        """The plans with their predicted peaks; ``None`` until the run is profiled."""
        return self.phase.placements

    @property
    def acting(self) -> bool:
        """Whether plans may be switched now."""
        profiled = isinstance(self.phase, Profiled)
        return self.attached.stage is Stage.ACT and profiled and self.breaker.allows(self.step)

    @property
    def ks(self) -> tuple[int, ...]:
        """The values of k that plans may choose from; none where no plan may be switched."""
        return self.profiler.space.accumulation_choices if self.attached.stage is Stage.ACT else ()

    @property
    def locks(self) -> dict[str, str]:
        """The reasons for locks, by unit or choice; if profiling failed, the reason is under ``profile``."""
        failed = self.profiler.failed
        return {**self.profiler.locks, **({} if failed is None else {"profile": failed})}

    @property
    def room(self) -> float:
        """Bytes that a plan may be predicted to need: the usable budget less what steps needed beyond predictions."""
        return self.step_room.usable_bytes(self.plan.accumulation_steps)

    @property
    def allowed(self) -> int | None:
        """The budget in bytes for a step with the usual calls of units, within which one with more calls fits too."""
        return self.step_room.allowed_bytes(self.plan.accumulation_steps)

    def awaits_calls(self, size: float) -> bool:
        """Return whether steps with more calls of units than usual must be measured, so that the budget holds in them.

        Args:
            size: Bytes of the step's largest batch.
        """
        unknown = self.budget.latest is not None and self.calls.is_unmeasured
        return unknown and not self._has_room_for(self.calls.extra, size)

    def recompute_outside_steps(self) -> None:
        """Recompute what may be in passes before the next step, which no profile has, unless the budget is ample."""
        acts = self.attached.stage is Stage.ACT and self.budget.latest is not None and self.profiler.probed
        if acts and not self.agreement.many and not self._has_room_for(1.0, self.size):
            self.apply(self.plan.changed(storage=self.profiler.leanest.storage))

    def _has_room_for(self, passes: float, size: float) -> bool:
        """Return whether so many passes certainly fit the budget, whatever is kept in them.

        Args:
            passes: What is kept in them, divided by what is kept in a usual step.
            size: Bytes of the largest batch.
        """
        fullest, static = self.phase.peak_bytes(self.phase.baseline, size), self.profiler.knowledge.static_bytes
        return fullest is not None and static + _AMPLE * passes * (fullest - static) <= self.room

    @property
    def fragments(self) -> int:
        """The most bytes that a traced step reserved beyond what it allocated at its peak."""
        return self.profiler.knowledge.fragments

    def fits(self, plan: Plan, size: float) -> bool:
        """Return whether a plan is predicted to fit the budget with a batch of ``size`` bytes."""
        return self.phase.fits(plan, size, self.room)

    def length_of(self, size: float) -> float:
        """Return the size of a batch relative to the profiled batch, with what the loop itself adds to it."""
        return self.phase.share(size) * self.profiler.knowledge.handed.ahead(round(size))

    def apply(self, plan: Plan) -> None:
        """Apply a plan to the model."""
        # Comparing plans is slow, and most are the same object.
        if plan is not self.plan and plan != self.plan:
            self.switcher.apply(plan)
            self.placed += 1
        elif not self.switcher.stands():
            # Other code has replaced the forward of a unit.
            self.switcher.apply(plan)
        self.plan = plan

    @property
    def predicted_peak_bytes(self) -> float | None:
        """Predicted peak of the running or last step; ``None`` before there is a profile."""
        # A plan is chosen for its own batch; other batches of the window may be larger.
        peak = self.phase.peak_bytes(self.plan, self.size) if self.size else None
        return None if peak is None else peak + self.peaks.unforeseen

    def overhead_frac(self) -> float:
        """Return the tuner's own share of the run's time."""
        return self.time.frac(self.step, self.profiler.probes.seconds)

    def too_expensive(self) -> bool:
        """Return whether the tuner takes a larger share of the run's time than allowed."""
        return self.time.is_too_expensive(self.step, self.profiler.probes.seconds, self.attached.limits.overhead_frac)

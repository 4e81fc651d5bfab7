"""A learning rate that branches of the run find, and a batch that grows on the way.

Where an update has a fixed cost (communication between ranks, an optimizer's pass over all weights), the best number
of batches per update grows while the loss falls, and the best learning rate is not known in advance. Branches, trained
for a short stretch from one snapshot at the same cost, tell which setting is better on held-out data; the run continues
from the end of the best one, and all that branches cost counts. This file knows no clock: costs are in samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.errors import EngineError, InputError, JobError
from autotune.io.progress import Reporter, Silent
from autotune.job import Job

# Parts of a whole run at whose ends its metric is noted.
PARTS_OF_RUN = 50
# Parts of a branch at whose ends the metric is read, and how many of the last are averaged: one reading is noise.
_PARTS, _AVERAGED = 8, 3
# Updates at each k by which the fixed cost is measured.
_TIMED_UPDATES = 8
# Updates that a whole run must afford: with fewer, its first branches would be too short to tell anything.
_FEWEST_UPDATES = 40
# Doublings and halvings of the learning rate that are tried at most.
_MOST_DOUBLINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What an update consumes and how far it goes.

    Attributes:
        accumulation_steps: batches per update, >= 1.
        rate: factor on the learning rate of the job's optimizer, > 0.
    """

    accumulation_steps: int
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a run may cost.

    Attributes:
        fixed_samples: fixed cost of an update, in samples of equal cost, >= 0.
        total_samples: cost of the whole run, branches included: samples and the fixed cost of each update, > 0.

    Raises:
        InputError: if a cost is no such number.
    """

    fixed_samples: float
    total_samples: float

    def __post_init__(self) -> None:
        for name, least in (("fixed_samples", "0 or more"), ("total_samples", "more than 0")):
            value = getattr(self, name)
            good = math.isfinite(value) and (value > 0 or (value == 0 and name == "fixed_samples"))
            if not good:
                raise InputError(f"{name} is {value!r}", where="costs of a ramp", allowed=f"{least}, in samples")

    def of_update(self, samples: float) -> float:
        """Return the cost of an update that consumes a number of samples."""
        return self.fixed_samples + samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """How often a run branches, and how far its branches go.

    Attributes:
        first_frac: cost of each of the first branches, which choose the learning rate, over the whole cost.
        larger_at: shares of the whole cost at which the run goes on with the next larger batch; ``None`` lets later
            branches decide that, as the other attributes say.
        share: cost of each later branch over what the run has cost before.
        growth: factor by which the cost of the run grows from one round of branches to the next, > 1.
    """

    first_frac: float = 0.01
    larger_at: tuple[float, ...] | None = (0.25, 0.5)
    share: float = 0.04
    growth: float = 1.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One comparison of branches.

    Attributes:
        at: what the run had cost before it.
        metrics: metric of each branch by setting, as pairs; infinite for one that failed.
        chosen: the setting from there on.
    """

    at: float
    metrics: tuple[tuple[Setting, float], ...]
    chosen: Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """A run that has followed its branches.

    Attributes:
        rounds: the comparisons in order.
        updates: pairs of the number of the kept run's updates and the setting from there on.
        curve: pairs of a cost and the metric there, of the kept run.
        cost: cost of everything, in samples.
        lost: cost of the branches that were not kept.
    """

    rounds: tuple[Round, ...]
    updates: tuple[tuple[int, Setting], ...]
    curve: tuple[tuple[float, float], ...]
    cost: float
    lost: float

    def to_json(self) -> dict[str, Any]:
        """Return the ramp as a document."""
        return asdict(self)


class CostedRun:
    """A run of a job whose cost is counted in samples.

    Attributes:
        job: the job, at its optimizer's own learning rate.
        costs: what the run may cost.
        spent: what it has cost, including what was trained before a return to a snapshot.
        curve: pairs of a cost and the metric there.
        settings: pairs of a number of updates and the setting from there on, of the run as it is.

    Args:
        job: a job with adaptive batching; its schedule and its rule for the learning rate are left out.
        costs: what the run may cost.
        seed: random seed for weights and batches.
        statistics: whether each update measures the gradient's noise scale.

    Raises:
        InputError: if the job's batching is not adaptive, or it has only one k.
        JobError: if the job cannot be trained.
    """

    def __init__(self, job: Job, costs: Costs, *, seed: int, statistics: bool = False) -> None:
        _require_choices(job)
        self.job = replace(job, schedule=None, lr_rule="none")
        self.costs = costs
        options = EngineOptions(statistics_every=1 if statistics else None, meter_memory=False)
        self._engine = TorchEngine(self.job, seed=seed, options=options)
        self.spent = 0.0
        self.curve: list[tuple[float, float]] = []
        self.settings: list[tuple[int, Setting]] = []

    @property
    def left(self) -> float:
        """Return what the run may still cost."""
        return self.costs.total_samples - self.spent

    @property
    def noise_scale(self) -> float | None:
        """Return the gradient's noise scale in samples; ``None`` while unknown."""
        latest = self._engine.monitor.state.latest
        return None if latest is None else latest.noise_scale

    def cost_of(self, setting: Setting) -> float:
        """Return the cost of an update."""
        return self.costs.of_update(setting.accumulation_steps * self.job.batch_size)

    def train(self, setting: Setting, cost: float) -> bool:
        """Train for about a cost, at least one update; return whether no update failed."""
        steps = max(round(cost / self.cost_of(setting)), 1)
        if not self.settings or self.settings[-1][1] != setting:
            self.settings.append((self._engine.progress.steps, setting))
        self._engine.apply(self._engine.plan.changed(accumulation_steps=setting.accumulation_steps))
        self._engine.scale_learning_rate(setting.rate)
        measured = self._engine.run(steps)
        self.spent += measured.steps * self.costs.fixed_samples + measured.samples
        return measured.failure is None

    def evaluate(self) -> float:
        """Return the metric as a loss, which is better the lower it is; infinite where it is not a number."""
        metric = self._engine.evaluate()
        loss = metric if self.job.goal == "min" else -metric
        return loss if math.isfinite(loss) else math.inf

    def snapshot(self) -> tuple[Any, tuple[tuple[int, Setting], ...]]:
        """Return the training state; what was spent is no part of it."""
        return self._engine.snapshot(), tuple(self.settings)

    def restore(self, state: tuple[Any, tuple[tuple[int, Setting], ...]]) -> None:
        """Return to a snapshot."""
        self._engine.restore(state[0])
        self.settings = list(state[1])

    def close(self) -> None:
        """Release the model."""
        self._engine.close()


def follow(run: CostedRun, choose: Callable[[CostedRun], Setting], *, parts: int = PARTS_OF_RUN) -> None:
    """Train to the end of a run's cost, and note the metric along the way.

    Args:
        run: the run.
        choose: returns the setting of the next part of the run.
        parts: number of parts into which the whole cost is divided.
    """
    while run.left > 0:
        setting = choose(run)
        if run.cost_of(setting) > run.left and run.curve:
            return
        good = run.train(setting, min(run.costs.total_samples / parts, run.left))
        run.curve.append((run.spent, run.evaluate() if good else math.inf))
        if not good:
            return


def find_ramp(
    job: Job, costs: Costs, *, seed: int = 0, branching: Branching | None = None, reporter: Reporter | None = None
) -> Ramp:
    """Train a job once: branches of the run choose its learning rate, and its batch grows on the way.

    The learning rate is doubled while branches say that it helps, or else halved. The batch grows at fixed shares of
    the cost, or where branches say so. These compare it with the next larger one at the same learning rate: a lower
    rate would win short comparisons, since noise falls at once, and lose the run.

    Args:
        job: a job with adaptive batching, whose ``accumulation_choices`` are the batches per update to choose from.
        costs: the fixed cost of an update, and what the run may cost in all.
        seed: random seed for weights and batches.
        branching: how often the run branches; ``None`` for the defaults.
        reporter: shows progress.

    Raises:
        InputError: if the job's batching is not adaptive, it has only one k, or a run affords too few updates.
        JobError: if training fails at every learning rate that is tried.
    """
    found, shown = branching or Branching(), reporter or Silent()
    run = CostedRun(job, costs, seed=seed)
    first = first_setting(job, costs)
    least = _FEWEST_UPDATES * run.cost_of(first)
    if costs.total_samples < least:
        raise InputError(f"cost is {costs.total_samples:g} samples", where="ramp", allowed=f"at least {least:g}")
    shown.stage(f"ramp of {job.name}", 100)
    search = _Search(run)
    search.find_rate(first, found.first_frac * costs.total_samples)
    if found.larger_at is None:
        _branch_on(run, search, found, shown)
    for share in found.larger_at or ():
        if not follow_until(run, share * costs.total_samples, search.current):
            break
        search.current = search.larger() or search.current
        shown.advance(round(100 * share))
    follow(run, lambda _: search.current)
    run.close()
    return Ramp(
        rounds=tuple(search.rounds),
        updates=tuple(run.settings),
        curve=tuple(run.curve),
        cost=run.spent,
        lost=search.lost,
    )


def _branch_on(run: CostedRun, search: _Search, branching: Branching, reporter: Reporter) -> None:
    """Let branches decide again and again whether the batch grows, as long as a whole round and its pause are left."""
    while True:
        pause = run.spent * (branching.growth - 1)
        larger, current = search.larger(), search.current
        if larger is None or pause + 2 * branching.share * (run.spent + pause) > run.left:
            return
        if not follow_until(run, run.spent + pause, current):
            return
        search.compare((current, larger), branching.share * run.spent)
        reporter.advance(round(100 * run.spent / run.costs.total_samples))


def measured_fixed_cost(job: Job, *, seed: int = 0) -> float:
    """Return the fixed cost of an update in samples, from the times of updates of one batch and of the most batches.

    Args:
        job: a job with adaptive batching and more than one k.
        seed: random seed for weights and batches.

    Raises:
        InputError: if the job's batching is not adaptive, or it has only one k.
        EngineError: if an update fails.
    """
    _require_choices(job)
    engine = TorchEngine(job, seed=seed, options=EngineOptions(statistics_every=None, meter_memory=False))
    seconds, ks = [], (1, job.accumulation_choices[-1])
    for k in ks:
        engine.apply(engine.plan.changed(accumulation_steps=k))
        measured = engine.run(_TIMED_UPDATES)
        if measured.seconds_per_step is None:
            raise EngineError(f"an update of {k} batches of {job.name} fails: {measured.failure_detail}")
        seconds.append(measured.seconds_per_step)
    engine.close()
    per_batch = max(seconds[1] - seconds[0], 1e-9) / (ks[1] - ks[0])
    return max(seconds[0] / per_batch - 1, 0.0) * job.batch_size


def first_setting(job: Job, costs: Costs) -> Setting:
    """Return the job's own rate, and the most batches per update whose samples cost no more than the fixed cost.

    With fewer, an update would cost at least half as much, however few its samples.
    """
    fitting = [k for k in job.accumulation_choices if k * job.batch_size <= costs.fixed_samples]
    return Setting(accumulation_steps=max(fitting, default=1), rate=1.0)


def follow_until(run: CostedRun, cost: float, setting: Setting) -> bool:
    """Train under one setting until a run has cost so much, and note the metric; return whether no update failed."""
    part = run.costs.total_samples / PARTS_OF_RUN
    while run.spent < cost:
        if not run.train(setting, min(part, cost - run.spent)):
            return False
        run.curve.append((run.spent, run.evaluate()))
    return True


def _require_choices(job: Job) -> None:
    if job.batching != "adaptive":
        raise InputError(f"batching of {job.name} is {job.batching!r}", where="ramp", allowed="adaptive")
    if len(job.accumulation_choices) < 2:
        choices = f"accumulation_choices of {job.name} are {job.accumulation_choices}"
        raise InputError(choices, where="ramp", allowed="at least two")


class _Search:
    """The branches of a run.

    Attributes:
        current: the setting that was last chosen.
        rounds: the comparisons so far.
        lost: cost of the branches that were not kept.
    """

    def __init__(self, run: CostedRun) -> None:
        self._run = run
        self.current = Setting(accumulation_steps=1, rate=1.0)
        self.rounds: list[Round] = []
        self.lost = 0.0

    def larger(self) -> Setting | None:
        """Return the current setting with the next larger batch; ``None`` if there is none."""
        choices = self._run.job.accumulation_choices
        more = [k for k in choices if k > self.current.accumulation_steps]
        return replace(self.current, accumulation_steps=more[0]) if more else None

    def find_rate(self, first: Setting, cost: float) -> None:
        """Double the learning rate while a branch says that it helps; if the first doubling does not, halve it."""
        run, begin, at = self._run, self._run.snapshot(), self._run.spent
        branches = [self._branch(begin, first, cost)]
        for factor in (2.0, 0.5):
            rate = first.rate
            for _ in range(_MOST_DOUBLINGS):
                rate *= factor
                branches.append(self._branch(begin, replace(first, rate=rate), cost))
                if not branches[-1].metric < min(branch.metric for branch in branches[:-1]):
                    break
            if min(branches, key=_metric) is not branches[0]:
                break
        if not math.isfinite(min(branch.metric for branch in branches)):
            rates = sorted(branch.setting.rate for branch in branches)
            problem = f"training fails at {rates[0]:g} to {rates[-1]:g} times the learning rate"
            raise JobError(problem, where=f"job {run.job.name!r}", allowed="a job whose loss stays finite")
        self._keep(branches, at)

    def compare(self, settings: Sequence[Setting], cost: float) -> None:
        """Train a branch under each setting at a cost, and keep the best one."""
        begin, at = self._run.snapshot(), self._run.spent
        self._keep([self._branch(begin, setting, cost) for setting in settings], at)

    def _branch(self, begin: Any, setting: Setting, cost: float) -> _Branch:
        run = self._run
        run.restore(begin)
        before, metrics = run.spent, [math.inf]
        while run.spent - before < cost * (1 - 0.5 / _PARTS):
            if not run.train(setting, min(cost / _PARTS, before + cost - run.spent)):
                metrics = [math.inf]
                break
            metrics.append(run.evaluate())
        kept = metrics[1:][-_AVERAGED:] or metrics
        return _Branch(
            setting=setting, metric=sum(kept) / len(kept), cost=run.spent - before, end=run.snapshot(), last=metrics[-1]
        )

    def _keep(self, branches: Sequence[_Branch], at: float) -> None:
        best = min(branches, key=_metric)
        self._run.restore(best.end)
        self._run.curve.append((self._run.spent, best.last))
        self.lost += sum(branch.cost for branch in branches) - best.cost
        self.current = best.setting
        metrics = tuple((branch.setting, branch.metric) for branch in branches)
        self.rounds.append(Round(at=at, metrics=metrics, chosen=best.setting))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """A branch: its setting, mean metric at its end, cost, state at its end, and last metric."""

    setting: Setting
    metric: float
    cost: float
    end: Any
    last: float


def _metric(branch: _Branch) -> float:
    return branch.metric

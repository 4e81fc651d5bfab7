"""Compare arms fairly: paired seeds, interleaved, failures kept, speed and quality as two tests.

The protocol is fixed before the first run. Time is training time (evaluation, which is the same for all arms, is left
out) and ends at the target; the final metric is taken at one number of samples for all arms.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from scipy import stats

from autotune.agents.policy import Policy, StaticPolicy
from autotune.budget import MemoryBudget
from autotune.campaign.journal import Journal
from autotune.campaign.tracking import Tracker
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.errors import InputError
from autotune.gym.observation import Observation
from autotune.job import Job
from autotune.measurement import Failure, Measurement
from autotune.physics.planning import LOOK_AHEAD
from autotune.plan import Plan, PlanSpace

COMPARISON_VERSION = 1
# How far past the baseline's arrival every arm runs, so that a fast arm cannot hide a worse end.
HORIZON = 1.25
# Share of a run at which a pilot's arrival makes its length the horizon: about 1/1.25, and well before the end, so that
# other seeds arrive too.
_ARRIVAL = (0.66, 0.88)
_PILOTS = 3
# Paired seeds below which a verdict is an indication only: with n = 3 the best two-sided sign-flip p is 0.25.
FEWEST_FOR_A_CLAIM = 6
# Seeds of compared runs: none of them is a seed that tuning used.
_FIRST_SEED = 1000

ArmFactory = Callable[[PlanSpace], Policy]
_OUT_OF_MEMORY = (Failure.OUT_OF_MEMORY, Failure.OVER_BUDGET)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dips:
    """Say how the memory budget dips while a run trains, as an evaluation or a neighbour makes it do.

    Attributes:
        every: windows from one dip to the next; a window is a stretch between evaluations, and a dip lasts for one.
        share: share of the budget that a dip leaves.
        told: whether policies are told beforehand.
    """

    every: int
    share: float
    told: bool = False

    @classmethod
    def parse(cls, text: str) -> Dips:
        """Read ``EVERY:SHARE`` or ``EVERY:SHARE:told``, as in ``5:70%``.

        Raises:
            InputError: if it is neither.
        """
        parts = text.split(":")
        allowed = "EVERY:SHARE or EVERY:SHARE:told, as in 5:70%, with EVERY at least 2 and a share below 100%"
        try:
            every, share = int(parts[0]), MemoryBudget.parse(parts[1]).share
        except (ValueError, IndexError) as error:
            raise InputError(f"dips is {text!r}", where="--dips", allowed=allowed) from error
        good = every >= 2 and share is not None and share < 1 and parts[2:] in ([], ["told"])
        if not good or share is None:
            raise InputError(f"dips is {text!r}", where="--dips", allowed=allowed)
        return cls(every=every, share=share, told=len(parts) == 3)

    def budget(self, window: int, budget_bytes: int) -> int:
        """Return the budget of a window, numbered from 0."""
        return int(budget_bytes * self.share) if window % self.every == self.every - 1 else budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Hold one thing to compare.

    Attributes:
        name: what it is called.
        policy: makes the policy for a space; called once per run.
        tuning_s: seconds that were spent to find it.
        tuning_steps: real optimizer steps that were spent to find it.
        job: the job that it trains, where it is the compared one with something else than a plan changed, such as the
            learning-rate schedule; ``None`` for the compared job itself.
    """

    name: str
    policy: ArmFactory
    tuning_s: float = 0.0
    tuning_steps: int = 0
    job: Job | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Declare a comparison before its first run.

    Attributes:
        job: the job's name.
        arms: the arms' names; the first is the baseline.
        seeds: the paired seeds.
        horizon_samples: samples that every run consumes; the schedule is bound to it.
        memory_budget_bytes: what ``within_budget`` refers to; ``None`` for no budget.
        dips: how the budget dips; ``None`` if it stays. A window that runs out of memory is then repeated under the
            leanest plan, and its time counts.
        margin: largest relative loss of the final metric that counts as non-inferior.
        confidence: of every interval.
    """

    job: str
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    horizon_samples: int
    memory_budget_bytes: int | None
    dips: Dips | None = None
    margin: float = 0.005
    confidence: float = 0.95

    @property
    def digest(self) -> str:
        """Return a SHA-256 of the protocol, to be logged before the first run."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """Hold one compared run; the names are those of ``comparison.json``."""

    seed: int
    reached: bool = False
    time_to_target_s: float | None = None
    steps: int = 0
    samples: int = 0
    final_metric: float | None = None
    throughput: float | None = None
    peak_bytes: int | None = None
    within_budget: bool = True
    out_of_memory: int = 0
    # Windows in which a policy's planner acted without its network, by reason; empty for other arms.
    alone: dict[str, int] = field(default_factory=dict)
    energy_j: float | None = None
    energy_source: str = "absent"
    failure: str | None = None
    # Training seconds, samples and metric at each evaluation, and plans by the step they began at.
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    plans: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        document = asdict(self)
        document["curve"] = [list(point) for point in self.curve]
        document["plans"] = [{"step": step, "plan": plan} for step, plan in self.plans]
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RunRecord:
        """Read what :meth:`to_json` returned."""
        curve = [(seconds, samples, metric) for seconds, samples, metric in document["curve"]]
        plans = [(entry["step"], entry["plan"]) for entry in document["plans"]]
        return cls(**{**document, "curve": curve, "plans": plans})


def paired_seeds(count: int) -> tuple[int, ...]:
    """Return fresh seeds for compared runs.

    Raises:
        InputError: for fewer than two.
    """
    if count < 2:
        raise InputError(f"seeds is {count}", where="--seeds", allowed="at least 2")
    return tuple(range(_FIRST_SEED, _FIRST_SEED + count))


def find_horizon(
    job: Job, *, seed: int = 0, place: str = "cpu", on_pilot: Callable[[int, float], None] | None = None
) -> int:
    """Return the samples of every compared run: about 1.25x what the baseline needs to arrive.

    The learning-rate schedule is bound to the length of a run, so the length decides when the baseline arrives. Pilot
    runs of the baseline look for a length of which it arrives at about 4/5: the first with the job's own length, each
    further one with the length that the last one suggests.

    Args:
        job: the job.
        seed: of the pilots.
        place: where the model lives.
        on_pilot: is told of the pilot's number and the share of it that is done.

    Returns:
        Samples, in whole evaluations; the job's own length if the baseline never arrives.
    """
    stride = job.evaluate_every * job.batch_size
    length = math.ceil(job.total_samples / stride) * stride
    arrivals: dict[int, float] = {}
    longest_missed = 0
    for number in range(_PILOTS):
        record = pilot(job, length, seed=seed, place=place, on_step=_share_of(on_pilot, number, length))
        if record.reached:
            arrivals[length] = record.samples / length
            if _ARRIVAL[0] <= arrivals[length] <= _ARRIVAL[1]:
                return length
            wanted = HORIZON * record.samples
        elif not arrivals:
            return length
        else:
            longest_missed = max(longest_missed, length)
            wanted = math.sqrt(length * min(arrivals))
        length = math.ceil(max(wanted, longest_missed + 1) / stride) * stride
        if length in arrivals:
            break
    return min(arrivals)


def pilot(
    job: Job, samples: int, *, seed: int = 0, place: str = "cpu", on_step: Callable[[int], None] | None = None
) -> RunRecord:
    """Run the baseline until it arrives, on a schedule of so many samples."""
    options = EngineOptions(total_samples=samples, meter_memory=False)
    engine = TorchEngine(job, seed=seed, device=place, options=options)
    policy = StaticPolicy("baseline", engine.space.baseline())
    record = _Run(job, policy, engine, seed, samples, on_step=on_step).record(stop_at_target=True)
    engine.close()
    return record


def _share_of(on_pilot: Callable[[int, float], None] | None, number: int, length: int) -> Callable[[int], None] | None:
    return None if on_pilot is None else lambda samples: on_pilot(number, samples / length)


def compare(
    job: Job,
    arms: Sequence[Arm],
    protocol: Protocol,
    *,
    device: str,
    place: str = "cpu",
    tracker: Tracker | None = None,
    journal: Journal | None = None,
    on_progress: Callable[[str, int, float], None] | None = None,
) -> dict[str, Any]:
    """Run every arm on every seed and return ``comparison.json`` as an object.

    Args:
        job: the job.
        arms: the arms, the baseline first.
        protocol: the declared protocol.
        device: what the device is called.
        place: where models live.
        tracker: where runs are logged.
        journal: has the runs that were finished before.
        on_progress: is told of the arm, the seed and the share of its run that is done.
    """
    if tracker is not None:
        tracker.tags({"protocol_sha256": protocol.digest, "protocol": json.dumps(asdict(protocol))})
        tracker.settle(10.0)
    journal = journal or Journal()
    records: dict[str, list[RunRecord]] = {arm.name: [] for arm in arms}
    for index, seed in enumerate(protocol.seeds):
        # A B C then C B A: a drift of the machine's speed meets every arm from both sides.
        for arm in arms if index % 2 == 0 else list(reversed(arms)):
            run = functools.partial(_run_arm, arm.job or job, arm, seed, protocol, place, on_progress)
            record = RunRecord.from_json(journal.once({"run": arm.name, "seed": seed}, _as_json(run)))
            records[arm.name].append(record)
            if tracker is not None and not tracker.knows(_called(arm, record)):
                _track(tracker, arm, record)
    return _document(job, arms, records, protocol, device)


def _as_json(run: Callable[[], RunRecord]) -> Callable[[], dict[str, Any]]:
    return lambda: run().to_json()


def _run_arm(
    job: Job,
    arm: Arm,
    seed: int,
    protocol: Protocol,
    place: str,
    on_progress: Callable[[str, int, float], None] | None,
) -> RunRecord:
    options = EngineOptions(total_samples=protocol.horizon_samples)
    engine = TorchEngine(job, seed=seed, device=place, options=options)
    policy = arm.policy(engine.space)
    policy.reset()

    def on_step(samples: int) -> None:
        if on_progress is not None:
            on_progress(arm.name, seed, min(samples / protocol.horizon_samples, 1.0))

    run = _Run(
        job,
        policy,
        engine,
        seed,
        protocol.horizon_samples,
        memory_budget_bytes=protocol.memory_budget_bytes,
        dips=protocol.dips,
        on_step=on_step,
    )
    record = run.record(stop_at_target=False)
    engine.close()
    return record


class _Run:
    """Train one job under one policy to a number of samples, evaluating as the job says."""

    def __init__(
        self,
        job: Job,
        policy: Policy,
        engine: TorchEngine,
        seed: int,
        samples: int,
        *,
        memory_budget_bytes: int | None = None,
        dips: Dips | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        self._job = job
        self._policy = policy
        self._engine = engine
        self._samples = samples
        self._budget = memory_budget_bytes
        self._dips = dips if memory_budget_bytes is not None else None
        self._windows = 0
        self._on_step = on_step
        self._record = RunRecord(seed=seed)
        self._trained_s = 0.0
        self._step_s: list[float] = []
        self._samples_per_step: list[float] = []

    def record(self, *, stop_at_target: bool) -> RunRecord:
        record, engine = self._record, self._engine
        plan = getattr(self._policy, "plan", engine.space.baseline())
        self._apply(plan)
        reference: Measurement | None = None
        previous: Measurement | None = None
        self._evaluate()
        if stop_at_target and record.reached:
            return record
        while engine.progress.samples < self._samples:
            window = self._run_window()
            reference = reference or window
            if window.failure is not None and not self._survived(window):
                record.failure = str(window.failure)
                break
            self._evaluate()
            if stop_at_target and record.reached:
                break
            observation = self._observe(window, reference, previous)
            previous = window
            began = time.perf_counter()
            self._apply(self._policy.decide(observation, engine.plan))
            # What a policy thinks, and a switch takes, is the run's time too.
            self._trained_s += time.perf_counter() - began
        record.alone = dict(getattr(self._policy, "alone", {}))
        record.steps, record.samples = engine.progress.steps, engine.progress.samples
        if self._step_s:
            record.throughput = statistics.fmean(self._samples_per_step) / statistics.median(self._step_s)
        record.final_metric = record.curve[-1][2] if record.curve and record.failure is None else None
        return record

    def _run_window(self) -> Measurement:
        """Run to the next evaluation; what ran out of memory in a dip is repeated under the leanest plan."""
        if self._dips is not None and self._budget is not None:
            self._engine.memory_budget_bytes = self._dips.budget(self._windows, self._budget)
        self._windows += 1
        began = self._engine.progress.samples
        window = self._engine.run(self._window_steps(began))
        self._take(window)
        if not self._survived(window):
            return window
        self._record.out_of_memory += 1
        plan = self._engine.plan
        self._engine.apply(self._engine.space.leanest())
        again = self._engine.run(self._window_steps(began))
        self._take(again)
        self._engine.apply(plan)
        if again.failure is not None:
            return replace(again, failure=Failure.CRASHED, failure_detail=f"the leanest plan: {again.failure_detail}")
        return replace(window, total_s=window.total_s + again.total_s)

    def _survived(self, window: Measurement) -> bool:
        """Tell whether a window ran out of memory where the protocol says how a run goes on."""
        return self._dips is not None and window.failure in _OUT_OF_MEMORY

    def _window_steps(self, began: int) -> int:
        """Return the steps until the next evaluation, which comes by samples, whatever k is.

        Args:
            began: samples at which the window began.
        """
        per_step = self._job.batch_size
        if self._job.batching == "adaptive":
            per_step *= self._engine.plan.accumulation_steps
        stride = self._job.evaluate_every * self._job.batch_size
        left = min(self._samples, began + stride) - self._engine.progress.samples
        return max(1, math.ceil(left / per_step))

    def _apply(self, plan: Plan) -> None:
        if not self._record.plans or plan != self._engine.plan:
            self._record.plans.append((self._engine.progress.steps, plan.to_json()))
        self._engine.apply(plan)

    def _take(self, window: Measurement) -> None:
        record = self._record
        self._trained_s += window.total_s
        self._step_s.extend(window.step_s)
        if window.samples_per_step is not None:
            self._samples_per_step.append(window.samples_per_step)
        peaks = [peak for peak in (record.peak_bytes, window.peak_bytes) if peak is not None]
        record.peak_bytes = max(peaks, default=None)
        if window.failure in _OUT_OF_MEMORY and self._dips is None:
            record.within_budget = False
        if self._budget is not None and window.peak_bytes is not None:
            record.within_budget = record.within_budget and window.peak_bytes <= self._budget

    def _evaluate(self) -> None:
        record, samples = self._record, self._engine.progress.samples
        metric = self._engine.evaluate()
        record.curve.append((self._trained_s, samples, metric))
        if not record.reached and self._job.arrived(metric):
            record.reached = True
            record.time_to_target_s = self._trained_s
        if self._on_step is not None:
            self._on_step(samples)

    def _observe(self, window: Measurement, reference: Measurement, previous: Measurement | None) -> Observation:
        return Observation(
            space=self._engine.space,
            plan=self._engine.plan,
            window=window,
            reference=reference,
            previous_loss=None if previous is None else previous.loss,
            memory_budget_bytes=self._announced()[0] if self._budget is not None else None,
            budget_ahead=self._announced(),
            batch_size=self._job.batch_size,
            adaptive=self._job.batching == "adaptive",
            progress=min(self._engine.progress.samples / self._samples, 1.0),
        )

    def _announced(self) -> tuple[int, ...]:
        """Return the budgets of the next windows that a policy is told."""
        if self._budget is None:
            return ()
        if self._dips is None or not self._dips.told:
            return (self._budget,)
        return tuple(self._dips.budget(self._windows + ahead, self._budget) for ahead in range(LOOK_AHEAD))


def _document(
    job: Job,
    arms: Sequence[Arm],
    records: Mapping[str, Sequence[RunRecord]],
    protocol: Protocol,
    device: str,
) -> dict[str, Any]:
    return {
        "version": COMPARISON_VERSION,
        "job": job.name,
        "device": device,
        "seeds": list(protocol.seeds),
        "memory_budget_bytes": protocol.memory_budget_bytes,
        "dips": None if protocol.dips is None else asdict(protocol.dips),
        "baseline": arms[0].name,
        "metric": {"goal": job.goal, "target": job.target, "margin": protocol.margin},
        "horizon_samples": protocol.horizon_samples,
        "protocol_sha256": protocol.digest,
        "indication_only": len(protocol.seeds) < FEWEST_FOR_A_CLAIM,
        "arms": [_arm_json(arm, records[arm.name]) for arm in arms],
        "against_baseline": [
            judge(arm, records[arm.name], records[arms[0].name], protocol, job.goal) for arm in arms[1:]
        ],
    }


def _arm_json(arm: Arm, records: Sequence[RunRecord]) -> dict[str, Any]:
    live = any(len(record.plans) > 1 for record in records)
    runs = [record.to_json() for record in records]
    document: dict[str, Any] = {"name": arm.name, "tuning_s": arm.tuning_s, "tuning_steps": arm.tuning_steps}
    if not live:
        document["plan"] = runs[0]["plans"][0]["plan"]
        for run in runs:
            del run["plans"]
    return {**document, "runs": runs}


def judge(
    arm: Arm, runs: Sequence[RunRecord], baseline: Sequence[RunRecord], protocol: Protocol, goal: str
) -> dict[str, Any]:
    """Return one entry of ``against_baseline``.

    Time: mean log ratio of paired times, with a t-interval and an exact sign-flip test. Quality: the final metric is
    non-inferior if the one-sided bound of the mean relative loss stays below the margin.
    """
    entry: dict[str, Any] = {
        "arm": arm.name,
        "time_ratio": None,
        "time_ratio_ci95": None,
        "p_value": None,
        "memory_ratio": _memory_ratio(runs, baseline),
        "metric_difference": None,
        "non_inferior": None,
        "break_even_steps": None,
    }
    if not all(record.reached for record in baseline):
        return {
            **entry,
            "verdict": "not comparable",
            "reason": "the baseline did not reach its target on every seed",
        }
    if any(_time(record) == 0 for record in [*baseline, *(run for run in runs if run.reached)]):
        return {**entry, "verdict": "not comparable", "reason": "the target is met before any training"}
    failed = [record.failure for record in runs if record.failure is not None]
    if failed:
        return {
            **entry,
            "verdict": "not comparable",
            "reason": f"{len(failed)} of its runs ended with {failed[0]}",
        }
    worse = _relative_losses(runs, baseline, goal)
    entry["metric_difference"] = _metric_difference(runs, baseline)
    entry["non_inferior"] = upper_bound(worse, protocol.confidence) <= protocol.margin
    missed = sum(not record.reached for record in runs)
    if missed:
        reason = f"{missed} of {len(runs)} runs did not reach the target"
        return {**entry, "verdict": "slower", "reason": reason}
    logs = [math.log(_time(run) / _time(other)) for run, other in zip(runs, baseline, strict=True)]
    low, high = interval(logs, protocol.confidence)
    entry["time_ratio"] = math.exp(statistics.fmean(logs))
    entry["time_ratio_ci95"] = [math.exp(low), math.exp(high)]
    entry["p_value"] = sign_flip(logs)
    entry["break_even_steps"] = _break_even(arm, runs, baseline)
    return {**entry, **_verdict(entry)}


def _verdict(entry: Mapping[str, Any]) -> dict[str, str]:
    low, high = entry["time_ratio_ci95"]
    if low > 1:
        return {"verdict": "slower", "reason": "the whole interval of the time ratio is above 1"}
    if high >= 1:
        return {"verdict": "no difference shown", "reason": "the interval of the time ratio contains 1"}
    if not entry["non_inferior"]:
        return {
            "verdict": "no difference shown",
            "reason": "its time is shorter, but its final metric was not shown to be within the margin",
        }
    return {"verdict": "faster", "reason": "shorter time, and a final metric within the margin"}


def interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the t-interval of a mean; a point where the values do not differ.

    Args:
        values: at least two numbers.
        confidence: two-sided.
    """
    mean, error = statistics.fmean(values), stats.sem(values)
    if error == 0:
        return mean, mean
    low, high = stats.t.interval(confidence, len(values) - 1, loc=mean, scale=error)
    return float(low), float(high)


def upper_bound(values: Sequence[float], confidence: float) -> float:
    """Return the one-sided upper confidence bound of a mean."""
    mean, error = statistics.fmean(values), float(stats.sem(values))
    return mean + float(stats.t.ppf(confidence, len(values) - 1)) * error


def sign_flip(values: Sequence[float], largest_exact: int = 12) -> float:
    """Return the two-sided p-value of the sign-flip test that a mean is 0.

    Exact up to ``largest_exact`` values, by 20,000 seeded random flips above.
    """
    array = np.asarray(values)
    observed = abs(array.mean())
    if len(array) <= largest_exact:
        signs = np.array(list(itertools.product((-1, 1), repeat=len(array))))
    else:
        signs = np.random.default_rng(0).choice((-1, 1), size=(20_000, len(array)))
    return float((np.abs((signs * array).mean(axis=1)) >= observed * (1 - 1e-12)).mean())


def _time(record: RunRecord) -> float:
    assert record.time_to_target_s is not None
    return record.time_to_target_s


def _metric(record: RunRecord) -> float:
    return math.nan if record.final_metric is None else record.final_metric


def _relative_losses(runs: Sequence[RunRecord], baseline: Sequence[RunRecord], goal: str) -> list[float]:
    """Return by what share each final metric is worse than its pair's; below 0 is better."""
    sign = 1 if goal == "min" else -1
    return [
        sign * (_metric(run) - _metric(other)) / abs(_metric(other)) for run, other in zip(runs, baseline, strict=True)
    ]


def _metric_difference(runs: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> float:
    pairs = zip(runs, baseline, strict=True)
    return statistics.fmean((_metric(run) - _metric(other)) / abs(_metric(other)) for run, other in pairs)


def _memory_ratio(runs: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> float | None:
    peaks = [[record.peak_bytes for record in side if record.peak_bytes] for side in (runs, baseline)]
    return max(peaks[0]) / max(peaks[1]) if all(peaks) else None


def _break_even(arm: Arm, runs: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> int | None:
    """Return the baseline's steps after which the tuning time is won back; ``None`` if it never is."""
    own = statistics.fmean(_time(record) for record in runs)
    other = statistics.fmean(_time(record) for record in baseline)
    if own >= other:
        return None
    steps = statistics.fmean(record.steps for record in baseline)
    return math.ceil(arm.tuning_s / (1 - own / other) / (other / steps)) if arm.tuning_s else 0


def _called(arm: Arm, record: RunRecord) -> str:
    return f"{arm.name} seed {record.seed}"


def _track(tracker: Tracker, arm: Arm, record: RunRecord) -> None:
    key = tracker.begin(_called(arm, record))
    tracker.params({"arm": arm.name, "seed": record.seed}, run=key)
    for seconds, samples, metric in record.curve:
        tracker.metrics({"metric": metric, "train_s": seconds}, step=samples, run=key)
    tracker.metrics(
        {
            "time_to_target_s": record.time_to_target_s,
            "final_metric": record.final_metric,
            "peak_bytes": record.peak_bytes,
            "throughput": record.throughput,
        },
        run=key,
    )
    tracker.end(key, failed=record.failure is not None)
    tracker.settle(5.0)

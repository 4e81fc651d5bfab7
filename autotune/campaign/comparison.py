"""Fair comparison of arms: paired seeds, interleaved runs, failures included, separate tests of speed and quality.

The protocol is fixed before the first run. Time is training time to the target, or per sample if the job has none; it
excludes evaluation, which is the same for all arms. The final metric is measured after the same number of samples for
all arms.
"""

from __future__ import annotations

import contextlib
import decimal
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, replace
from typing import Any

from autotune.agents.policy import Policy, StaticPolicy
from autotune.cost_model.carbon import Intensity
from autotune.cost_model.paper_equations import Constraints
from autotune.engines.engine import Engine
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.errors import InputError
from autotune.gym.observation import Observation
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.measurement import Failure, Measurement
from autotune.mechanics.devices import device_kind, fp32_arithmetic, fp32_computed_in, is_accelerator
from autotune.mechanics.flops import measure_peaks
from autotune.mechanics.processor_wait import Repetitions, is_disturbed, mean_wait
from autotune.plan import Launch, Plan
from autotune.records.journal import Journal
from autotune.records.protocol import FEWEST_FOR_A_CLAIM, Arm, Dips, Protocol, RunRecord
from autotune.records.run_documents import Run
from autotune.records.tracking import Tracker
from autotune.records.verdicts import disturbed, gated, judge
from autotune.simulator.online_planner import LOOK_AHEAD
from autotune.step_parts import StepParts, mean_parts

COMPARISON_VERSION = 1
# Samples of a run relative to the baseline's samples to target, so that a fast arm cannot hide a worse final metric.
HORIZON = 1.25
# A pilot sets the horizon if it reaches the target in this part of its length: around 1/1.25, and well before the end,
# so that other seeds reach the target too.
_ARRIVAL = (0.66, 0.88)
_PILOTS = 3
# Arm that repeats the baseline: if the baseline differs from itself, no verdict on another arm is valid.
GATE = "baseline-again"

# Most characters of what a failure was that are recorded.
_LONGEST_DETAIL = 500
_OUT_OF_MEMORY = (Failure.OUT_OF_MEMORY, Failure.OVER_BUDGET)
# Opens the engine of a run of a job, with a seed.
OpenRun = Callable[[Job, int, EngineOptions], Engine]


def on_one_rank(job: Job, seed: int, options: EngineOptions) -> Engine:
    """Return an engine that trains a run in this process."""
    return TorchEngine(job, seed=seed, options=options)


def find_horizon(
    job: Job,
    *,
    seed: int = 0,
    on_pilot: Callable[[int, float], None] | None = None,
    needs_target: bool = False,
    gradient_norm: float | None = None,
    open_run: OpenRun = on_one_rank,
) -> int:
    """Return the number of samples in every compared run: about 1.25 times as many as the baseline needs.

    The learning-rate schedule depends on the length of a run, so the point at which the baseline reaches the target
    does too. Pilot runs search for a length at which the baseline reaches the target after about 4/5 of the run. The
    first pilot has the job's own length; the earlier pilots determine the length of each further one.

    Args:
        job: the job.
        seed: random seed for the pilots.
        on_pilot: called with the number of the pilot and its progress, from 0 to 1.
        needs_target: whether a job whose first pilot misses its target is refused.
        gradient_norm: as in the protocol.
        open_run: opens the engine of a run.

    Returns:
        Samples, a multiple of the evaluation interval; the job's own length if it has no target. If the first pilot
        misses the target, that length rounded up.

    Raises:
        InputError: if the first pilot misses a target that is needed; the message has one within reach.
    """
    stride = job.evaluate_every * job.batch_size
    if job.target is None:
        return job.total_samples
    length = math.ceil(job.total_samples / stride) * stride
    arrivals: dict[int, float] = {}
    longest_missed = 0
    for number in range(_PILOTS):
        on_step = _share_of(on_pilot, number, length)
        record = pilot(job, length, seed=seed, on_step=on_step, gradient_norm=gradient_norm, open_run=open_run)
        if record.reached:
            arrivals[length] = record.samples / length
            if _ARRIVAL[0] <= arrivals[length] <= _ARRIVAL[1]:
                return length
            wanted = HORIZON * record.samples
        elif not arrivals:
            if needs_target:
                raise _out_of_reach(job, record, gradient_norm)
            return length
        else:
            longest_missed = max(longest_missed, length)
            wanted = math.sqrt(length * min(arrivals))
        length = math.ceil(max(wanted, longest_missed + 1) / stride) * stride
        if length in arrivals:
            break
    return min(arrivals)


def _out_of_reach(job: Job, record: RunRecord, gradient_norm: float | None) -> InputError:
    """Return the error for a job whose baseline misses its target, with the target that it would have reached."""
    if record.failure is not None:
        return InputError(
            f"the baseline ends with {record.failure} after {record.steps} steps",
            where=f"job {job.name!r}",
            allowed="a baseline that trains to its end",
        )
    if gradient_norm is not None and any(job.arrived(metric) for _, samples, metric in record.curve if samples):
        ends = "" if record.gradient_norm is None else f": it ends with {record.gradient_norm:.4g}"
        return InputError(
            f"the baseline reaches its target, but never with a gradient norm of at most {gradient_norm:g}{ends}",
            where=f"job {job.name!r}",
            allowed="a larger --gradient-norm, or more max_steps",
        )
    best = min if job.goal == "min" else max
    trained = [(samples, metric) for _, samples, metric in record.curve if samples]
    reached = best(metric for _, _, metric in record.curve)
    # The target is best reached after about four fifths of a run, so that other seeds reach it too.
    early = [metric for samples, metric in trained if samples <= record.samples / HORIZON] or [reached]
    before = [metric for _, samples, metric in record.curve if not samples]
    problem = (
        f"the baseline misses the target of {job.target:g}: its best metric in {record.steps} steps is {reached:g}"
    )
    remedies = ["more max_steps", "target=None, to compare the time per sample"]
    if best([best(early), *before]) in before:
        problem += ", which is no better than before training"
    else:
        remedies.insert(0, f"a target of about {_within_reach(best(early), job.goal)}")
    return InputError(problem, where=f"job {job.name!r}", allowed="; or ".join(remedies))


def _within_reach(metric: float, goal: str) -> str:
    """Return a metric in four digits, rounded to the side that is easier to reach."""
    rounding = decimal.ROUND_CEILING if goal == "min" else decimal.ROUND_FLOOR
    return f"{float(decimal.Context(prec=4, rounding=rounding).create_decimal(repr(metric))):g}"


def pilot(
    job: Job,
    samples: int,
    *,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
    gradient_norm: float | None = None,
    open_run: OpenRun = on_one_rank,
) -> RunRecord:
    """Train the baseline until it reaches the target, with a schedule for the given number of samples."""
    options = EngineOptions(total_samples=samples, meter_memory=False)
    with contextlib.closing(open_run(job, seed, options)) as engine:
        run = _Run(
            job=job,
            policy=StaticPolicy("baseline", engine.space.baseline()),
            engine=engine,
            seed=seed,
            samples=samples,
            on_step=on_step,
            gradient_norm=gradient_norm,
        )
        return run.record(stop_at_target=True)


def _share_of(on_pilot: Callable[[int, float], None] | None, number: int, length: int) -> Callable[[int], None] | None:
    return None if on_pilot is None else lambda samples: on_pilot(number, samples / length)


def compare(
    job: Job,
    arms: Sequence[Arm],
    protocol: Protocol,
    *,
    device: str,
    tracker: Tracker | None = None,
    journal: Journal | None = None,
    reporter: Reporter | None = None,
    intensity: Intensity | None = None,
    open_run: OpenRun = on_one_rank,
) -> dict[str, Any]:
    """Run every arm on every seed and return ``comparison.json`` as an object.

    Args:
        job: the job.
        arms: the arms, the baseline first.
        protocol: the declared protocol.
        device: name of the device.
        tracker: logs runs.
        journal: journal of finished runs, which are not repeated.
        reporter: shows how many runs are done.
        intensity: carbon intensity, to add the grams of CO2 of runs with known energy; ``None`` adds none.
        open_run: opens the engine of a run.
    """
    if tracker is not None:
        tracker.tags({"protocol_sha256": protocol.digest, "protocol": json.dumps(asdict(protocol))})
        tracker.settle(10.0)
    journal, repetitions, shows = journal or Journal(), Repetitions(), reporter or Silent()
    measure_peaks(device_kind())
    records: dict[str, list[RunRecord]] = {arm.name: [] for arm in arms}
    for index, seed in enumerate(protocol.seeds):
        # A B C, then C B A: a drift of the machine's speed affects all arms alike.
        for arm in arms if index % 2 == 0 else list(reversed(arms)):
            on_step = _step_shower(shows, sum(map(len, records.values())), arm, seed, protocol)
            run = functools.partial(_undisturbed, arm.job or job, arm, seed, protocol, on_step, repetitions, open_run)
            found = journal.once({"run": arm.name, "seed": seed}, run, Run)
            record = RunRecord.from_json(found)
            for _, plan in record.plans:
                Plan.from_json(plan, where=journal.place)
            records[arm.name].append(record)
            if tracker is not None and not tracker.knows(_called(arm, record)):
                _track(tracker, arm, record)
    return _document(job, arms, records, protocol, device, intensity)


def _step_shower(reporter: Reporter, done: int, arm: Arm, seed: int, protocol: Protocol) -> Callable[[int], None]:
    """Return a function of the samples of a run so far that shows them, after some runs that are done."""
    return lambda samples: reporter.advance(
        done + min(samples / protocol.horizon_samples, 1.0), f"{arm.name}, seed {seed}"
    )


def _undisturbed(
    job: Job,
    arm: Arm,
    seed: int,
    protocol: Protocol,
    on_step: Callable[[int], None],
    repetitions: Repetitions,
    open_run: OpenRun,
) -> dict[str, Any]:
    """Run an arm on a seed, and once more if the machine was busy; return the record that was disturbed less."""
    record = _run_arm(job, arm, seed, protocol, on_step, open_run)
    if repetitions.is_due(record.waited_frac):
        again = _run_arm(job, arm, seed, protocol, on_step, open_run)
        repetitions.made(again.waited_frac)
        record = min(record, again, key=lambda one: math.inf if one.waited_frac is None else one.waited_frac)
    return record.to_json()


def _run_arm(
    job: Job,
    arm: Arm,
    seed: int,
    protocol: Protocol,
    on_step: Callable[[int], None] | None,
    open_run: OpenRun = on_one_rank,
) -> RunRecord:
    options = EngineOptions(total_samples=protocol.horizon_samples, watts=protocol.watts)
    with contextlib.closing(open_run(job, seed, options)) as engine:
        policy = arm.policy(engine.space)
        policy.reset()
        run = _Run(
            job=job,
            policy=policy,
            engine=engine,
            seed=seed,
            samples=protocol.horizon_samples,
            budget_bytes=protocol.memory_budget_bytes,
            dips=protocol.dips,
            on_step=on_step,
            gradient_norm=protocol.gradient_norm,
        )
        return run.record(stop_at_target=False)


@dataclass(slots=True, kw_only=True)
class _Run:
    """One run, which trains and evaluates a job under a policy for a number of samples."""

    job: Job
    policy: Policy
    engine: Engine
    seed: InitVar[int]
    samples: int
    budget_bytes: int | None = None
    dips: Dips | None = None
    on_step: Callable[[int], None] | None = None
    gradient_norm: float | None = None
    _record: RunRecord = field(init=False)
    _windows: int = field(init=False, default=0)
    # Optimizer steps and samples so far.
    _steps: int = field(init=False, default=0)
    _samples: int = field(init=False, default=0)
    # Whether the last metric was not finite.
    _diverged: bool = field(init=False, default=False)
    _trained_s: float = field(init=False, default=0.0)
    _step_s: list[float] = field(init=False, default_factory=list)
    _samples_per_step: list[float] = field(init=False, default_factory=list)
    _waits: list[tuple[float, float | None]] = field(init=False, default_factory=list)
    _parts: list[tuple[float, StepParts | None]] = field(init=False, default_factory=list)

    def __post_init__(self, seed: int) -> None:
        self._record = RunRecord(seed=seed)
        if self.budget_bytes is None:
            self.dips = None

    def record(self, *, stop_at_target: bool) -> RunRecord:
        began = time.time()
        try:
            return self._trained(stop_at_target=stop_at_target)
        finally:
            self._record.ran_s = (began, time.time())

    def _trained(self, *, stop_at_target: bool) -> RunRecord:
        record, engine = self._record, self.engine
        plan = getattr(self.policy, "plan", engine.space.baseline())
        self._apply(plan)
        reference: Measurement | None = None
        previous: Measurement | None = None
        self._evaluate()
        if stop_at_target and record.reached:
            return record
        while self._goes_on():
            window = self._run_window()
            reference = reference or window
            if window.failure is not None and not self._survived(window):
                record.failure, record.failure_detail = str(window.failure), window.failure_detail[:_LONGEST_DETAIL]
                break
            self._evaluate()
            if stop_at_target and record.reached:
                break
            observation = self._observe(window, reference, previous)
            previous = window
            began = time.perf_counter()
            self._apply(self.policy.decide(observation, engine.plan))
            # Include the time of the decision and of the switch.
            self._trained_s += time.perf_counter() - began
        record.waited_frac = mean_wait(self._waits)
        parts = mean_parts(self._parts)
        record.parts = None if parts is None else parts.to_json()
        record.alone = dict(getattr(self.policy, "alone", {}))
        record.steps, record.samples = self._steps, self._samples
        if self._step_s:
            record.throughput = statistics.fmean(self._samples_per_step) / statistics.median(self._step_s)
        if record.failure is None and self._diverged:
            record.failure = str(Failure.NON_FINITE)
        record.final_metric = record.curve[-1][2] if record.curve and record.failure is None else None
        if self.job.target is None and record.final_metric is not None and self._norm_met:
            # Without a target, a run ends with its last sample.
            record.reached, record.time_to_target_s = True, record.curve[-1][0]
        return record

    @property
    def _norm_met(self) -> bool:
        """Return whether the last window's gradient norm is within the limit; an unknown one is not."""
        norm = self._record.gradient_norm
        return Constraints(gradient_norm=self.gradient_norm).met(
            loss=0.0, memory=0.0, gradient_norm=math.nan if norm is None else norm
        )

    def _goes_on(self) -> bool:
        """Return whether the run has not ended: at its steps if these are the job's own length, else at its samples."""
        return self._samples < self.samples and (self._last_step is None or self._steps < self._last_step)

    @property
    def _last_step(self) -> int | None:
        # Without a target, a run is as long as the user's, also if batches are ragged.
        return self.job.max_steps if self.job.target is None and self.job.batching == "fixed" else None

    def _run_window(self) -> Measurement:
        """Train to the next evaluation; with dips, repeat an out-of-memory window under the leanest plan."""
        if self.dips is not None and self.budget_bytes is not None:
            self.engine.memory_budget_bytes = self.dips.budget(self._windows, self.budget_bytes, self._record.seed)
        self._windows += 1
        began = self._samples
        window = self.engine.run(self._window_steps(began))
        self._take(window)
        if not self._survived(window):
            return window
        self._record.out_of_memory += 1
        plan = self.engine.plan
        self.engine.apply(self.engine.space.leanest())
        again = self.engine.run(self._window_steps(began))
        self._take(again)
        self.engine.apply(plan)
        if again.failure is not None:
            return replace(again, failure=Failure.CRASHED, failure_detail=f"the leanest plan: {again.failure_detail}")
        return replace(window, total_s=window.total_s + again.total_s)

    def _survived(self, window: Measurement) -> bool:
        """Return whether a window ran out of memory but the run continues, as it does in comparisons with dips."""
        return self.dips is not None and window.failure in _OUT_OF_MEMORY

    def _window_steps(self, began: int) -> int:
        """Return the number of steps to the next evaluation, which is due after the same number of samples for every k.

        Args:
            began: number of samples at the start of the window.
        """
        per_step = self.job.batch_size
        if self.job.batching == "adaptive":
            per_step *= self.engine.plan.accumulation_steps
        stride = self.job.evaluate_every * self.job.batch_size
        left = min(self.samples, began + stride) - self._samples
        steps = max(1, math.ceil(left / per_step))
        return steps if self._last_step is None else min(steps, self._last_step - self._steps)

    def _apply(self, plan: Plan) -> None:
        if not self._record.plans or plan != self.engine.plan:
            self._record.plans.append((self._steps, plan.to_json()))
        self.engine.apply(plan)

    def _take(self, window: Measurement) -> None:
        record = self._record
        self._steps += window.steps
        self._samples += window.samples
        self._trained_s += window.total_s
        self._waits.append((window.total_s, window.waited_frac))
        self._parts.append((len(window.step_s), window.parts))
        norm = math.nan if window.gradient is None else window.gradient.norm
        record.gradient_norm = norm if math.isfinite(norm) else None
        self._step_s.extend(window.step_s)
        if window.samples_per_step is not None:
            self._samples_per_step.append(window.samples_per_step)
        if window.total_energy_j is not None:
            record.energy_j = (record.energy_j or 0.0) + window.total_energy_j
            record.energy_source = window.energy_source
        peaks = [peak for peak in (record.peak_bytes, window.peak_bytes) if peak is not None]
        record.peak_bytes = max(peaks, default=None)
        record.windows.append(_seen(window, self._steps))
        if window.failure in _OUT_OF_MEMORY and self.dips is None:
            record.within_budget = False
        if self.budget_bytes is not None and window.peak_bytes is not None:
            record.within_budget = record.within_budget and window.peak_bytes <= self.budget_bytes

    def _evaluate(self) -> None:
        record, samples = self._record, self._samples
        metric = self.engine.evaluate()
        self._diverged = not math.isfinite(metric)
        if self._diverged:
            # A perplexity may be infinite before training; at the end of a run, it is a failure.
            return
        record.curve.append((self._trained_s, samples, metric))
        if not record.reached and self.job.arrived(metric) and self._norm_met:
            record.reached = True
            record.time_to_target_s = self._trained_s
        if self.on_step is not None:
            self.on_step(samples)

    def _observe(self, window: Measurement, reference: Measurement, previous: Measurement | None) -> Observation:
        return Observation(
            space=self.engine.space,
            plan=self.engine.plan,
            window=window,
            reference=reference,
            previous_loss=None if previous is None else previous.loss,
            memory_budget_bytes=self._announced()[0] if self.budget_bytes is not None else None,
            budget_ahead=self._announced(),
            batch_size=self.job.batch_size,
            adaptive=self.job.batching == "adaptive",
            progress=min(self._samples / self.samples, 1.0),
        )

    def _announced(self) -> tuple[int, ...]:
        """Return the budgets of the next windows, as announced to the policy."""
        if self.budget_bytes is None:
            return ()
        if self.dips is None or not self.dips.told:
            return (self.budget_bytes,)
        ahead = range(self._windows, self._windows + LOOK_AHEAD)
        return tuple(self.dips.budget(window, self.budget_bytes, self._record.seed) for window in ahead)


def _seen(window: Measurement, step: int) -> dict[str, Any]:
    """Return a window's document for reports; ``step`` is the run's number of optimizer steps after the window."""
    gradient = window.gradient
    # Leave out an estimate from before this window.
    fed = gradient is not None and gradient.noise_scale_age_steps in range(window.steps)
    scale = gradient.noise_scale if gradient is not None and fed else None
    return {
        "step": step,
        "seconds_per_step": window.seconds_per_step,
        "peak_bytes": window.peak_bytes,
        "memory_budget_bytes": window.memory_budget_bytes,
        "noise_scale": scale if scale is not None and math.isfinite(scale) else None,
        "failure": None if window.failure is None else str(window.failure),
    }


def _document(
    job: Job,
    arms: Sequence[Arm],
    records: Mapping[str, Sequence[RunRecord]],
    protocol: Protocol,
    device: str,
    intensity: Intensity | None,
) -> dict[str, Any]:
    targeted, base = job.target is not None, records[arms[0].name]
    judged = {arm.name: judge(arm, records[arm.name], base, protocol, job.goal, targeted=targeted) for arm in arms[1:]}
    gate = judged.pop(GATE, None)
    entries = list(judged.values()) if gate is None else gated(list(judged.values()), gate)
    busy = _busy([record.waited_frac for arm in arms for record in records[arm.name]])
    return {
        "version": COMPARISON_VERSION,
        "job": job.name,
        "device": device,
        **_fp32(arms[0].job or job),
        "seeds": list(protocol.seeds),
        "memory_budget_bytes": protocol.memory_budget_bytes,
        "dips": None if protocol.dips is None else asdict(protocol.dips),
        "baseline": arms[0].name,
        **({} if protocol.gradient_norm is None else {"gradient_norm": protocol.gradient_norm}),
        "metric": {"goal": job.goal, "target": job.target, "margin": protocol.margin},
        "horizon_samples": protocol.horizon_samples,
        "protocol_sha256": protocol.digest,
        "indication_only": len(protocol.seeds) < FEWEST_FOR_A_CLAIM,
        "arms": [_arm_json(arm, arm.job or job, records[arm.name], intensity) for arm in arms],
        "gate": gate,
        "busy": busy,
        "against_baseline": entries if busy is None else disturbed(entries, busy),
    }


def _busy(waits: Sequence[float | None]) -> dict[str, Any] | None:
    """Return how many runs of a comparison stayed disturbed, and how much at most; ``None`` if none did."""
    found = [wait for wait in waits if wait is not None and is_disturbed(wait)]
    return {"runs": len(found), "of": len(waits), "waited_frac_max": max(found)} if found else None


def _fp32(baseline: Job) -> dict[str, Any]:
    """Return the baseline's fp32 arithmetic on an accelerator; empty on a CPU."""
    kind = device_kind()
    if not is_accelerator(kind):
        return {}
    with fp32_computed_in(baseline.launch.fp32):
        return {"fp32": fp32_arithmetic(kind)}


def _arm_json(arm: Arm, job: Job, records: Sequence[RunRecord], intensity: Intensity | None) -> dict[str, Any]:
    live = any(len(record.plans) > 1 for record in records)
    runs = [record.to_json() for record in records]
    if intensity is not None:
        for run, record in zip(runs, records, strict=True):
            run["grams"] = None if record.energy_j is None else intensity.grams(record.energy_j, *record.ran_s)
    launch = {"launch": job.launch.to_json()} if job.launch != Launch() else {}
    for run in runs:
        run["plans"] = [{**entry, "plan": {**entry["plan"], **launch}} for entry in run["plans"]]
    document: dict[str, Any] = {"name": arm.name, "tuning_s": arm.tuning_s, "tuning_steps": arm.tuning_steps}
    if not live:
        document["plan"] = runs[0]["plans"][0]["plan"]
        for run in runs:
            del run["plans"], run["windows"]
    return {**document, "runs": runs}


def _called(arm: Arm, record: RunRecord) -> str:
    return f"{arm.name} seed {record.seed}"


def _track(tracker: Tracker, arm: Arm, record: RunRecord) -> None:
    began, ended = record.ran_s
    key = tracker.begin(_called(arm, record), at_s=began)
    plans = [Plan.from_json(plan) for _, plan in record.plans]
    tracker.params(
        {"arm": arm.name, "seed": record.seed, "plan": plans[0] if plans else "", "plans": len(plans)}, run=key
    )
    for seconds, samples, metric in record.curve:
        tracker.metrics({"metric": metric, "train_s": seconds}, step=samples, run=key, at_s=began + seconds)
    tracker.metrics(
        {
            "time_to_target_s": record.time_to_target_s,
            "final_metric": record.final_metric,
            "peak_bytes": record.peak_bytes,
            "throughput": record.throughput,
            "energy_j": record.energy_j,
            "waited_frac": record.waited_frac,
            **({} if record.parts is None else StepParts.from_json(record.parts).metrics()),
        },
        run=key,
        at_s=ended,
    )
    tracker.end(key, failed=record.failure is not None, at_s=ended)
    tracker.settle(5.0)

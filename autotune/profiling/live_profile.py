"""Profile a live run from the few steps that were watched, scaled to one batch size and to every k.

Storage does not change the results of training, so it can be varied in the run's own steps. Choices that were not run,
as they may not fit, are bounded from above: while a unit is recomputed in backward, all that it would save is alive.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from autotune.cost_model.profile import Calibration, Profile
from autotune.cost_model.time_model import summed_seconds
from autotune.errors import ProfileError
from autotune.mechanics.step_trace import Phase
from autotune.plan import Plan, PlanSpace
from autotune.profiling.profile_assembly import assemble
from autotune.profiling.step_record import StepRecord, StepsAtK, TimedStep, TracedStep, common_precision

# The largest micro-batch over the smallest from which steps tell how their time depends on it.
_TELLING = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTrace(TracedStep):
    """A traced step of a live run.

    Attributes:
        static_bytes: bytes of model and optimizer state.
        seconds: seconds by phase and segment while it was traced.
    """

    static_bytes: int
    seconds: Mapping[tuple[Phase, int], float]


def live_profile(
    job: str,
    device: str,
    space: PlanSpace,
    traces: Sequence[LiveTrace],
    timed: Sequence[TimedStep] = (),
    *,
    batch_size: int,
    length_spread: float = 0.0,
    growth: float = 2.0,
) -> Profile:
    """Return a profile from the watched steps of a live run, with upper bounds for what was not run.

    Args:
        job: name of the run.
        device: name of the device.
        space: the plans that the run allows.
        traces: traced steps, at least one; each has one precision for all units.
        timed: steps that were timed, under any plans with the k of traced steps.
        batch_size: samples in a batch.
        length_spread: standard deviation of the logarithm of a batch's bytes.
        growth: exponent with which memory grows with a batch's size.
    """
    if space.k_splits:
        traces = everywhere = [*traces, *_at_smaller_ks(traces)]
    else:
        everywhere = [*traces, *_of_more_batches(traces, space.accumulation_choices)]
    size = max(trace.batch_bytes for trace in everywhere)
    while_traced = [_timed_while_traced(trace) for trace in traces]
    if space.k_splits:
        timed, while_traced = _with_batch_of(size, timed, while_traced), _with_batch_of(size, while_traced, timed)
    watched = [*timed, *while_traced]
    record = StepRecord(
        job=job,
        device=device,
        batch_size=batch_size,
        static_bytes=max(trace.static_bytes for trace in traces),
        steps=[
            StepsAtK(
                accumulation_steps=k,
                traces=[_at_size(trace, size, growth) for trace in everywhere if trace.plan.accumulation_steps == k],
                timed=_timed_at(watched, k, space),
            )
            for k in sorted({trace.plan.accumulation_steps for trace in everywhere})
        ],
        length_spread=length_spread,
        is_sparse=True,
    )
    return _calibrated(assemble(record, space), timed, size)


def _at_smaller_ks(traces: Sequence[LiveTrace]) -> list[LiveTrace]:
    """Return upper bounds of each precision's steps at every k at which only other precisions were traced.

    They are its steps at the next larger k, scaled up to the larger micro-batches, or else those at its largest k.
    """
    found = []
    for precision in dict.fromkeys(common_precision(trace.plan) for trace in traces):
        alike = [trace for trace in traces if common_precision(trace.plan) == precision]
        known = {trace.plan.accumulation_steps for trace in alike}
        for k in {trace.plan.accumulation_steps for trace in traces} - known:
            larger = min((other for other in known if other > k), default=max(known))
            for trace in alike:
                if trace.plan.accumulation_steps == larger:
                    grown = _at_size(trace, int(trace.batch_bytes * max(larger / k, 1)), 1.0)
                    plan = trace.plan.changed(accumulation_steps=k)
                    found.append(replace(grown, plan=plan, batch_bytes=trace.batch_bytes))
    return found


def _of_more_batches(traces: Sequence[LiveTrace], ks: Sequence[int]) -> list[LiveTrace]:
    """Return traces of steps of more batches, which need the same memory as the traced steps of several batches.

    Args:
        traces: traced steps.
        ks: numbers of batches that a step may have.
    """
    several = sorted({trace.plan.accumulation_steps for trace in traces} - {1})
    if not several:
        return []
    own = [trace for trace in traces if trace.plan.accumulation_steps == several[0]]
    return [
        replace(trace, plan=trace.plan.changed(accumulation_steps=k))
        for k in ks
        if k > several[0] and k not in several
        for trace in own
    ]


def _at_size(trace: LiveTrace, batch_bytes: int, growth: float) -> LiveTrace:
    """Return an upper bound of a traced step's memory with a batch of at least the same size."""
    factor = (batch_bytes / max(trace.batch_bytes, 1)) ** growth
    if factor <= 1.0 + 1e-9:
        return trace
    seen = trace.attribution

    def grown(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((int(first * factor), int(later * factor)) for first, later in pairs)

    attribution = replace(
        seen,
        saved=tuple(int(value * factor) for value in seen.saved),
        forward_peaks=grown(seen.forward_peaks),
        backward_peaks=grown(seen.backward_peaks),
        boundaries={key: replace(one, size=int(one.size * factor)) for key, one in seen.boundaries.items()},
    )
    return replace(trace, attribution=attribution, batch_bytes=batch_bytes)


def _timed_while_traced(trace: LiveTrace) -> TimedStep:
    return TimedStep(plan=trace.plan, batch_bytes=trace.traced_bytes, seconds=trace.seconds, traced=True)


def _with_batch_of(size: int, steps: Sequence[TimedStep], others: Sequence[TimedStep]) -> list[TimedStep]:
    """Return timed steps as they would be with a batch of another size, which k cuts.

    The passes of a step take a time for each micro-batch and a time for each byte: k*a + b*bytes. Where launching
    operations is what takes time, a small batch takes nearly as long as a large one. The update takes the same time.

    Args:
        size: bytes of the batch.
        steps: the timed steps.
        others: further timed steps, which show a and b where these do not.
    """
    a, b = _pass_law(steps) or _pass_law(others) or (0.0, 1.0)

    def scaled(step: TimedStep) -> TimedStep:
        k, own = step.plan.accumulation_steps, step.batch_bytes
        factor = (a * k + b * size) / (a * k + b * own)
        seconds = {key: value * (1.0 if key[0] == "update" else factor) for key, value in step.seconds.items()}
        return replace(step, batch_bytes=size, seconds=seconds)

    return list(map(scaled, steps))


def _pass_law(steps: Sequence[TimedStep]) -> tuple[float, float] | None:
    """Return the seconds of a micro-batch and of a byte that explain steps best; ``None`` if they do not tell.

    Their relative errors are least in the sense of squares, and neither is negative. Plans that recompute differ by
    some tenths, which is little beside the ratio of sizes that is to be explained.
    """
    passes = [sum(value for key, value in step.seconds.items() if key[0] != "update") for step in steps]
    rows = [
        (step.plan.accumulation_steps / seconds, step.batch_bytes / seconds)
        for step, seconds in zip(steps, passes, strict=True)
        if seconds > 0
    ]
    sizes = [step.batch_bytes / step.plan.accumulation_steps for step in steps]
    if not rows or max(sizes) < _TELLING * min(sizes):
        return None
    found, _ = nnls(np.array(rows), np.ones(len(rows)))
    return (float(found[0]), float(found[1])) if found.any() else None


def _timed_at(steps: Sequence[TimedStep], k: int, space: PlanSpace) -> list[TimedStep]:
    """Return the timed steps for one k.

    Under adaptive batching these are all steps, each converted to k batches. With the steps of that k alone, a busy
    machine would make some k look slower than others.
    """
    if space.k_splits:
        return [step for step in steps if step.plan.accumulation_steps == k]
    return [_with_batches(step, k) for step in steps]


def _with_batches(step: TimedStep, k: int) -> TimedStep:
    """Return a timed step as it would be with k batches and one update."""
    factor = k / step.plan.accumulation_steps
    seconds = {key: value * (1.0 if key[0] == "update" else factor) for key, value in step.seconds.items()}
    return replace(step, plan=step.plan.changed(accumulation_steps=k), seconds=seconds)


def _calibrated(profile: Profile, timed: Sequence[TimedStep], batch_bytes: int) -> Profile:
    """Return the profile with its sums scaled to the total seconds of the timed steps."""
    ratios = [
        sum(step.seconds.values()) * batch_bytes / step.batch_bytes / total
        for step in timed
        if (total := _summed(profile, step.plan)) > 0
    ]
    return replace(profile, calibration=Calibration(scale=statistics.median(ratios))) if ratios else profile


def _summed(profile: Profile, plan: Plan) -> float:
    """Return the predicted seconds of a plan without calibration; 0 if the profile has no cost of a choice in it."""
    try:
        return summed_seconds(profile, plan)
    except ProfileError:
        return 0.0

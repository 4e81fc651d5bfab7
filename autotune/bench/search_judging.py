"""Evaluation of search costs: when each search arrived, which medians are known, and which claims hold.

This module runs and measures nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.errors import InputError
from autotune.measurement import Measurement
from autotune.plan import Plan
from autotune.stats import censored_median

# A search arrives with its first plan that is slower than the best known plan by at most this share.
WITHIN_FRAC = 0.02
# Share by which a plan may be slower after a few rounds and still turn out to be the best one.
CLOSE_FRAC = 0.08
# Methods in the claim: the first one is compared with the others.
COMPARED = ("planner", "optuna-cold", "optuna-warm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """A point on the curve of a search: its best plan from this point on.

    Attributes:
        steps: real optimizer steps spent so far.
        seconds: seconds spent so far.
        plan: the plan.
        window_s: seconds per sample of progress in the window that chose it.
        chosen: whether the plan is the method's answer, after the finals.
    """

    steps: int
    seconds: float
    plan: Plan
    window_s: float
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRun:
    """One method's run in one repetition.

    Attributes:
        method: one of ``METHODS``.
        seed: random seed for the repetition.
        points: the curve, in order.
        limit_steps: number of real steps within which it had to arrive.
        seconds: seconds of the whole run.
        failure: reason why it ended without a plan; ``None`` if it found one.
    """

    method: str
    seed: int
    points: tuple[Improvement, ...]
    limit_steps: int
    seconds: float
    failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """Speed of a plan in new windows.

    Attributes:
        seconds_per_sample: seconds per sample of progress; infinite if it does not fit the budget.
        halves: the same from even and from odd windows; their difference shows the noise.
        window: all of its windows, merged into one.
    """

    seconds_per_sample: float
    halves: tuple[float, float]
    window: Measurement


def improvements(
    windows: Sequence[tuple[Plan, Measurement, int, float]], seconds_of: Callable[[Plan, Measurement], float]
) -> list[Improvement]:
    """Return the curve of the best plan so far that fits the budget; only the first window of a plan counts.

    Args:
        windows: plan, window, and the steps and seconds spent by its end, in the order of measuring.
        seconds_of: returns seconds per sample of progress, infinite where the plan does not fit.
    """
    points: list[Improvement] = []
    seen: set[Plan] = set()
    best = math.inf
    for plan, window, steps, spent_s in windows:
        if plan in seen:
            continue
        seen.add(plan)
        found = seconds_of(plan, window)
        if found < best:
            best = found
            points.append(Improvement(steps=steps, seconds=spent_s, plan=plan, window_s=found, chosen=False))
    return points


def steadied(rounds: Sequence[Mapping[Plan, float]]) -> dict[Plan, list[float]]:
    """Return each plan's seconds, round by round, corrected for the machine's speed in each round.

    The speed of a shared machine drifts by more than plans differ, but affects all plans of a round alike. The speed of
    a round is the median, over its plans, of seconds in that round over the plan's median seconds.

    Args:
        rounds: seconds by plan in each round; a plan may miss rounds, and is infinite where it does not fit.
    """
    plans = list(dict.fromkeys(plan for one in rounds for plan in one))
    usual = {plan: statistics.median(one[plan] for one in rounds if plan in one) for plan in plans}
    found: dict[Plan, list[float]] = {plan: [] for plan in plans}
    for one in rounds:
        shares = [seconds / usual[plan] for plan, seconds in one.items() if math.isfinite(max(seconds, usual[plan]))]
        speed = statistics.median(shares) if shares else 1.0
        for plan, seconds in one.items():
            found[plan].append(seconds / speed)
    return found


def judge_searches(runs: Sequence[SearchRun], worths: Mapping[Plan, Worth]) -> dict[str, Any]:
    """Return the document's figures that follow from the curves and from the speed of their plans.

    Args:
        runs: the runs of all methods in all repetitions.
        worths: speed of each plan of the curves.

    Raises:
        InputError: if none of the plans fits.
    """
    best = min(worth.seconds_per_sample for worth in worths.values())
    if math.isinf(best):
        raise InputError("no plan fits when it is measured again", where="--memory-budget", allowed="a larger budget")
    numbers = {plan: number for number, plan in enumerate(worths)}
    close = [worth for worth in worths.values() if worth.seconds_per_sample <= best * (1 + CLOSE_FRAC)]
    methods: dict[str, dict[str, Any]] = {}
    for method in dict.fromkeys(run.method for run in runs):
        own = sorted((run for run in runs if run.method == method), key=lambda run: run.seed)
        arrivals = [_arrival(run, worths, best) for run in own]
        regrets = [_regret(run, worths, best) for run in own]
        methods[method] = {
            "steps": spent_summary(
                [None if point is None else point.steps for point in arrivals], [run.limit_steps for run in own]
            ),
            "seconds": spent_summary(
                [None if point is None else point.seconds for point in arrivals], [run.seconds for run in own]
            ),
            "regret_frac": {"median": censored_median(regrets), "values": regrets},
            "failures": [run.failure for run in own],
            "curves": [[_point(point, numbers) for point in run.points] for run in own],
        }
    return {
        "within_frac": WITHIN_FRAC,
        "best_plan": min(range(len(worths)), key=lambda number: list(worths.values())[number].seconds_per_sample),
        "best_seconds_per_sample": best,
        "repeat_difference_frac": statistics.median(abs(worth.halves[0] / worth.halves[1] - 1) for worth in close),
        "plans": [_plan(plan, worth, best) for plan, worth in worths.items()],
        "methods": methods,
        "planner_against": {
            other: {unit: spent_ratio(methods["planner"][unit], methods[other][unit]) for unit in ("steps", "seconds")}
            for other in COMPARED[1:]
        },
        "claim": _claim(methods),
    }


def _arrival(run: SearchRun, worths: Mapping[Plan, Worth], best: float) -> Improvement | None:
    """Return the first point whose plan fits and is within ``WITHIN_FRAC`` of the best one."""
    limit = best * (1 + WITHIN_FRAC)
    return next((point for point in run.points if worths[point.plan].seconds_per_sample <= limit), None)


def _regret(run: SearchRun, worths: Mapping[Plan, Worth], best: float) -> float | None:
    """Return the share by which the method's answer is slower than the best plan; ``None`` without a fitting answer."""
    if run.failure is not None:
        return None
    found = worths[run.points[-1].plan].seconds_per_sample / best - 1
    return found if math.isfinite(found) else None


def spent_summary(values: Sequence[float | None], limits: Sequence[float]) -> dict[str, Any]:
    """Return the median of the steps or seconds that repetitions spent until they arrived.

    Args:
        values: spending of each repetition until it arrived; ``None`` if it did not.
        limits: total of each repetition; a lower bound on its spending if it did not arrive.

    Returns:
        ``median`` (``None`` if it is not known), ``more_than`` (a lower bound if the median is not known, ``None``
        otherwise), ``values`` and ``limits``.
    """
    median = censored_median(values)
    bounded = [limit if value is None else value for value, limit in zip(values, limits, strict=True)]
    return {
        "median": median,
        "more_than": statistics.median(bounded) if median is None else None,
        "values": list(values),
        "limits": list(limits),
    }


def spent_ratio(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ratio of two summaries' medians, and the ratio in each repetition.

    Args:
        first: a summary from :func:`spent_summary`.
        second: the summary to divide by.

    Returns:
        ``ratio`` (``None`` if the first did not arrive), ``at_most`` (whether only the second did not, so that the
        true ratio is smaller), and ``values`` with one such pair per repetition.
    """

    def one(own: float | None, other: float | None, other_limit: float | None) -> dict[str, Any]:
        base = other_limit if other is None else other
        known = own is not None and base is not None
        return {"ratio": own / base if own is not None and base else None, "at_most": known and other is None}

    pairs = zip(first["values"], second["values"], second["limits"], strict=True)
    return {
        **one(first["median"], second["median"], second["more_than"]),
        "values": [one(own, other, limit) for own, other, limit in pairs],
    }


def _claim(methods: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return whether the planner needs at most a tenth of cold Optuna's steps, and fewer than warm Optuna's.

    ``None`` means that Optuna did not arrive and its budget of steps is too small to tell.
    """
    own = methods["planner"]["steps"]["median"]
    cold, warm = methods["optuna-cold"]["steps"], methods["optuna-warm"]["steps"]

    def holds(other: Mapping[str, Any], wins: Callable[[float], bool]) -> bool | None:
        if own is None:
            return False
        if other["median"] is not None:
            return wins(other["median"])
        return True if wins(other["more_than"]) else None

    return {
        "tenth_of_cold": holds(cold, lambda steps: 10 * own <= steps),
        "fewer_than_warm": holds(warm, lambda steps: own < steps),
    }


def _point(point: Improvement, numbers: Mapping[Plan, int]) -> dict[str, Any]:
    return {
        "steps": point.steps,
        "seconds": point.seconds,
        "plan": numbers[point.plan],
        "window_seconds_per_sample": point.window_s if math.isfinite(point.window_s) else None,
        "chosen": point.chosen,
    }


def _plan(plan: Plan, worth: Worth, best: float) -> dict[str, Any]:
    fits = math.isfinite(worth.seconds_per_sample)
    return {
        "plan": plan.to_json(),
        "fits": fits,
        "failure": None if worth.window.failure is None else str(worth.window.failure),
        "peak_bytes": worth.window.peak_bytes,
        "seconds_per_sample": worth.seconds_per_sample if fits else None,
        "regret_frac": worth.seconds_per_sample / best - 1 if fits else None,
        "timed_steps": len(worth.window.step_s),
    }


def shown(found: Mapping[str, Any]) -> str:
    """Return the median of a summary as text; ``> 240`` if only a lower bound is known."""
    return f"{found['median']:,.0f}" if found["median"] is not None else f"> {found['more_than']:,.0f}"


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return, in words, whether planning is as much cheaper than searching as claimed."""
    words = {True: "holds", False: "does not hold", None: f"cannot be told within {document['steps']} steps"}
    methods, claim = document["methods"], document["claim"]
    steps = {name: shown(methods[name]["steps"]) for name in COMPARED}
    return [
        f"within {WITHIN_FRAC:.0%} at no more than 1/10 of cold Optuna's steps: {words[claim['tenth_of_cold']]} "
        f"({steps['planner']} against {steps['optuna-cold']}); fewer than warm: {words[claim['fewer_than_warm']]} "
        f"({steps['planner']} against {steps['optuna-warm']})"
    ]

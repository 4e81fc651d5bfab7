"""Judge what finding a plan cost: when each curve arrived, what medians are known, and what may be claimed of them.

This file only counts; what was run and measured is handed over.
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

# A plan has arrived if it is no slower than the best plan known by more than this share.
WITHIN_FRAC = 0.02
# Plans that may be the best one, as far as a few rounds can tell.
CLOSE_FRAC = 0.08
# Whose costs the claim compares: the first with the others.
COMPARED = ("planner", "optuna-cold", "optuna-warm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One improvement of a search: from here on, this is the best plan it knows.

    Attributes:
        steps: real optimizer steps spent so far.
        seconds: seconds spent so far.
        plan: the plan.
        window_s: seconds per sample of progress in the window that chose it.
        chosen: whether it is the method's answer, after the finals.
    """

    steps: int
    seconds: float
    plan: Plan
    window_s: float
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One method's run in one repetition.

    Attributes:
        method: one of ``METHODS``.
        seed: of the repetition.
        points: the curve, in order.
        limit_steps: real steps within which it had to arrive.
        seconds: seconds that it took in all.
        failure: why it ended without a plan; ``None`` if it has one.
    """

    method: str
    seed: int
    points: tuple[Point, ...]
    limit_steps: int
    seconds: float
    failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What a plan turned out to be worth in fresh windows.

    Attributes:
        seconds_per_sample: seconds per sample of progress; infinite if it does not fit the budget.
        halves: the same from every other window; how much they differ says what the figure is worth.
        window: all of its windows as one.
    """

    seconds_per_sample: float
    halves: tuple[float, float]
    window: Measurement


def improvements(
    windows: Sequence[tuple[Plan, Measurement, int, float]], seconds_of: Callable[[Plan, Measurement], float]
) -> list[Point]:
    """Return the curve of the best plan so far that fits the budget; a plan's first window is what it is known by.

    Args:
        windows: plan, window, and the steps and seconds spent after it, in the order of measuring.
        seconds_of: returns seconds per sample of progress; infinite for what does not fit.
    """
    points: list[Point] = []
    seen: set[Plan] = set()
    best = math.inf
    for plan, window, steps, spent_s in windows:
        if plan in seen:
            continue
        seen.add(plan)
        found = seconds_of(plan, window)
        if found < best:
            best = found
            points.append(Point(steps=steps, seconds=spent_s, plan=plan, window_s=found, chosen=False))
    return points


def steadied(rounds: Sequence[Mapping[Plan, float]]) -> dict[Plan, list[float]]:
    """Return each plan's seconds, round by round, as if the machine had been equally fast in all rounds.

    A machine that others use drifts by more than plans differ; within a round all plans meet it alike. A round's speed
    is the median of what its plans took over what they take in the median of their rounds.

    Args:
        rounds: by plan, seconds in that round; a plan may miss some, and what did not fit is infinite.
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


def judge(courses: Sequence[Course], worths: Mapping[Plan, Worth]) -> dict[str, Any]:
    """Return the document's part that follows from the curves and from what their plans turned out to be worth.

    Raises:
        InputError: if none of the plans fits.
    """
    best = min(worth.seconds_per_sample for worth in worths.values())
    if math.isinf(best):
        raise InputError("no plan fits when it is measured again", where="--memory-budget", allowed="a larger budget")
    numbers = {plan: number for number, plan in enumerate(worths)}
    close = [worth for worth in worths.values() if worth.seconds_per_sample <= best * (1 + CLOSE_FRAC)]
    methods: dict[str, dict[str, Any]] = {}
    for method in dict.fromkeys(course.method for course in courses):
        own = sorted((course for course in courses if course.method == method), key=lambda course: course.seed)
        arrivals = [_arrival(course, worths, best) for course in own]
        regrets = [_regret(course, worths, best) for course in own]
        methods[method] = {
            "steps": summary(
                [None if point is None else point.steps for point in arrivals], [course.limit_steps for course in own]
            ),
            "seconds": summary(
                [None if point is None else point.seconds for point in arrivals], [course.seconds for course in own]
            ),
            "regret_frac": {"median": _median(regrets), "values": regrets},
            "failures": [course.failure for course in own],
            "curves": [[_point(point, numbers) for point in course.points] for course in own],
        }
    return {
        "within_frac": WITHIN_FRAC,
        "best_plan": min(range(len(worths)), key=lambda number: list(worths.values())[number].seconds_per_sample),
        "best_seconds_per_sample": best,
        "repeat_difference_frac": statistics.median(abs(worth.halves[0] / worth.halves[1] - 1) for worth in close),
        "plans": [_plan(plan, worth, best) for plan, worth in worths.items()],
        "methods": methods,
        "planner_against": {
            other: {unit: ratio(methods["planner"][unit], methods[other][unit]) for unit in ("steps", "seconds")}
            for other in COMPARED[1:]
        },
        "claim": _claim(methods),
    }


def _arrival(course: Course, worths: Mapping[Plan, Worth], best: float) -> Point | None:
    """Return the first point whose plan is nearly the best one known; what did not fit is worth nothing."""
    limit = best * (1 + WITHIN_FRAC)
    return next((point for point in course.points if worths[point.plan].seconds_per_sample <= limit), None)


def _regret(course: Course, worths: Mapping[Plan, Worth], best: float) -> float | None:
    """Return by what share the method's answer is slower than the best; ``None`` if it has none that fits."""
    if course.failure is not None:
        return None
    found = worths[course.points[-1].plan].seconds_per_sample / best - 1
    return found if math.isfinite(found) else None


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median with ``None`` as worse than every number; ``None`` if that is what it comes to."""
    found = statistics.median([math.inf if value is None else value for value in values])
    return found if math.isfinite(found) else None


def summary(values: Sequence[float | None], limits: Sequence[float]) -> dict[str, Any]:
    """Return the median of what repetitions spent, some of which may not have arrived.

    Args:
        values: what each spent; ``None`` if it did not arrive.
        limits: what each had spent when it gave up: it would have needed more than that.

    Returns:
        ``median`` (``None`` if it is not known), ``more_than`` (a lower bound, if it is not; else ``None``), ``values``
        and ``limits``.
    """
    median = _median(values)
    bounded = [limit if value is None else value for value, limit in zip(values, limits, strict=True)]
    return {
        "median": median,
        "more_than": statistics.median(bounded) if median is None else None,
        "values": list(values),
        "limits": list(limits),
    }


def ratio(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ratio of two summaries' medians, and of each repetition.

    Returns:
        ``ratio`` (``None`` if the first never arrived), ``at_most`` (whether the second never did, so that the true
        ratio is smaller), and ``values`` with one such pair per repetition.
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

    ``None``: Optuna did not arrive within its budget of steps, which is too small to tell.
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


def _point(point: Point, numbers: Mapping[Plan, int]) -> dict[str, Any]:
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
    """Return a summary's median for people: ``> 240`` where it is only known to be more."""
    return f"{found['median']:,.0f}" if found["median"] is not None else f"> {found['more_than']:,.0f}"


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return, in words, whether planning is cheaper than searching by as much as is claimed."""
    words = {True: "holds", False: "does not hold", None: f"cannot be told within {document['steps']} steps"}
    methods, claim = document["methods"], document["claim"]
    steps = {name: shown(methods[name]["steps"]) for name in COMPARED}
    return [
        f"within {WITHIN_FRAC:.0%} at no more than 1/10 of cold Optuna's steps: {words[claim['tenth_of_cold']]} "
        f"({steps['planner']} against {steps['optuna-cold']}); fewer than warm: {words[claim['fewer_than_warm']]} "
        f"({steps['planner']} against {steps['optuna-warm']})"
    ]

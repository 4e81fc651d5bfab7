"""Evaluation of planners, policies and searches on static jobs: one plan per job, compared with the optimum."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.agents.planner import greedy_plan
from autotune.agents.search import RandomSearch, Search
from autotune.campaign.policy_judging import (
    BenchSettings,
    Choose,
    Guarded,
    Judged,
    untrained_network,
)
from autotune.cost_model.cost_arrays import CostArrays
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.plan_pool import PlanPool
from autotune.cost_model.profile import Profile, Segment, StepTable
from autotune.cost_model.solver import SAFETY_MARGIN, Goal, samples_of_progress, solve
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import BudgetError
from autotune.gym.levers import Watch, levers_of
from autotune.gym.observation import Observation
from autotune.gym.planned_run import launch_pool
from autotune.gym.reward import Objective
from autotune.io.scratch import ScratchFolder
from autotune.measurement import Failure, GradientStatistics, Measurement
from autotune.plan import Plan
from autotune.simulator.online_planner import LOOK_AHEAD, Lanes, Planner, Situation
from autotune.simulator.random_jobs import draw_job
from autotune.stats import clustered_mean_interval

_DEEP = 48
# Largest factor by which shifted costs differ from the drawn ones.
_SHIFT = 2.0
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One static job.

    Attributes:
        told: the profile that planners know.
        truth: the true costs, which searches measure.
        budget_bytes: the memory budget.
        noise_scale: noise scale of the job at its start, in samples.
        best: the exact optimum under the true costs, in seconds per sample of progress.
    """

    told: Profile
    truth: Profile
    budget_bytes: int
    noise_scale: float
    best: float

    @property
    def usable_bytes(self) -> float:
        """Return the bytes that a plan's predicted peak may reach."""
        return self.budget_bytes * (1 - SAFETY_MARGIN)

    def fits(self, plan: Plan) -> bool:
        """Return whether a plan's predicted peak fits the usable budget."""
        return peak_bytes(self.truth, plan) <= self.usable_bytes * (1 + _ROUNDING)

    def regret(self, plan: Plan) -> float:
        """Return the additional time of a plan per sample of progress, in percent of the optimum."""
        return 100 * (_seconds(self.truth, plan, self.noise_scale) / self.best - 1)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A method's plan for a case, ``None`` if it found none, and the seconds of the decision."""

    plan: Plan | None
    seconds: float


def _seconds(profile: Profile, plan: Plan, noise_scale: float) -> float:
    """Return seconds per sample of progress."""
    return seconds_per_step(profile, plan) / samples_of_progress(profile, plan.accumulation_steps, noise_scale)


def static_cases(settings: BenchSettings, variant: str = "") -> list[Case]:
    """Return the static jobs of a table, each with a budget between the leanest plan's peak and the baseline's.

    Args:
        settings: number of jobs, their depth and storages, and the random seed.
        variant: "depth48" draws deep jobs; "shifted" multiplies the times of each unit by a random factor, which no job
            in training has and profiles include; "misjudged" does the same, but profiles do not include the factor.
    """
    generator, shifts = np.random.default_rng(settings.seed), np.random.default_rng([settings.seed, 1])
    depth = (_DEEP, _DEEP) if variant == "depth48" else settings.depth
    cases = []
    for _ in range(settings.jobs):
        job = draw_job(generator, depth=depth, storages=settings.storages)
        space = job.profile.space
        lean = (space.leanest().changed(accumulation_steps=k) for k in space.accumulation_choices)
        ends = [min(peak_bytes(job.profile, plan) for plan in lean), peak_bytes(job.profile, space.baseline())]
        peak = math.exp(generator.uniform(*np.log(sorted(ends))))
        budget = math.ceil(peak / (1 - SAFETY_MARGIN)) + 1
        noise = float(job.convergence.noise_scale(job.convergence.loss.at(0.0)))
        truth = job.profile if variant in ("", "depth48") else _shifted(shifts, job.profile)
        told = job.profile if variant == "misjudged" else truth
        best = solve(truth, budget, Goal(noise_scale=noise)).seconds_per_sample
        cases.append(Case(told=told, truth=truth, budget_bytes=budget, noise_scale=noise, best=best))
    return cases


def _shifted(generator: np.random.Generator, profile: Profile) -> Profile:
    """Return a profile whose times are multiplied by a random factor per unit and precision; bytes are unchanged."""
    factors = {
        (unit.name, str(precision)): math.exp(generator.uniform(-1, 1) * math.log(_SHIFT))
        for unit in profile.units
        for precision in profile.precisions
    }

    def segment(one: Segment) -> Segment:
        if one.unit is None:
            return one
        by = {name: factors[one.unit, name.partition("/")[0]] for name in one.costs}
        return replace(
            one,
            costs={
                name: replace(cost, forward_s=cost.forward_s * by[name], backward_s=cost.backward_s * by[name])
                for name, cost in one.costs.items()
            },
        )

    def table(one: StepTable) -> StepTable:
        return replace(one, segments=tuple(segment(part) for part in one.segments))

    return replace(profile, tables=tuple(table(one) for one in profile.tables))


def static_table(cases: Sequence[Case], judged: Judged, settings: BenchSettings, windows: int) -> dict[str, Any]:
    """Return one entry per method over static jobs.

    Planners and searches know the noise scale. Planners know the profile; searches measure the true costs. Optuna
    starts with the baseline and the leanest plan, as in ``tune``; random search starts with no plan.

    Args:
        cases: the jobs.
        judged: the policy.
        settings: settings of the evaluation.
        windows: number of windows that the policy expects in a run.
    """
    found: dict[str, list[list[Proposal]]] = {}
    setup_s = []
    for number, case in enumerate(cases):
        made = _alone(case, settings, optuna=number < settings.optuna_jobs)
        began = time.perf_counter()
        arrays = CostArrays([case.told])
        pool = launch_pool(case.told, arrays, case.budget_bytes)
        setup_s.append(time.perf_counter() - began)
        for name, (still, choosers) in _planner_based(judged).items():
            lane = one_lane(pool, arrays, still=still)
            made[name] = [_first_plan(case, arrays, Planner(lane, judged.settings), c, windows) for c in choosers]
        for name, proposals in made.items():
            found.setdefault(name, []).append(proposals)
    searches = ("random", "optuna")
    table = {name: _entry(cases, made, settings.evaluations * (name in searches)) for name, made in found.items()}
    for name in _planner_based(judged):
        table[name]["setup_s"] = float(np.median(setup_s))
    return table


def _alone(case: Case, settings: BenchSettings, *, optuna: bool) -> dict[str, list[Proposal]]:
    """Return the proposals of the methods that need no pool of plans."""
    goal = Goal(noise_scale=case.noise_scale)
    made = {
        "exact": _timed(lambda: solve(case.told, case.budget_bytes, goal).plan),
        "greedy": _timed(lambda: greedy_plan(case.told, case.budget_bytes, goal)),
        "random": _timed(lambda: _searched("random", case, settings)),
    }
    if optuna:
        made["optuna"] = _timed(lambda: _searched("optuna", case, settings))
    return {name: [proposal] for name, proposal in made.items()}


def _planner_based(judged: Judged) -> dict[str, tuple[bool, tuple[Choose | None, ...]]]:
    """Return, for each method based on a planner, whether it knows that all lengths are equal, and its choosers.

    The wary methods do not know it: they weigh the risk that the first window has a longer batch than was profiled.
    """
    networks = tuple(network.most_likely for network in judged.networks.values())
    untrained = (untrained_network(judged.shipped.width).most_likely,)
    return {
        "ppo": (True, networks),
        "shipped": (True, (Guarded(judged),)),
        "untrained": (True, untrained),
        "planner": (True, (None,)),
        "ppo_wary": (False, networks),
        "untrained_wary": (False, untrained),
        "planner_wary": (False, (None,)),
    }


def _timed(find: Callable[[], Plan | None]) -> Proposal:
    began = time.perf_counter()
    try:
        plan = find()
    except BudgetError:
        plan = None
    return Proposal(plan, time.perf_counter() - began)


def _first_plan(case: Case, arrays: CostArrays, planner: Planner, choose: Choose | None, windows: int) -> Proposal:
    watch, pool = Watch(planner), planner.lanes.pool
    situation = Situation(
        budget=np.full((1, LOOK_AHEAD), case.usable_bytes),
        progress=np.zeros(1),
        windows_left=np.array([float(windows)]),
        noise_scale=np.array([case.noise_scale]),
        switch_s=np.array([case.told.switch_s]),
    )
    began = time.perf_counter()
    levers = None if choose is None else levers_of(choose(watch.features(situation)))
    number = int(planner.decide(situation, levers)[0])
    seconds = time.perf_counter() - began
    return Proposal(arrays.decode(0, int(pool.k[0, number]), pool.choices[0, number]), seconds)


def one_lane(pool: PlanPool, arrays: CostArrays, *, still: bool) -> Lanes:
    """Return the single lane of a job."""
    return Lanes.of(pool, arrays, np.zeros(1, dtype=np.int64), np.array([still]))


def _searched(method: str, case: Case, settings: BenchSettings) -> Plan | None:
    """Return the best plan that a search finds; ``None`` if none of its plans fits."""
    space = case.truth.space
    if method == "random":
        return _best_told(RandomSearch(space, settings.seed), case, settings.evaluations)
    from autotune.agents.optuna_search import OptunaSearch

    with ScratchFolder() as folder:
        first = (space.baseline(), space.leanest())
        return _best_told(OptunaSearch(space, folder, settings.seed, first), case, settings.evaluations)


def _best_told(search: Search, case: Case, evaluations: int) -> Plan | None:
    truth, objective = case.truth, Objective()
    reference = _window(case, truth.space.baseline(), limited=False)
    best: tuple[float, Plan] | None = None
    for _ in range(evaluations):
        plan = search.ask()
        observation = Observation(
            space=truth.space,
            plan=plan,
            window=_window(case, plan),
            reference=reference,
            memory_budget_bytes=math.floor(case.usable_bytes),
            batch_size=truth.batch_size,
            adaptive=truth.batching == "adaptive",
        )
        cost = objective.cost(observation)
        search.tell(plan, observation, cost)
        if objective.feasible(observation) and (best is None or cost < best[0]):
            best = cost, plan
    search.close()
    return None if best is None else best[1]


def _window(case: Case, plan: Plan, *, limited: bool = True) -> Measurement:
    """Return the predicted measurement of a window of one step."""
    profile, peak, seconds = case.truth, peak_bytes(case.truth, plan), seconds_per_step(case.truth, plan)
    samples = profile.batch_size * (plan.accumulation_steps if profile.batching == "adaptive" else 1)
    fits = not limited or case.fits(plan)
    return Measurement(
        steps=1,
        samples=samples,
        items=samples,
        total_s=seconds,
        seconds_per_step=seconds if fits else None,
        samples_per_step=float(samples) if fits else None,
        peak_bytes=peak,
        memory_budget_bytes=math.floor(case.usable_bytes) if limited else None,
        gradient=GradientStatistics(norm=1.0, noise_scale=case.noise_scale),
        failure=None if fits else Failure.OVER_BUDGET,
    )


def _entry(cases: Sequence[Case], proposals: Sequence[Sequence[Proposal]], evaluations: int) -> dict[str, Any]:
    """Return the figures of a method; plans that do not fit are counted, and excluded from the regret.

    Args:
        cases: the jobs; only the first ``len(proposals)`` are used.
        proposals: per job, one proposal per network.
        evaluations: number of plans that were measured for each job.
    """
    regret = np.full((len(proposals), len(proposals[0])), np.nan)
    over = infeasible = 0
    for row, (case, made) in enumerate(zip(cases, proposals, strict=False)):
        for column, proposal in enumerate(made):
            if proposal.plan is None:
                infeasible += 1
            elif not case.fits(proposal.plan):
                over += 1
            else:
                regret[row, column] = case.regret(proposal.plan)
    known, whole = regret[~np.isnan(regret)], regret[~np.isnan(regret).any(axis=1)]
    return {
        "jobs": len(proposals),
        "regret_median": float(np.median(known)) if known.size else None,
        "regret_p95": float(np.quantile(known, 0.95)) if known.size else None,
        "regret_mean": float(whole.mean()) if whole.size else None,
        "regret_mean_ci95": list(clustered_mean_interval(whole.T, np.arange(len(whole)))) if whole.size else None,
        "over_budget": over,
        "infeasible": infeasible,
        "evaluations": evaluations,
        "decision_s": float(np.median([proposal.seconds for made in proposals for proposal in made])),
    }

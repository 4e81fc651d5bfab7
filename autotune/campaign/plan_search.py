"""Search for a plan for a job, with the same number of real steps for every method.

A search is not scored by its best window: the best few plans are measured again in interleaved windows (finals), and
the plan with the lowest cost in the finals is chosen.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.agents.rules import rule_plan
from autotune.agents.search import SearchContext
from autotune.agents.search_methods import (
    METHODS,
    Method,
    PlanningMethod,
    SearchMethod,
    TrainingMethod,
    find_method,
    make_search,
)
from autotune.agents.study_store import StudyStore
from autotune.budget import format_bytes
from autotune.campaign.baselines import References
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import Goal
from autotune.engines.budgeted_engine import BudgetedEngine, StepsSpentError
from autotune.engines.engine import Engine
from autotune.engines.tuning_windows import WINDOW_STEPS, merge_windows
from autotune.errors import InputError
from autotune.gym.job_env import TuningEnv
from autotune.gym.observation import Observation
from autotune.gym.reward import Objective
from autotune.io.documents import LARGEST_SEED
from autotune.job import Job
from autotune.launching import suffix
from autotune.measurement import Measurement
from autotune.mechanics.randomness import isolated
from autotune.plan import Plan
from autotune.records.results import trials_of
from autotune.records.run_directory import RunDirectory
from autotune.records.tracking import Tracker
from autotune.records.trials import Trial, track

FINALISTS = 3
FINAL_ROUNDS = 2
_FINAL_STEPS = 4
# Steps of the finals, for the finalists and the baseline, which is measured again since a machine's speed drifts.
_RESERVE = (FINALISTS + 1) * FINAL_ROUNDS * _FINAL_STEPS
# Rules whose plans a search measures first.
_FIRST = ("uniform-bf16", "recompute-all", "paper")
_EPISODE_WINDOWS = 8
# Number of consecutive repeated proposals after which a search ends.
_REPEATS = 200
# Shares of the budget that a planner plans for in turn, until one of its plans fits.
_REPLANS = (1.0, 0.97, 0.92)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSettings:
    """Limits and objective of a search.

    Attributes:
        steps: number of real optimizer steps, including those of the references and the finals.
        trials: number of plans that may be measured; ``None`` for as many as the steps allow.
        warm_start: whether Optuna measures the rules' plans before it proposes plans of its own.
        seed: random seed for the search and for the engine.
        objective: the cost to minimise.
        storage: a database for Optuna's studies, as :func:`autotune.agents.study_store.checked` returns it; ``None``
            keeps them in the run directory.
    """

    steps: int = 120
    trials: int | None = None
    warm_start: bool = True
    seed: int = 0
    objective: Objective = field(default_factory=Objective)
    storage: str | None = None

    def __post_init__(self) -> None:
        least = 2 * WINDOW_STEPS + WINDOW_STEPS + _RESERVE
        if self.steps < least:
            raise InputError(f"steps is {self.steps}", where="--steps", allowed=f"at least {least}")
        if self.trials is not None and self.trials < 1:
            raise InputError(f"trials is {self.trials}", where="--trials", allowed="at least 1")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise InputError(f"seed is {self.seed}", where="--seed", allowed=f"0 to {LARGEST_SEED}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """Result of a search.

    Attributes:
        method: the method.
        plan: the chosen plan.
        measurement: the plan's windows in the finals, merged.
        cost: the plan's cost in the finals, relative to the baseline.
        baseline: the baseline's windows in the finals, merged.
        tuning_s: seconds spent, including the references.
        tuning_steps: real optimizer steps spent, including the references.
        trials: all measured windows, in order.
    """

    method: str
    plan: Plan
    measurement: Measurement
    cost: float
    baseline: Measurement
    tuning_s: float
    tuning_steps: int
    trials: tuple[Trial, ...]


def tune(
    job: Job,
    method: str,
    engine: Engine,
    references: References,
    settings: TuningSettings,
    *,
    run: RunDirectory,
    tracker: Tracker | None = None,
    profile: Profile | None = None,
    on_progress: Callable[[float, str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> TuningResult:
    """Find a plan with one method.

    Args:
        job: the job.
        method: the name of a method; see :func:`autotune.agents.search_methods.find_method`.
        engine: engine that measures plans; it stays open.
        references: result of :func:`autotune.campaign.baselines.measure_references` for the same engine.
        settings: limits and objective.
        run: run directory in which trials, the study and the policy are written.
        tracker: logs trials.
        profile: the job's profile; ``None`` for methods that do not plan from it.
        on_progress: called with the number of steps spent and a few words on the best plan so far.
        clock: returns seconds; for a resumed campaign, a clock that includes the time before the interruption.

    Raises:
        InputError: if the method is unknown, its profile is missing, or no measured plan is feasible.
    """
    if find_method(method).needs_profile and profile is None:
        raise InputError(f"method {method} needs a profile", allowed="profile=")
    return _Tuning(job, method, engine, references, settings, run, tracker, profile, on_progress, clock).result()


@dataclass(slots=True)
class _Tuning:
    """The search of one method within its limits; the first fields are the arguments of :func:`tune`."""

    job: Job
    method: str
    engine: InitVar[Engine]
    references: References
    settings: TuningSettings
    run: RunDirectory
    tracker: Tracker | None
    profile: Profile | None
    on_progress: Callable[[float, str], None] | None
    clock: Callable[[], float]
    # Window of the baseline, to which costs are relative; the finals replace it.
    reference: Measurement = field(init=False)
    metered: BudgetedEngine = field(init=False)
    trials: list[Trial] = field(init=False, default_factory=list)
    # Number of trials that are already in the file if the campaign is resumed.
    recorded: int = field(init=False)
    final: bool = field(init=False, default=False)
    began: float = field(init=False)
    found: Method = field(init=False)

    def __post_init__(self, engine: Engine) -> None:
        references = self.references
        self.found = find_method(self.method)
        self.reference = references.baseline
        available = self.settings.steps - references.steps - _RESERVE
        self.metered = BudgetedEngine(engine, available, self._note, window_budget=self.settings.trials)
        if self.profile is not None:
            self.metered.space = self.metered.space.within(self.profile.space)
        if references.leanest is not None:
            self.metered.known[engine.space.leanest()] = _held_to(references.leanest, references.memory_budget_bytes)
        self.metered.known[engine.space.baseline()] = references.baseline
        self.recorded = sum(row["method"] == self.method for row in trials_of(self.run))
        self.began = self.clock()

    def result(self) -> TuningResult:
        match self.found:
            case PlanningMethod() as method:
                plan, measurement, cost = self._plan(method)
            case TrainingMethod() as method:
                favourite = self._train(method, self._environment())
                plan, measurement, cost = self._finals(self._best_known(favourite))
            case SearchMethod() as method:
                self._search(method, self._environment())
                plan, measurement, cost = self._finals(self._best_known(None))
        steps, seconds = self._spent()
        return TuningResult(
            method=self.method,
            plan=plan,
            measurement=measurement,
            cost=cost,
            baseline=self.reference,
            tuning_s=seconds,
            tuning_steps=steps,
            trials=tuple(self.trials),
        )

    def _spent(self) -> tuple[int, float]:
        """Return the real steps and the seconds spent so far."""
        steps = self.metered.steps_spent + self.references.steps
        seconds = self.clock() - self.began + self.references.seconds
        used = self.found.needs_profile or self.metered.engine.space.approximate
        if used and self.profile is not None:
            # The cost of the profile counts even if it was cached.
            return steps + self.profile.steps, seconds + self.profile.seconds
        return steps, seconds

    def _environment(self) -> TuningEnv:
        budget = self.references.memory_budget_bytes
        return TuningEnv(
            self.job,
            lambda _seed: self.metered,
            memory_budget_bytes=budget,
            window_steps=WINDOW_STEPS,
            max_windows=_EPISODE_WINDOWS,
            objective=self.settings.objective,
            evaluate=False,
            run_length=math.inf,
        )

    def _search(self, method: SearchMethod, env: TuningEnv) -> None:
        search = make_search(self.method, method, self._context(env))
        env.reset(seed=self.settings.seed)
        asked: deque[Plan] = deque()
        repeats = 0
        # Repeats cost no steps, so a search that only repeats itself must be stopped.
        while repeats < _REPEATS:
            while not asked or (len(asked) < self.metered.ahead and self.metered.affords(WINDOW_STEPS)):
                with METHODS.errors_named(self.method):
                    asked.append(env.plan_space.check(search.ask(), where=f"method {self.method}"))
                self.metered.prepare(asked[-1], WINDOW_STEPS)
            plan = asked.popleft()
            repeats = repeats + 1 if plan in self.metered.known else 0
            try:
                _, reward, _, truncated, _ = env.step(_array(env, plan))
            except StepsSpentError:
                break
            assert env.observation is not None
            with METHODS.errors_named(self.method):
                search.tell(plan, env.observation, -reward)
            if truncated:
                env.reset()
        with METHODS.errors_named(self.method):
            search.close()

    def _context(self, env: TuningEnv) -> SearchContext:
        rules = (env.plan_space.baseline(), env.plan_space.leanest(), *_first_plans(env))
        return SearchContext(
            space=env.plan_space,
            seed=self.settings.seed,
            memory_budget_bytes=self.references.memory_budget_bytes,
            profile=self.profile,
            first=rules if self.settings.warm_start else (),
            ahead=self.metered.ahead,
            place=self._store(),
        )

    def _store(self) -> Path | StudyStore:
        storage = self.settings.storage
        return self.run.path if storage is None else StudyStore.shared(storage, self.run.path.name)

    def _train(self, method: TrainingMethod, env: TuningEnv) -> Plan:
        """Train a policy, starting at the best rule's plan; return the plan that the trained policy chooses."""
        from autotune.agents import policy_folder
        from autotune.agents.scratch_network import LearnedPolicy

        env.reset(seed=self.settings.seed)
        start = self._best_rule(env)
        with isolated(), METHODS.errors_named(self.method):
            trained = method.train(env, self.settings.seed, start)
        training = policy_folder.Training(
            job=self.job.name,
            seed=self.settings.seed,
            windows=trained.windows,
            steps=self.metered.steps_spent + self.references.steps,
            memory_budget_bytes=self.references.memory_budget_bytes,
        )
        policy_folder.save_policy(self.run.path / "policy", trained.network, training)
        env.reset()
        assert env.observation is not None
        return LearnedPolicy(trained.network).decide(env.observation, env.plan_space.baseline())

    def _best_rule(self, env: TuningEnv) -> Plan:
        """Measure the rules' plans and return the plan with the lowest cost."""
        costs = {}
        for plan in [env.plan_space.baseline(), env.plan_space.leanest(), *_first_plans(env)]:
            try:
                _, reward, _, _, _ = env.step(_array(env, plan))
            except StepsSpentError:
                break
            costs[plan] = -reward
        return min(costs, key=costs.__getitem__)

    def _plan(self, method: PlanningMethod) -> tuple[Plan, Measurement, float]:
        """Measure the planner's plans; if none fits, plan again for a smaller budget."""
        assert self.profile is not None
        budget = self.references.memory_budget_bytes
        goal = self._goal()
        for share in _REPLANS:
            wanted = None if budget is None else int(budget * share)
            with METHODS.errors_named(self.method):
                plans = method.plans(self.profile, wanted, goal)[:FINALISTS]
            plan, measurement, cost = self._finals(plans)
            if self._is_feasible(plan, measurement):
                return plan, measurement, cost
        raise InputError(
            f"none of the planner's plans fits: "
            f"{measurement.failure_detail or self._shown_norm() or self._shown_peak(measurement)}",
            where=f"method {self.method}",
            allowed="a larger --gradient-norm"
            if self._shown_norm()
            else "a current profile of the job: autotune profile --fresh",
        )

    def _shown_norm(self) -> str:
        """Return the smallest measured gradient norm in words, if it is above the limit; empty otherwise."""
        limit = self.settings.objective.gradient_norm
        windows = [trial.measurement for trial in self.trials]
        least = min((window.gradient.norm for window in windows if window.gradient is not None), default=0.0)
        return "" if limit is None or least <= limit else f"the smallest gradient norm is {least:.4g}, above {limit:g}"

    def _shown_peak(self, measurement: Measurement) -> str:
        budget = self.references.memory_budget_bytes
        if measurement.peak_bytes is None or budget is None:
            return "the last one could not be measured"
        return f"the last one's peak is {format_bytes(measurement.peak_bytes)} of {format_bytes(budget)}"

    def _goal(self) -> Goal:
        gradient = self.references.baseline.gradient
        noise = None if gradient is None else gradient.noise_scale
        weights = self.settings.objective.weights
        return Goal(weights=weights, noise_scale=noise)

    def _best_known(self, favourite: Plan | None) -> list[Plan]:
        """Return the finalists: the best plans measured so far, and the plan that a trained policy chooses."""
        fitting = {
            plan: cost
            for plan, window in self.metered.known.items()
            if self._is_feasible(plan, window) and (cost := self._cost(plan, window)) < math.inf
        }
        if not fitting:
            norm = self._shown_norm()
            raise InputError(
                f"no measured plan is feasible{norm and f': {norm}'}",
                where=f"method {self.method}",
                allowed="a larger --gradient-norm" if norm else "more --steps",
            )
        finalists = sorted(fitting, key=fitting.__getitem__)[:FINALISTS]
        if favourite is not None and favourite not in finalists:
            finalists[-1:] = [favourite] if len(finalists) == FINALISTS else [finalists[-1], favourite]
        return finalists

    def _finals(self, finalists: Sequence[Plan]) -> tuple[Plan, Measurement, float]:
        """Measure the finalists again in interleaved windows, and return the plan with the lowest cost.

        On a busy machine, where windows are repeated, the second round ends when the steps are spent.
        """
        self.final = True
        self.metered.step_budget = self.metered.steps_spent + _RESERVE
        self.metered.window_budget = None
        baseline = self.metered.space.baseline()
        candidates = list(dict.fromkeys([*finalists, baseline]))
        windows: dict[Plan, list[Measurement]] = {plan: [] for plan in candidates}
        for round_number in range(FINAL_ROUNDS):
            for plan in candidates if round_number % 2 == 0 else reversed(candidates):
                if windows[plan] and self.metered.steps_spent + _FINAL_STEPS > self.metered.step_budget:
                    continue
                # The budget does not apply to the baseline.
                within = None if plan == baseline else self.references.memory_budget_bytes
                self.metered.memory_budget_bytes = within
                self.metered.apply(plan)
                windows[plan].append(self.metered.measure(_FINAL_STEPS))
        merged = {plan: merge_windows(seen) for plan, seen in windows.items()}
        if merged[baseline].failure is None:
            self.reference = merged[baseline]
        if baseline in finalists:
            merged[baseline] = _held_to(merged[baseline], self.references.memory_budget_bytes)
        costs = {plan: self._cost(plan, merged[plan]) for plan in finalists}
        feasible = [plan for plan in finalists if self._is_feasible(plan, merged[plan])]
        best = min(feasible or finalists, key=costs.__getitem__)
        return best, merged[best], costs[best]

    def _is_feasible(self, plan: Plan, window: Measurement) -> bool:
        return self.settings.objective.feasible(self._observe(plan, window))

    def _cost(self, plan: Plan, window: Measurement) -> float:
        return self.settings.objective.cost(self._observe(plan, window))

    def _observe(self, plan: Plan, window: Measurement) -> Observation:
        return Observation(
            space=self.metered.space,
            plan=plan,
            window=window,
            reference=self.reference,
            memory_budget_bytes=self.references.memory_budget_bytes,
            batch_size=self.job.batch_size,
            adaptive=self.job.batching == "adaptive",
        )

    def _note(self, plan: Plan, window: Measurement) -> None:
        steps, seconds = self._spent()
        trial = Trial(
            number=len(self.trials),
            plan=plan,
            measurement=window,
            cost=self._cost(plan, window),
            final=self.final,
            tuning_steps=steps,
            tuning_s=seconds,
        )
        self.trials.append(trial)
        if trial.number >= self.recorded:
            self.run.append("trials.jsonl", {"method": self.method, **trial.to_json()})
        if self.tracker is not None:
            track(self.tracker, self.method + suffix(self.job.launch), trial)
        if self.on_progress is not None:
            self.on_progress(self.metered.steps_spent + self.references.steps, self._best_so_far())

    def _best_so_far(self) -> str:
        """Return in words the cost of the best plan that was measured and fits."""
        fitting = [trial for trial in self.trials if self._is_feasible(trial.plan, trial.measurement)]
        costs = [trial.cost for trial in fitting if trial.cost < math.inf]
        weights = self.settings.objective.weights
        if not costs:
            return "no plan fits yet"
        if weights.memory or weights.energy:
            return f"best so far: cost {min(costs):.2f}"
        return f"best so far: {1 / min(costs):.2f}x as fast as the baseline"


def _first_plans(env: TuningEnv) -> list[Plan]:
    return [rule_plan(name, env.plan_space) for name in _FIRST]


def _array(env: TuningEnv, plan: Plan) -> Any:
    import numpy as np

    return np.array(env.plan_space.encode(plan))


def _held_to(window: Measurement, budget: int | None) -> Measurement:
    return replace(window, memory_budget_bytes=budget)

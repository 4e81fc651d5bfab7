"""Search for a plan for a job, with the same number of real steps for every method.

The best window of a search is not its score: the best few plans are measured again, interleaved, and the plan with the
lowest median is chosen.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.agents.optuna_search import OptunaPriceSearch, OptunaSearch
from autotune.agents.planner import PLANNERS, planned
from autotune.agents.priced_plans import PricedPlans
from autotune.agents.rules import RULES
from autotune.agents.search import RandomSearch, Search
from autotune.agents.study_store import StudyStore
from autotune.campaign.baselines import References
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import Goal
from autotune.engines.budgeted_engine import MeteredEngine, StepsSpentError
from autotune.engines.engine import Engine
from autotune.engines.tuning_windows import WINDOW_STEPS, merge_windows
from autotune.errors import InputError
from autotune.gym.observation import Observation
from autotune.gym.plan_env import TuningEnv
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

SEARCHES = ("random", "optuna", "optuna-prices", "ppo-scratch")
# Methods that plan from a profile, whose cost counts as theirs.
PROFILED = (*PLANNERS, "optuna-prices")
METHODS = (*PLANNERS, *SEARCHES)
# Methods that can propose a plan before the last one was measured.
SPREADING = ("random", "optuna", "optuna-prices")
FINALISTS = 3
FINAL_ROUNDS = 2
_FINAL_STEPS = 4
# Steps of the finals: the finalists and the baseline, which is measured again since a machine's speed drifts.
_RESERVE = (FINALISTS + 1) * FINAL_ROUNDS * _FINAL_STEPS
# Rules whose plans are measured first, to start a search from.
_FIRST = ("uniform-bf16", "recompute-all", "paper")
_EPISODE_WINDOWS = 8
# Number of consecutive repeated proposals after which a search ends.
_REPEATS = 200
# Shares of the budget that a planner plans for in turn, if its plans do not fit.
_REPLANS = (1.0, 0.97, 0.92)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSettings:
    """Limits and objective of a search.

    Attributes:
        steps: number of real optimizer steps, including those of the references and the finals.
        trials: number of plans that may be measured; ``None`` for as many as the steps allow.
        warm_start: whether Optuna measures the rules' plans before it proposes plans of its own.
        seed: random seed for the search and for the engine.
        objective: the cost that is minimised.
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
        measurement: its windows in the finals, merged.
        cost: its cost in the finals, relative to the baseline.
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
    on_progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> TuningResult:
    """Find a plan with one method.

    Args:
        job: the job.
        method: one of ``METHODS``.
        engine: engine that measures plans; it stays open.
        references: result of :func:`autotune.campaign.baselines.measure_references` for the same engine.
        settings: limits and objective.
        run: run directory in which trials, the study and the policy are written.
        tracker: logs trials.
        profile: the job's profile; ``None`` for methods that do not plan from it.
        on_progress: called with the number of steps spent and the limit of steps.
        clock: returns seconds; for a resumed campaign, a clock that includes the time before the interruption.

    Raises:
        InputError: if the method is unknown, or no measured plan is feasible.
    """
    if method not in METHODS:
        raise InputError(f"method is {method!r}", where="--method", allowed=METHODS)
    if method in PROFILED and profile is None:
        raise InputError(f"method {method} needs a profile", allowed="profile=")
    campaign = _Tuning(job, method, engine, references, settings, run, tracker, profile, on_progress, clock)
    return campaign.result()


class _Tuning:
    """The search of one method within its limits, from the first window to the finals."""

    def __init__(
        self,
        job: Job,
        method: str,
        engine: Engine,
        references: References,
        settings: TuningSettings,
        run: RunDirectory,
        tracker: Tracker | None,
        profile: Profile | None,
        on_progress: Callable[[int, int], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._job = job
        self._method = method
        self._references = references
        self._settings = settings
        self._run = run
        self._tracker = tracker
        self._profile = profile
        self._on_progress = on_progress
        # Costs are relative to this window of the baseline; the finals measure it again.
        self._reference = references.baseline
        available = settings.steps - references.steps - _RESERVE
        self._metered = MeteredEngine(engine, available, self._note, window_budget=settings.trials)
        space = engine.space
        if references.leanest is not None:
            self._metered.known[space.leanest()] = _held_to(references.leanest, references.memory_budget_bytes)
        self._metered.known[space.baseline()] = references.baseline
        self._trials: list[Trial] = []
        # The first trials of a resumed campaign are already in the file.
        self._recorded = sum(row["method"] == method for row in trials_of(run))
        self._final = False
        self._clock = clock
        self._began = clock()

    def result(self) -> TuningResult:
        if self._method in PLANNERS:
            plan, measurement, cost = self._plan()
        else:
            favourite = None
            env = self._environment()
            if self._method == "ppo-scratch":
                favourite = self._train(env)
            else:
                self._search(env)
            plan, measurement, cost = self._finals(self._best_known(favourite))
        steps, seconds = self._spent()
        return TuningResult(
            method=self._method,
            plan=plan,
            measurement=measurement,
            cost=cost,
            baseline=self._reference,
            tuning_s=seconds,
            tuning_steps=steps,
            trials=tuple(self._trials),
        )

    def _spent(self) -> tuple[int, float]:
        """Return the real steps and the seconds spent so far."""
        steps = self._metered.steps_spent + self._references.steps
        seconds = self._clock() - self._began + self._references.seconds
        if self._method in PROFILED and self._profile is not None:
            # The cost of a profile counts, also if it was cached.
            return steps + self._profile.steps, seconds + self._profile.seconds
        return steps, seconds

    def _environment(self) -> TuningEnv:
        budget = self._references.memory_budget_bytes
        return TuningEnv(
            self._job,
            lambda _seed: self._metered,
            memory_budget_bytes=budget,
            window_steps=WINDOW_STEPS,
            max_windows=_EPISODE_WINDOWS,
            objective=self._settings.objective,
            evaluate=False,
            run_length=math.inf,
        )

    def _search(self, env: TuningEnv) -> None:
        search = self._make_search(env)
        env.reset(seed=self._settings.seed)
        asked: deque[Plan] = deque()
        repeats = 0
        # Repeats cost no steps, so a search that only repeats itself must be stopped.
        while repeats < _REPEATS:
            while not asked or (len(asked) < self._metered.ahead and self._metered.affords(WINDOW_STEPS)):
                asked.append(search.ask())
                self._metered.prepare(asked[-1], WINDOW_STEPS)
            plan = asked.popleft()
            repeats = repeats + 1 if plan in self._metered.known else 0
            try:
                _, reward, _, truncated, _ = env.step(_array(env, plan))
            except StepsSpentError:
                break
            assert env.observation is not None
            search.tell(plan, env.observation, -reward)
            if truncated:
                env.reset()
        search.close()

    def _make_search(self, env: TuningEnv) -> Search:
        if self._method == "random":
            return RandomSearch(env.plan_space, self._settings.seed)
        if self._method == "optuna-prices":
            assert self._profile is not None
            priced = PricedPlans(self._profile, self._references.memory_budget_bytes)
            return OptunaPriceSearch(
                priced, env.plan_space, self._store(), self._settings.seed, ahead=self._metered.ahead
            )
        rules = [env.plan_space.baseline(), env.plan_space.leanest(), *_first_plans(env)]
        first = rules if self._settings.warm_start else []
        return OptunaSearch(env.plan_space, self._store(), self._settings.seed, first, ahead=self._metered.ahead)

    def _store(self) -> Path | StudyStore:
        storage = self._settings.storage
        return self._run.path if storage is None else StudyStore.shared(storage, self._run.path.name)

    def _train(self, env: TuningEnv) -> Plan:
        """Train PPO from the best rule that fits; return the plan that the trained policy chooses."""
        from autotune.agents import policy_folder, ppo
        from autotune.agents.plan_network import LearnedPolicy

        env.reset(seed=self._settings.seed)
        start = self._best_rule(env)
        recipe = ppo.Recipe()
        with isolated():
            trained = ppo.train(env, recipe, seed=self._settings.seed, start=start)
        training = policy_folder.Training(
            job=self._job.name,
            seed=self._settings.seed,
            windows=trained.windows,
            steps=self._metered.steps_spent + self._references.steps,
            memory_budget_bytes=self._references.memory_budget_bytes,
        )
        policy_folder.save_policy(self._run.path / "policy", trained.network, training)
        env.reset()
        assert env.observation is not None
        return LearnedPolicy(trained.network).decide(env.observation, env.plan_space.baseline())

    def _best_rule(self, env: TuningEnv) -> Plan:
        """Measure the rules' plans and return the cheapest plan that fits."""
        costs = {}
        for plan in [env.plan_space.baseline(), env.plan_space.leanest(), *_first_plans(env)]:
            try:
                _, reward, _, _, _ = env.step(_array(env, plan))
            except StepsSpentError:
                break
            costs[plan] = -reward
        return min(costs, key=costs.__getitem__)

    def _plan(self) -> tuple[Plan, Measurement, float]:
        """Measure the planner's plans; if none fits, plan again for a smaller budget."""
        assert self._profile is not None
        budget = self._references.memory_budget_bytes
        goal = self._goal()
        for share in _REPLANS:
            wanted = None if budget is None else int(budget * share)
            plans = planned(self._method, self._profile, wanted, goal)[:FINALISTS]
            plan, measurement, cost = self._finals(plans)
            if self._is_feasible(plan, measurement):
                return plan, measurement, cost
        raise InputError(
            f"none of the planner's plans fits: {measurement.failure_detail}",
            where=f"method {self._method}",
            allowed="a current profile of the job: autotune profile --fresh",
        )

    def _goal(self) -> Goal:
        gradient = self._references.baseline.gradient
        noise = None if gradient is None else gradient.noise_scale
        weights = self._settings.objective.weights
        return Goal(weights=weights, noise_scale=noise)

    def _best_known(self, favourite: Plan | None) -> list[Plan]:
        """Return the best plans measured so far, and the plan that a policy chooses."""
        fitting = {
            plan: cost
            for plan, window in self._metered.known.items()
            if self._is_feasible(plan, window) and (cost := self._cost(plan, window)) < math.inf
        }
        if not fitting:
            raise InputError(
                "no measured plan is feasible",
                where=f"method {self._method}",
                allowed="more --steps",
            )
        finalists = sorted(fitting, key=fitting.__getitem__)[:FINALISTS]
        if favourite is not None and favourite not in finalists:
            finalists[-1:] = [favourite] if len(finalists) == FINALISTS else [finalists[-1], favourite]
        return finalists

    def _finals(self, finalists: Sequence[Plan]) -> tuple[Plan, Measurement, float]:
        """Measure the finalists again, interleaved, and return the cheapest."""
        self._final = True
        self._metered.step_budget = self._metered.steps_spent + _RESERVE
        self._metered.window_budget = None
        baseline = self._metered.space.baseline()
        candidates = list(dict.fromkeys([*finalists, baseline]))
        windows: dict[Plan, list[Measurement]] = {plan: [] for plan in candidates}
        for round_number in range(FINAL_ROUNDS):
            for plan in candidates if round_number % 2 == 0 else reversed(candidates):
                # The budget does not apply to the baseline.
                within = None if plan == baseline else self._references.memory_budget_bytes
                self._metered.memory_budget_bytes = within
                self._metered.apply(plan)
                windows[plan].append(self._metered.measure(_FINAL_STEPS))
        merged = {plan: merge_windows(seen) for plan, seen in windows.items()}
        if merged[baseline].failure is None:
            self._reference = merged[baseline]
        if baseline in finalists:
            merged[baseline] = _held_to(merged[baseline], self._references.memory_budget_bytes)
        costs = {plan: self._cost(plan, merged[plan]) for plan in finalists}
        feasible = [plan for plan in finalists if self._is_feasible(plan, merged[plan])]
        best = min(feasible or finalists, key=costs.__getitem__)
        return best, merged[best], costs[best]

    def _is_feasible(self, plan: Plan, window: Measurement) -> bool:
        return self._settings.objective.feasible(self._observe(plan, window))

    def _cost(self, plan: Plan, window: Measurement) -> float:
        return self._settings.objective.cost(self._observe(plan, window))

    def _observe(self, plan: Plan, window: Measurement) -> Observation:
        return Observation(
            space=self._metered.space,
            plan=plan,
            window=window,
            reference=self._reference,
            memory_budget_bytes=self._references.memory_budget_bytes,
            batch_size=self._job.batch_size,
            adaptive=self._job.batching == "adaptive",
        )

    def _note(self, plan: Plan, window: Measurement) -> None:
        steps, seconds = self._spent()
        trial = Trial(
            number=len(self._trials),
            plan=plan,
            measurement=window,
            cost=self._cost(plan, window),
            final=self._final,
            tuning_steps=steps,
            tuning_s=seconds,
        )
        self._trials.append(trial)
        if trial.number >= self._recorded:
            self._run.append("trials.jsonl", {"method": self._method, **trial.to_json()})
        if self._tracker is not None:
            track(self._tracker, self._method + suffix(self._job.launch), trial)
        if self._on_progress is not None:
            self._on_progress(self._metered.steps_spent + self._references.steps, self._settings.steps)


def save_tuned_plan(run: RunDirectory, result: TuningResult, name: str = "plan.json") -> Path:
    """Write the chosen plan and return its path."""
    return run.write(name, result.plan.to_json())


def _first_plans(env: TuningEnv) -> list[Plan]:
    return [RULES[name].plan(env.plan_space) for name in _FIRST]


def _array(env: TuningEnv, plan: Plan) -> Any:
    import numpy as np

    return np.array(env.plan_space.encode(plan))


def _held_to(window: Measurement, budget: int | None) -> Measurement:
    return replace(window, memory_budget_bytes=budget)

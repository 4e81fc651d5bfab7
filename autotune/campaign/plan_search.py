"""Find a plan for a job: the same budget of real steps for every method, and fresh windows for the winner.

A method's best window is never its score: the best few plans are measured again, interleaved, and the fastest of those
medians is chosen.
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
from autotune.engines.budgeted_engine import BudgetedEngine, StepsSpentError
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
# Methods that plan from a profile, whose measuring they pay for.
PROFILED = (*PLANNERS, "optuna-prices")
METHODS = (*PLANNERS, *SEARCHES)
# Methods that can propose plans before they know what came of the last one.
SPREADING = ("random", "optuna", "optuna-prices")
FINALISTS = 3
FINAL_ROUNDS = 2
_FINAL_STEPS = 4
# The finalists and the baseline, which is measured beside them: a machine's speed drifts.
_RESERVE = (FINALISTS + 1) * FINAL_ROUNDS * _FINAL_STEPS
# Plans of hand-made rules that a search which can learn from them measures first.
_FIRST = ("uniform-bf16", "recompute-all", "paper")
_EPISODE_WINDOWS = 8
# Proposals in a row that were measured before, after which a search has seen what it will see.
_REPEATS = 200
# Shares of the budget that a planner plans for, one after another, if what it planned does not fit.
_REPLANS = (1.0, 0.97, 0.92)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSettings:
    """What a method may spend.

    Attributes:
        steps: real optimizer steps, those of the references and of the finals included.
        trials: plans that may be measured; ``None`` for as many as the steps allow.
        warm_start: whether Optuna measures the hand-made rules before it proposes plans of its own.
        seed: of the search and of the engine.
        objective: what is minimised.
        storage: a database for Optuna's studies, as :func:`autotune.agents.study_store.checked` returns it; ``None``
            keeps them in the run's folder.
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
    """What a method found.

    Attributes:
        method: the method.
        plan: the chosen plan.
        measurement: its windows in the finals, as one.
        cost: its cost against the baseline in the finals.
        baseline: the baseline's windows in the finals, as one.
        tuning_s: seconds spent, references included.
        tuning_steps: real optimizer steps spent, references included.
        trials: everything measured, in order.
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
        engine: where plans are measured; it stays open.
        references: what :func:`autotune.campaign.baselines.measure_references` returned for the same engine.
        settings: what may be spent.
        run: where trials, the study and the policy are written.
        tracker: where they are logged.
        profile: what a planner plans from.
        on_progress: is told of steps spent and the budget of steps.
        clock: a clock's seconds; another one where part of the campaign is not done but remembered.

    Raises:
        InputError: if the method is unknown, or no plan that was measured is feasible.
    """
    if method not in METHODS:
        raise InputError(f"method is {method!r}", where="--method", allowed=METHODS)
    if method in PROFILED and profile is None:
        raise InputError("a planner needs a profile", where=f"method {method}", allowed="profile=")
    campaign = _Tuning(job, method, engine, references, settings, run, tracker, profile, on_progress, clock)
    return campaign.result()


class _Tuning:
    """One method's search within its budget, from its first window to the finals."""

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
        # The baseline's window that costs are ratios to; the finals measure it again.
        self._reference = references.baseline
        available = settings.steps - references.steps - _RESERVE
        self._metered = BudgetedEngine(engine, available, self._note, window_budget=settings.trials)
        space = engine.space
        if references.leanest is not None:
            self._metered.known[space.leanest()] = _held_to(references.leanest, references.memory_budget_bytes)
        self._metered.known[space.baseline()] = references.baseline
        self._trials: list[Trial] = []
        # Of a campaign that is taken up, the first trials are there already.
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
        """Return real steps and seconds so far."""
        steps = self._metered.steps_spent + self._references.steps
        seconds = self._clock() - self._began + self._references.seconds
        if self._method in PROFILED and self._profile is not None:
            # A planner pays for the profile, also where it was there already.
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
        # Repeats cost no steps, so a search that only repeats itself must end too.
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
        """Train PPO from the best hand-made rule that fits; return what it would choose."""
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
        """Measure the hand-made rules and return the cheapest plan that fits."""
        costs = {}
        for plan in [env.plan_space.baseline(), env.plan_space.leanest(), *_first_plans(env)]:
            try:
                _, reward, _, _, _ = env.step(_array(env, plan))
            except StepsSpentError:
                break
            costs[plan] = -reward
        return min(costs, key=costs.__getitem__)

    def _plan(self) -> tuple[Plan, Measurement, float]:
        """Measure what a planner proposes; if none of it fits, plan again for a smaller budget."""
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
            f"no planned plan fits: {measurement.failure_detail}",
            where=f"method {self._method}",
            allowed="a profile of the job as it is now; autotune profile --fresh makes one",
        )

    def _goal(self) -> Goal:
        gradient = self._references.baseline.gradient
        noise = None if gradient is None else gradient.noise_scale
        weights = self._settings.objective.weights
        return Goal(weights=weights, noise_scale=noise)

    def _best_known(self, favourite: Plan | None) -> list[Plan]:
        """Return the best plans measured so far, and a policy's favourite."""
        fitting = {
            plan: cost
            for plan, window in self._metered.known.items()
            if self._is_feasible(plan, window) and (cost := self._cost(plan, window)) < math.inf
        }
        if not fitting:
            raise InputError(
                "no plan that was measured is feasible",
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
                # The baseline is held to no budget.
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

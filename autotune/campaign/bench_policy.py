"""Judge the policy that leans on a planner on jobs that it was not trained on: standing still, and moving.

Every table holds the untrained network and the planner alone beside the trained one, and what could be won at most:
the exact optimum where nothing moves, a clairvoyant where conditions do.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from scipy.special import ndtr, owens_t

from autotune.agents.bundle import MANIFEST, WEIGHTS, load_policy
from autotune.agents.lever_network import LeverNetwork
from autotune.agents.planner import greedy_plan
from autotune.agents.planner_policy import PlannerPolicy, Ranges
from autotune.agents.recipe import Recipe
from autotune.agents.search import RandomSearch, Search
from autotune.campaign.runs import device_name
from autotune.campaign.training import interval_over_jobs_and_seeds
from autotune.errors import BudgetError, InputError, PolicyFileError, RunDirectoryError
from autotune.files import read_json
from autotune.gym.levers import (
    BRACES,
    NEUTRAL,
    RUN_FEATURES,
    Actions,
    Features,
    Watch,
    levers_of,
    neutral_actions,
)
from autotune.gym.moving_env import MovingEnv, planner_reserve
from autotune.gym.observation import Observation
from autotune.gym.reward import Objective
from autotune.measurement import Failure, GradientStatistics, Measurement
from autotune.physics.clairvoyant import best_static, clairvoyant
from autotune.physics.cost_arrays import CostArrays, Floats
from autotune.physics.memory_model import peak_bytes
from autotune.physics.moving import Course, MovingRuns, Strengths
from autotune.physics.plan_pool import PlanPool, make_pool
from autotune.physics.planning import LOOK_AHEAD, Lanes, Planner, PlannerSettings, Rises, Seen, Situation
from autotune.physics.profile import Profile, Segment, StepTable
from autotune.physics.solver import SAFETY_MARGIN, Goal, samples_of_progress, solve
from autotune.physics.synthetic import Shape, draw_job, draw_profile
from autotune.physics.time_model import seconds_per_step
from autotune.plan import Plan

# Which strengths are on in each world; "all_half" and "all_double" are those that nothing was fitted to.
MECHANISMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "noise_scale": ("noise_error",),
    "costs": ("cost_error", "drift", "time_noise"),
    "pressure": ("length", "jitter"),
    "curriculum": ("curriculum",),
    "events": ("event_every",),
    "switching": ("switch_windows", "event_every"),
}
_SIZES = ("noise_error", "cost_error", "time_noise", "drift", "length", "curriculum", "jitter", "switch_windows")
_FACTORS = {"all": 1.0, "all_half": 0.5, "all_double": 2.0}
VARIANTS = ("depth48", "shifted")
# Prefixes of the run features that an ablation hides together.
GROUPS: dict[str, tuple[str, ...]] = {
    "noise": ("noise",),
    "lengths": ("length", "rise"),
    "memory": ("pressure", "ran_out", "budget"),
    "announcements": ("until_",),
    "dips": ("dip",),
    "costs": ("surprise", "unsure"),
    "time": ("progress", "windows"),
    "units": (),
}
_DEEP = 48
# Largest factor by which true costs differ from what was told, where they are shifted.
_SHIFT = 2.0
# Moving jobs are drawn this far from the given seed, static ones by the seed itself.
_MOVING_SEED = 10_000
# Where less can be won, the share of it that was won is noise.
_LEAST_HEADROOM = 2.0
# Wider than what is searched by default: a baseline must not lose for want of range.
_RESERVES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
_REPEATS = 25
_ROUNDING = 1e-9

Choose = Callable[[tuple[Features, Features]], Actions]
Share = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Say what is measured.

    Attributes:
        jobs: held-out jobs in each table.
        seed: of their draw.
        depth: recomputable units of the static jobs, from and to.
        variants: the static tables besides the first; any of ``VARIANTS``.
        mechanisms: the moving worlds; keys of ``MECHANISMS``, "all", "all_half" and "all_double".
        lanes: moving runs at once, at least.
        evaluations: plans that each search may measure.
        optuna_jobs: static jobs that Optuna, which is slow, is run on at most.
        units: of the job on which decisions are timed.
    """

    jobs: int = 200
    seed: int = 0
    depth: tuple[int, int] = (2, 48)
    variants: tuple[str, ...] = VARIANTS
    mechanisms: tuple[str, ...] = (*MECHANISMS, *_FACTORS)
    lanes: int = 128
    evaluations: int = 50
    optuna_jobs: int = 16
    units: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Hold a policy folder's parts, and the networks of all its training's seeds.

    Attributes:
        folder: the policy folder.
        settings: of the planner that it leans on.
        ranges: what features came to in training.
        shipped: the folder's own network.
        networks: the networks to judge, by name; the shipped one alone, if no training run is given.
        hashes: what the document says of where these came from.
    """

    folder: Path
    settings: PlannerSettings
    ranges: Ranges
    shipped: LeverNetwork
    networks: Mapping[str, LeverNetwork]
    hashes: Mapping[str, Any]


def bench_policy(
    judged: Judged, recipe: Recipe, settings: BenchSettings | None = None, *, on_part: Share | None = None
) -> dict[str, Any]:
    """Return how far the policy, and what it is to be compared with, are from the best that can be done.

    Args:
        judged: the policy; see :func:`load_judged`.
        recipe: says how conditions move and how the planner plans that times are compared with.
        settings: what is measured.
        on_part: is told the share that is done, and what comes next.

    Raises:
        InputError: if the seed draws jobs that the recipe trains on or judges by.
    """
    settings, tell = settings or BenchSettings(), on_part or (lambda _share, _title: None)
    if settings.seed + _MOVING_SEED in (recipe.jobs.seed, recipe.jobs.seed + 1):
        raise InputError(f"--seed {settings.seed} draws the recipe's own jobs", allowed="another seed")
    document: dict[str, Any] = {
        "version": 1,
        "benchmark": "policy",
        "device": device_name(),
        "jobs": settings.jobs,
        "seed": settings.seed,
        "policy": dict(judged.hashes),
        "recipe_sha256": recipe.sha256,
        "strengths_sha256": recipe.strengths_sha256,
    }
    windows = recipe.jobs.windows
    # Shares of the time that the parts take, about.
    tell(0.0, "static jobs")
    document["methods"] = static_table(_cases(settings), judged, settings, windows)
    document["static"] = {}
    for number, variant in enumerate(settings.variants):
        tell(0.15 + 0.15 * number, f"static jobs, {variant}")
        document["static"][variant] = static_table(_cases(settings, variant), judged, settings, windows)
    document["dynamic"], document["ablation"] = _moving(judged, recipe, settings, lambda s, t: tell(0.45 + 0.5 * s, t))
    tell(0.95, f"decisions on {settings.units} units")
    document["decision"] = decision_times(judged, settings.units, windows) | {
        "needs_stable_baselines3": _needs_stable_baselines3(judged.folder)
    }
    tell(1.0, "")
    return document


def load_judged(policy: Path, train_run: Path | None = None) -> Judged:
    """Load what is judged.

    Args:
        policy: a policy folder that ``train`` wrote.
        train_run: a training's run directory, all networks of which are judged; ``None`` judges the policy alone.

    Raises:
        PolicyFileError: if the folder holds no such policy, or a network's file is damaged.
        RunDirectoryError: if the run directory holds no networks.
    """
    loaded = load_policy(policy)
    if not isinstance(loaded, PlannerPolicy):
        raise PolicyFileError("chooses plans by itself", where=str(policy), allowed="a policy that leans on a planner")
    # Loading has checked both files already.
    manifest, shipped = read_json(policy / MANIFEST), _network(policy / WEIGHTS)
    files = {"policy": policy / WEIGHTS}
    if train_run is not None:
        files = {path.stem: path for path in sorted(train_run.glob("seed-*.safetensors"))}
        if not files:
            raise RunDirectoryError(
                "holds no seed-*.safetensors", where=str(train_run), allowed="the run directory of a training"
            )
    return Judged(
        folder=policy,
        settings=loaded.settings,
        ranges=Ranges(np.array(manifest["lowest"]), np.array(manifest["highest"])),
        shipped=shipped,
        networks={name: _network(path) for name, path in files.items()},
        hashes={
            "weights_sha256": manifest["weights_sha256"],
            "recipe_sha256": manifest["training"]["recipe_sha256"],
            "strengths_sha256": manifest["training"]["strengths_sha256"],
            "planner": asdict(loaded.settings),
            "networks_sha256": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()},
        },
    )


def _network(path: Path) -> LeverNetwork:
    try:
        tensors = load_tensors(path.read_bytes())
        network = LeverNetwork(tensors["value.weight"].shape[1])
        network.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, RuntimeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise PolicyFileError(
            f"is not a network's weights ({first})", where=str(path), allowed="safetensors"
        ) from error
    return network


def _untrained(width: int) -> LeverNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LeverNetwork(width)


# --- Static jobs: one plan for a known profile ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Hold one static job.

    Attributes:
        told: the profile that planners are told.
        truth: what plans really cost, and searches measure.
        budget_bytes: the memory budget.
        noise_scale: of the job at its start, in samples.
        best: the exact optimum under the true costs, in seconds per sample of progress.
    """

    told: Profile
    truth: Profile
    budget_bytes: int
    noise_scale: float
    best: float

    @property
    def usable_bytes(self) -> float:
        """Return what a plan may be predicted to need."""
        return self.budget_bytes * (1 - SAFETY_MARGIN)

    def fits(self, plan: Plan) -> bool:
        """Tell whether a plan's predicted peak fits the usable budget."""
        return peak_bytes(self.truth, plan) <= self.usable_bytes * (1 + _ROUNDING)

    def regret(self, plan: Plan) -> float:
        """Return by how much more time than the optimum a plan takes per progress, in percent."""
        return 100 * (_seconds(self.truth, plan, self.noise_scale) / self.best - 1)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Hold a method's plan for a case, ``None`` where it found none, and the seconds that it took to decide."""

    plan: Plan | None
    seconds: float


def _seconds(profile: Profile, plan: Plan, noise_scale: float) -> float:
    """Return seconds per sample of progress."""
    return seconds_per_step(profile, plan) / samples_of_progress(profile, plan.accumulation_steps, noise_scale)


def _cases(settings: BenchSettings, variant: str = "") -> list[Case]:
    """Return the static jobs of a table, each with a budget between the leanest plan's peak and the baseline's."""
    generator, shifts = np.random.default_rng(settings.seed), np.random.default_rng([settings.seed, 1])
    depth = (_DEEP, _DEEP) if variant == "depth48" else settings.depth
    cases = []
    for _ in range(settings.jobs):
        job = draw_job(generator, depth=depth)
        space = job.profile.space
        lean = (space.leanest().changed(accumulation_steps=k) for k in space.accumulation_choices)
        ends = [min(peak_bytes(job.profile, plan) for plan in lean), peak_bytes(job.profile, space.baseline())]
        peak = math.exp(generator.uniform(*np.log(sorted(ends))))
        budget = math.ceil(peak / (1 - SAFETY_MARGIN)) + 1
        noise = float(job.convergence.noise_scale(job.convergence.loss.at(0.0)))
        truth = _shifted(shifts, job.profile) if variant == "shifted" else job.profile
        with _hushed():
            best = solve(truth, budget, Goal(noise_scale=noise)).seconds_per_sample
        cases.append(Case(told=job.profile, truth=truth, budget_bytes=budget, noise_scale=noise, best=best))
    return cases


def _shifted(generator: np.random.Generator, profile: Profile) -> Profile:
    """Return a profile whose seconds differ by a factor per unit and precision; bytes stay."""
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

    Planners and searches know the noise scale. Planners are told the profile; searches measure the truth. Random
    search begins with nothing; Optuna with the baseline and the leanest plan, as ``tune`` has it.

    Args:
        cases: the jobs.
        judged: the policy.
        settings: what is measured.
        windows: of the runs that the policy is told to be at the beginning of.
    """
    found: dict[str, list[list[Proposal]]] = {}
    setup_s = []
    for number, case in enumerate(cases):
        made = _alone(case, settings, optuna=number < settings.optuna_jobs)
        began = time.perf_counter()
        arrays = CostArrays([case.told])
        pool = make_pool(arrays)
        setup_s.append(time.perf_counter() - began)
        for name, (leaning, choosers) in _leaning(judged).items():
            made[name] = [_first_plan(case, arrays, pool, leaning, choose, windows) for choose in choosers]
        for name, proposals in made.items():
            found.setdefault(name, []).append(proposals)
    searches = ("random", "optuna")
    table = {name: _entry(cases, made, settings.evaluations * (name in searches)) for name, made in found.items()}
    for name in _leaning(judged):
        table[name]["setup_s"] = float(np.median(setup_s))
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaning:
    """Say how a planner begins a static job: with which settings, and whether it knows that lengths are all alike."""

    settings: PlannerSettings
    still: bool


def _alone(case: Case, settings: BenchSettings, *, optuna: bool) -> dict[str, list[Proposal]]:
    """Return what methods propose that need no pool of plans."""
    goal = Goal(noise_scale=case.noise_scale)
    made = {
        "exact": _timed(lambda: solve(case.told, case.budget_bytes, goal).plan),
        "greedy": _timed(lambda: greedy_plan(case.told, case.budget_bytes, goal)),
        "random": _timed(lambda: _searched("random", case, settings)),
    }
    if optuna:
        made["optuna"] = _timed(lambda: _searched("optuna", case, settings))
    return {name: [proposal] for name, proposal in made.items()}


def _leaning(judged: Judged) -> dict[str, tuple[_Leaning, tuple[Choose | None, ...]]]:
    """Return the methods that lean on a planner: in a job that might move, and in one known to stand still.

    The former weigh the risk that the first window's longest batch exceeds what was profiled. The shipped policy is the
    latter, as it leads real runs.
    """
    networks = tuple(network.most_likely for network in judged.networks.values())
    moving = _Leaning(settings=judged.settings, still=False)
    static = _Leaning(settings=replace(judged.settings, rise=0.0), still=True)
    return {
        "ppo": (moving, networks),
        "ppo_static": (static, networks),
        "shipped": (static, (Guarded(judged),)),
        "untrained": (moving, (_untrained(judged.shipped.width).most_likely,)),
        "planner": (moving, (None,)),
        "planner_static": (static, (None,)),
    }


def _timed(find: Callable[[], Plan | None]) -> Proposal:
    with _hushed():
        began = time.perf_counter()
        try:
            plan = find()
        except BudgetError:
            plan = None
        return Proposal(plan, time.perf_counter() - began)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Send what C code prints to stderr: the solver's library has a line that no option silences, and stdout is JSON's.

    C keeps what it prints in a buffer of its own, which must be emptied before stdout is given back.
    """
    flush = ctypes.CDLL(None).fflush if os.name == "posix" else lambda _stream: None
    sys.stdout.flush()
    flush(None)
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


def _first_plan(
    case: Case,
    arrays: CostArrays,
    pool: PlanPool,
    leaning: _Leaning,
    choose: Choose | None,
    windows: int,
) -> Proposal:
    planner = Planner(_lane(pool, arrays, still=leaning.still), leaning.settings)
    watch = Watch(planner)
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


def _lane(pool: PlanPool, arrays: CostArrays, *, still: bool) -> Lanes:
    return Lanes.of(pool, arrays, np.zeros(1, dtype=np.int64), np.array([still]))


def _searched(method: str, case: Case, settings: BenchSettings) -> Plan | None:
    """Return the best plan that a search finds, or ``None`` where none of its plans fits."""
    space = case.truth.space
    if method == "random":
        return _best_told(RandomSearch(space, settings.seed), case, settings.evaluations)
    from autotune.agents.optuna_search import OptunaSearch

    with tempfile.TemporaryDirectory() as folder:
        first = (space.baseline(), space.leanest())
        return _best_told(OptunaSearch(space, Path(folder), settings.seed, first), case, settings.evaluations)


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
    """Return what a window of one step would measure if all were as predicted."""
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
    """Return a method's figures; plans that do not fit are counted, and left out of the regret.

    Args:
        cases: the jobs, of which the first ``len(proposals)`` count.
        proposals: per job, one per network that is judged.
        evaluations: plans that were measured for each job.
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
        "regret_mean_ci95": list(interval_over_jobs_and_seeds(whole.T, np.arange(len(whole)))) if whole.size else None,
        "over_budget": over,
        "infeasible": infeasible,
        "evaluations": evaluations,
        "decision_s": float(np.median([proposal.seconds for made in proposals for proposal in made])),
    }


# --- Moving jobs ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Hold what a method came to on n lanes; arrays of shape (n,).

    Attributes:
        seconds: what each run took.
        ran_out: how many of its windows ran out of memory.
    """

    seconds: Floats
    ran_out: Floats


def drive(
    runs: MovingRuns,
    course: Course,
    settings: PlannerSettings,
    choose: Choose | None = None,
    prepare: Callable[[Planner], None] | None = None,
) -> Outcome:
    """Run a course under a planner.

    Args:
        runs: the runs.
        course: what happens to them.
        settings: of the planner.
        choose: leans on it; ``None`` leaves it alone.
        prepare: is given the planner before the first window.
    """
    runs.begin(course)
    planner = Planner(runs.lanes, settings)
    watch = Watch(planner)
    if prepare is not None:
        prepare(planner)
    situation, ran_out = runs.situation(), np.zeros(len(course.job))
    for _ in range(runs.windows):
        levers = None if choose is None else levers_of(choose(watch.features(situation)))
        seen = runs.run(planner.decide(situation, levers))
        situation = runs.situation()
        watch.observe(seen, situation.noise_scale)
        ran_out += seen.ran_out
    return Outcome(seconds=runs.seconds, ran_out=ran_out)


def period_rule(run: Features) -> Actions:
    """Return the actions of a hand-made rule: brace when a dip is due, else be one step less cautious.

    Args:
        run: shape (n, len(RUN_FEATURES)).
    """
    actions = neutral_actions(len(run))
    due = run[:, list(RUN_FEATURES).index("dip_due")] == 0
    actions[:, 0] = np.where(due, BRACES.index(1.0), NEUTRAL[0])
    actions[:, 1] = np.where(due, NEUTRAL[1], NEUTRAL[1] - 1)
    return actions


def strengths_of(world: str, strengths: Strengths) -> Strengths:
    """Return how strongly conditions move in one of the worlds.

    Half and double scale what moves and what a switch costs; events come half and twice as often.
    """
    if world in MECHANISMS:
        return strengths.only(*MECHANISMS[world])
    factor = _FACTORS[world]
    sizes = {name: factor * getattr(strengths, name) for name in _SIZES}
    return replace(strengths, **sizes, event_every=round(strengths.event_every / factor))


def without(choose: Choose, group: str) -> Choose:
    """Return a chooser that sees zeros in place of a group of features; see ``GROUPS``."""
    hidden = [number for number, name in enumerate(RUN_FEATURES) if name.startswith(GROUPS[group])]

    def blind(features: tuple[Features, Features]) -> Actions:
        run, units = features
        run = run.copy()
        run[:, hidden] = 0.0
        return choose((run, np.zeros_like(units) if group == "units" else units))

    return blind


class Guarded:
    """Be a policy as it leads real runs: where a feature lies outside what was trained on, the planner acts alone.

    Args:
        judged: the policy.

    Attributes:
        decisions: how many were made.
        alone: how many of them the planner made alone.
    """

    def __init__(self, judged: Judged) -> None:
        self._judged = judged
        self.decisions = self.alone = 0

    def __call__(self, features: tuple[Features, Features]) -> Actions:
        """Return each lane's actions, shape (n, levers)."""
        outside = np.array([self._judged.ranges.outside(row[None]) is not None for row in features[0]])
        self.decisions += len(outside)
        self.alone += int(outside.sum())
        return np.where(outside[:, None], np.array([NEUTRAL]), self._judged.shipped.most_likely(features))


class ToldRises(Rises):
    """Know the law of lengths instead of learning it: what nobody can know better beforehand.

    Lengths are first-order autoregressive, the longest batch lies a half-normal deviation above. A lane's own two
    deviations are those that its course shows in hindsight.

    Args:
        planner: whose rises these are.
        course: what happens to it.
        memory: windows after which a length is forgotten.
        exactly: whether chances are exact; else they are the planner's own, of the true mean and deviation.
    """

    def __init__(self, planner: Planner, course: Course, memory: float, *, exactly: bool) -> None:
        super().__init__(np.zeros(len(planner.lanes)))
        self._planner, self._exactly = planner, exactly
        self._keep = math.exp(-1 / memory)
        lengths = np.log(course.length)
        innovation = np.sqrt(np.square(lengths[:, 1:] - self._keep * lengths[:, :-1]).mean(axis=1))
        self._innovation = np.maximum(innovation, 1e-9)
        self._jitter = np.sqrt(np.square(np.log(course.longest) - lengths).mean(axis=1))

    def learn(self, rise: Floats) -> None:
        """Do nothing: all is known."""

    def exceed(self, rise: Floats, caution: Floats) -> Floats:
        """Return the chance that the next rise exceeds another, shape (lanes, plans)."""
        begun = self._planner.seen is not None
        middle = (self._keep - 1) * np.log(self._planner.length) if begun else np.zeros(len(self._jitter))
        spread = self._innovation if begun else self._innovation / math.sqrt(1 - self._keep**2)
        self.mean = middle + math.sqrt(2 / math.pi) * self._jitter
        self._square = spread**2 + (1 - 2 / math.pi) * self._jitter**2
        if not self._exactly:
            return super().exceed(rise, caution)
        # A normal plus a half-normal is skew-normal.
        place = (rise - middle[:, None]) / np.hypot(spread, self._jitter)[:, None]
        return np.asarray(ndtr(-place) + 2 * owens_t(place, (self._jitter / spread)[:, None]))


def _moving(
    judged: Judged, recipe: Recipe, settings: BenchSettings, tell: Share
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the table of moving worlds and, if all that moves is among them, that of the ablation."""
    generator = np.random.default_rng(settings.seed + _MOVING_SEED)
    depth = (recipe.jobs.shallowest, recipe.jobs.deepest)
    env = MovingEnv(
        [draw_job(generator, depth=depth) for _ in range(settings.jobs)],
        recipe.strengths,
        max(settings.jobs, settings.lanes),
        windows=recipe.jobs.windows,
        settings=recipe.planner,
    )
    parts = len(settings.mechanisms) + len(GROUPS) * ("all" in settings.mechanisms)
    table: dict[str, Any] = {}
    ablation: dict[str, Any] = {}
    for name in settings.mechanisms:
        tell((len(table) + len(ablation)) / parts, f"moving jobs, {name}")
        world = World(env, recipe, name, settings.seed + _MOVING_SEED)
        table[name] = world.table(judged)
        if name == "all":
            for group in GROUPS:
                tell((len(table) + len(ablation)) / parts, f"moving jobs, all, without {group}")
                ablation[group] = world.entry(world.learned(judged, group))
    return table, ablation


class World:
    """Hold one world's courses and what the planner comes to on them; all worlds share jobs and budgets.

    Args:
        env: whose runs they are; its strengths are set to the world's.
        recipe: how strongly conditions move, and how the planner plans.
        name: a mechanism's.
        seed: of the courses.
    """

    def __init__(self, env: MovingEnv, recipe: Recipe, name: str, seed: int) -> None:
        self._env, self._runs, self._name, self._settings = env, env.runs, name, recipe.planner
        self._runs.strengths = strengths_of(name, recipe.strengths)
        env.generator_state = dict(np.random.default_rng([seed, 1]).bit_generator.state)
        self._course = env.draw()
        self._planner = self._drive(recipe.planner)

    def table(self, judged: Judged) -> dict[str, Any]:
        """Return the world's table: what can be won over the planner, and what each method wins."""
        best = clairvoyant(self._runs, self._course)
        still = best_static(self._runs, self._course)
        headroom = self._won([best])
        guarded = Guarded(judged)
        shipped = self._drive(judged.settings, guarded)
        ppo = self.learned(judged)
        rule = self._drive(self._settings, lambda features: period_rule(features[0]))
        unknown = np.full(len(best), np.nan)
        methods = {
            "best_static": self.entry([Outcome(seconds=still, ran_out=unknown)], headroom),
            "planner": self.entry([self._planner], headroom),
            **self._reserve(headroom),
            "untrained": self.entry(
                [self._drive(judged.settings, _untrained(judged.shipped.width).most_likely)], headroom
            ),
            "period": self.entry([rule], headroom),
            "ppo": self.entry(ppo, headroom) | self._over(rule, ppo) | {"seeds": self._seeds(judged, ppo)},
            "shipped": self.entry([shipped], headroom)
            | self._over(rule, [shipped])
            | {"alone_share": guarded.alone / guarded.decisions},
        }
        if self._name == "pressure":
            for name, exactly in (("informed", False), ("informed_exactly", True)):
                methods[name] = self.entry([self._informed(exactly=exactly)], headroom)
        return {
            "strengths": asdict(self._runs.strengths),
            "jobs": len(np.unique(self._course.job)),
            "lanes": len(self._course.job),
            "windows": self._runs.windows,
            "headroom_percent": float(headroom.mean()),
            "headroom_ci95": self._interval(headroom),
            "methods": methods,
        }

    def learned(self, judged: Judged, hidden: str | None = None) -> list[Outcome]:
        """Return what each network comes to; without a group of features, if one is named."""
        choosers: list[Choose] = [network.most_likely for network in judged.networks.values()]
        if hidden is not None:
            choosers = [without(choose, hidden) for choose in choosers]
        return [self._drive(judged.settings, choose) for choose in choosers]

    def entry(self, outcomes: Sequence[Outcome], headroom: Floats | None = None) -> dict[str, Any]:
        """Return a method's figures.

        Args:
            outcomes: of each training seed, or of the one method.
            headroom: shape (1, lanes), what can be won, in percent; ``None`` leaves out the share that was won.
        """
        won = self._won([outcome.seconds for outcome in outcomes])
        ran_out = float(np.mean([outcome.ran_out for outcome in outcomes]))
        entry = {
            "won_percent": float(won.mean()),
            "won_ci95": self._interval(won),
            "p5": float(np.quantile(won, 0.05)),
            "out_of_memory_per_run": None if math.isnan(ran_out) else ran_out,
        }
        if headroom is not None:
            most = float(headroom.mean())
            entry["captured"] = float(won.mean()) / most if most >= _LEAST_HEADROOM else None
        return entry

    def _drive(
        self,
        settings: PlannerSettings,
        choose: Choose | None = None,
        prepare: Callable[[Planner], None] | None = None,
    ) -> Outcome:
        return drive(self._runs, self._course, settings, choose, prepare)

    def _won(self, seconds: Sequence[Floats]) -> Floats:
        """Return the time won over the planner in percent of its own, shape (methods, lanes)."""
        alone = self._planner.seconds
        return np.stack([100 * (alone - one) / alone for one in seconds])

    def _interval(self, won: Floats) -> list[float]:
        return list(interval_over_jobs_and_seeds(won, self._course.job))

    def _seeds(self, judged: Judged, outcomes: Sequence[Outcome]) -> dict[str, float]:
        won = self._won([outcome.seconds for outcome in outcomes]).mean(axis=1)
        return {name: float(value) for name, value in zip(judged.networks, won, strict=True)}

    def _over(self, rule: Outcome, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Return what is won beyond a rule, in percent of the planner's time, paired."""
        beyond = self._won([outcome.seconds for outcome in outcomes]) - self._won([rule.seconds])
        return {"over_period_percent": float(beyond.mean()), "over_period_ci95": self._interval(beyond)}

    def _reserve(self, headroom: Floats) -> dict[str, Any]:
        """Return the planner that weighs no risk, bare and with the reserve that is best on other courses."""
        bare = replace(self._settings, rise=0.0)
        self._env.settings = bare
        reserve = planner_reserve(self._env, _RESERVES)
        self._env.settings = self._settings
        return {
            "planner_no_risk": self.entry([self._drive(bare)], headroom),
            "planner_reserve": self.entry([self._drive(replace(bare, reserve=reserve))], headroom)
            | {"reserve": reserve},
        }

    def _informed(self, *, exactly: bool) -> Outcome:
        """Return what the planner comes to that is told the true law of lengths."""
        memory = self._runs.strengths.length_windows

        def prepare(planner: Planner) -> None:
            planner.rises = ToldRises(planner, self._course, memory, exactly=exactly)

        return self._drive(self._settings, None, prepare)


# --- Decisions ---


def decision_times(judged: Judged, units: int, windows: int) -> dict[str, Any]:
    """Return the median seconds of one lane's decision on a large job, its second one.

    Args:
        judged: the policy.
        units: of the job.
        windows: of the run that it is in.
    """
    shape = Shape(units=units - 2, accumulation_choices=(1, 2, 4), batching="adaptive")
    profile = draw_profile(np.random.default_rng(0), shape)
    began = time.perf_counter()
    arrays = CostArrays([profile])
    pool = make_pool(arrays)
    pool_s = time.perf_counter() - began
    planner = Planner(_lane(pool, arrays, still=False), judged.settings)
    watch, situation = _begun(planner, windows)
    parts: NDArray[np.float64] = np.zeros((_REPEATS, 2))
    for repeat in range(_REPEATS):
        began = time.perf_counter()
        actions = judged.shipped.most_likely(watch.features(situation))
        parts[repeat, 0] = time.perf_counter() - began
        planner.decide(situation, levers_of(actions))
        parts[repeat, 1] = time.perf_counter() - began
    network_s, decision_s = np.median(parts, axis=0)
    return {
        "units": len(profile.units),
        "plans": int(pool.there.sum()),
        "pool_s": pool_s,
        "network_s": float(network_s),
        "decision_s": float(decision_s),
    }


def _begun(planner: Planner, windows: int) -> tuple[Watch, Situation]:
    """Return the watch of a planner that has seen one window go as believed, and what is known before the next."""
    watch, one = Watch(planner), np.ones(1)
    budget = np.full((1, LOOK_AHEAD), 0.6 * watch.baseline_peak[0])
    situation = Situation(
        budget=budget, progress=0 * one, windows_left=windows * one, noise_scale=50 * one, switch_s=0 * one
    )
    watch.features(situation)
    plan = planner.decide(situation)
    seconds = planner.step_seconds(plan, one)
    ran_out = np.zeros(1, dtype=bool)
    seen = Seen(
        plan=plan,
        length=one,
        longest=one,
        dip=0 * one,
        step_s=seconds,
        window_s=10 * seconds,
        total_s=10 * seconds,
        ran_out=ran_out,
    )
    watch.observe(seen, situation.noise_scale)
    return watch, replace(situation, progress=one / windows, windows_left=(windows - 1) * one)


def _needs_stable_baselines3(policy: Path) -> bool:
    """Tell whether a fresh process that loads the policy and decides once has imported the trainer's library."""
    code = (
        "import sys; from pathlib import Path; from autotune.campaign import bench_policy as bench; "
        "bench.decision_times(bench.load_judged(Path(sys.argv[1])), 5, 10); "
        "print('stable_baselines3' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code, str(policy)], capture_output=True, text=True, check=True)
    return answer.stdout.strip() == "True"

"""Cost of finding a plan in real optimizer steps and in seconds, for every method on one job.

Each method runs as in ``autotune tune`` and is charged for all it uses: references, profile, windows, finals. All plans
are measured again afterwards, side by side in new windows, because the window that chose a plan overrates it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.agents.search_methods import METHODS as TUNING_METHODS
from autotune.agents.search_methods import PlanningMethod
from autotune.bench.harness import SILENT, alternating, document_of
from autotune.bench.search_judging import (
    CLOSE_FRAC,
    COMPARED,
    Improvement,
    SearchRun,
    Worth,
    improvements,
    judge_searches,
    steadied,
)
from autotune.budget import MemoryBudget, format_bytes
from autotune.campaign.baselines import References, measure_references
from autotune.campaign.plan_search import TuningSettings, tune
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import samples_of_progress
from autotune.engines.engine import Engine
from autotune.engines.tuning_windows import make_engine, merge_windows
from autotune.errors import InputError
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.measurement import Measurement
from autotune.mechanics.devices import device_name
from autotune.plan import Plan
from autotune.profiling.profiler import ProfilerOptions, profile
from autotune.records.run_directory import RunDirectory

# Methods by their names in this benchmark: the name in tuning, and whether Optuna measures the hand-made rules first.
METHODS: Mapping[str, tuple[str, bool]] = {
    "exact": ("exact", True),
    "greedy": ("greedy", True),
    "planner": ("planner", True),
    "ppo": ("ppo", True),
    "optuna-cold": ("optuna", False),
    "optuna-warm": ("optuna", True),
    "optuna-prices": ("optuna-prices", True),
    "random": ("random", True),
}
# The first step is not timed, the other four are.
_WINDOW_STEPS = 5
# Factor of additional rounds for plans close to the best one, to distinguish them to within WITHIN_FRAC.
_MORE_ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBenchSettings:
    """Settings of the search benchmark.

    Attributes:
        methods: some of ``METHODS``, with all of ``COMPARED`` among them.
        steps: real optimizer steps that each search may spend, in addition to a profile.
        repetitions: number of runs of every method, each with a different seed.
        rounds: windows in which every plan is measured again; plans close to the best get six times as many more.
        seed: random seed for the first repetition.
        profiler: options of the profiler; every repetition makes its own profile.
    """

    methods: tuple[str, ...] = tuple(METHODS)
    steps: int = 240
    repetitions: int = 3
    rounds: int = 6
    seed: int = 0
    profiler: ProfilerOptions = field(default_factory=ProfilerOptions.lean)

    def __post_init__(self) -> None:
        if not set(COMPARED) <= set(self.methods) <= set(METHODS):
            raise InputError(
                f"methods are {','.join(self.methods)!r}",
                where="--methods",
                allowed=f"{', '.join(METHODS)}; {', '.join(COMPARED)} among them",
            )
        if self.repetitions < 1:
            raise InputError(f"repetitions is {self.repetitions}", where="--repetitions", allowed="at least 1")
        if self.rounds < 2:
            raise InputError(f"rounds is {self.rounds}", where="--rounds", allowed="at least 2")
        TuningSettings(steps=self.steps)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seed of each repetition."""
        return tuple(range(self.seed, self.seed + self.repetitions))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ruler:
    """Conversion of windows into seconds per sample of progress, with the same noise scale for all."""

    profile: Profile
    noise_scale: float | None
    budget_bytes: int

    def seconds(self, plan: Plan, window: Measurement) -> float:
        """Return seconds per sample of progress; infinite if the window failed or was over the budget."""
        if window.failure is not None or window.seconds_per_step is None or window.peak_bytes is None:
            return math.inf
        if window.peak_bytes > self.budget_bytes:
            return math.inf
        return window.seconds_per_step / samples_of_progress(self.profile, plan.accumulation_steps, self.noise_scale)


def bench_search(
    job: Job,
    budget: MemoryBudget,
    runs: Path,
    settings: SearchBenchSettings,
    *,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Return what each method spent until its best plan was within 2 % of the best plan known.

    A repetition makes a new profile and then runs every method, each on a new engine from the same seed; the order
    rotates and alternates, so that drift of the machine's speed affects all methods alike.

    Args:
        job: the job.
        budget: the memory budget; a share is resolved once, for all methods.
        runs: the folder of runs; every measured window is kept in a run directory there.
        settings: settings of the benchmark.
        reporter: shows progress.

    Raises:
        BudgetError: if the leanest plan needs more than the budget.
    """
    reporter.stage("measure the baseline and the leanest plan", 1)
    pilot = make_engine(job, settings.seed)
    references = measure_references(pilot, budget)
    pilot.close()
    size = references.memory_budget_bytes
    assert size is not None
    run = RunDirectory.create(
        runs, "bench", job, {"memory_budget_bytes": size, "steps": settings.steps, "seeds": list(settings.seeds)}
    )
    gradient = references.baseline.gradient
    profiles, searches = [], []
    for number, seed in enumerate(settings.seeds):
        title = f"repetition {number + 1} of {settings.repetitions}"
        reporter.stage(f"{title}: profile", 1)
        options = replace(settings.profiler, seed=seed)
        profiles.append(profile(job, device_name=device_name(), options=options, on_progress=reporter.advance))
        run.write(f"profile-{seed}.json", profiles[-1].to_json())
        ruler = _Ruler(
            profile=profiles[0], noise_scale=None if gradient is None else gradient.noise_scale, budget_bytes=size
        )
        for method in order_of(tuple(dict.fromkeys(settings.methods)), number, settings.repetitions):
            reporter.stage(f"{title}: {method}", settings.steps)
            searches.append(_run(job, method, seed, settings, profiles[-1], ruler, run, reporter))
    plans = list(dict.fromkeys(point.plan for search in searches for point in search.points))
    worths = _measure_again(job, plans, settings, ruler, reporter)
    figures = {
        "job": job.name,
        "memory_budget_bytes": size,
        "memory_budget": format_bytes(size),
        "steps": settings.steps,
        "seeds": list(settings.seeds),
        "rounds": settings.rounds,
        "profiles": [{"steps": found.steps, "seconds": found.seconds} for found in profiles],
        **judge_searches(searches, worths),
    }
    return document_of("search", figures)


def order_of(methods: Sequence[str], number: int, repetitions: int) -> list[str]:
    """Return the order of methods in a repetition: rotated from one to the next, and alternating in direction."""
    start = number * len(methods) // repetitions
    return alternating([*methods[start:], *methods[:start]], number)


def _run(
    job: Job,
    method: str,
    seed: int,
    settings: SearchBenchSettings,
    found: Profile,
    ruler: _Ruler,
    run: RunDirectory,
    reporter: Reporter,
) -> SearchRun:
    """Run one method from its references to its finals."""
    called, warm = METHODS[method]
    tuned_by = TUNING_METHODS[called]
    plans_only = isinstance(tuned_by, PlanningMethod)
    folder = RunDirectory(run.path / f"{method}-{seed}")
    folder.path.mkdir()
    engine = make_engine(job, seed)
    budget = MemoryBudget(size_bytes=ruler.budget_bytes)
    references = measure_references(engine, budget, with_leanest=not plans_only)
    paid = (found.steps, found.seconds) if tuned_by.needs_profile else (0, 0.0)
    failure = None
    try:
        result = tune(
            job,
            called,
            engine,
            references,
            TuningSettings(steps=settings.steps, seed=seed, warm_start=warm),
            run=folder,
            profile=found,
            on_progress=reporter.advance,
        )
    except InputError as error:
        # A planner that finds no fitting plan is charged as well, and does not arrive.
        failure, steps, seconds = str(error), references.steps + paid[0], references.seconds + paid[1]
        for trial in folder.lines("trials.jsonl"):
            steps, seconds = trial["tuning_steps"], trial["tuning_s"]
        points = improvements(_reference_windows(engine, references), ruler.seconds)
    else:
        steps, seconds = result.tuning_steps, result.tuning_s
        windows = [(trial.plan, trial.measurement, trial.tuning_steps, trial.tuning_s) for trial in result.trials]
        points = improvements([*_reference_windows(engine, references), *windows], ruler.seconds)
        points.append(
            Improvement(
                steps=steps,
                seconds=seconds,
                plan=result.plan,
                window_s=ruler.seconds(result.plan, result.measurement),
                chosen=True,
            )
        )
    finally:
        engine.close()
    return SearchRun(
        method=method,
        seed=seed,
        points=tuple(points),
        limit_steps=steps if plans_only else settings.steps + paid[0],
        seconds=seconds,
        failure=failure,
    )


def _reference_windows(engine: Engine, references: References) -> list[tuple[Plan, Measurement, int, float]]:
    spent = references.steps, references.seconds
    windows = [(engine.space.baseline(), references.baseline, *spent)]
    if references.leanest is not None:
        windows.insert(0, (engine.space.leanest(), references.leanest, *spent))
    return windows


def _measure_again(
    job: Job, plans: Sequence[Plan], settings: SearchBenchSettings, ruler: _Ruler, reporter: Reporter
) -> dict[Plan, Worth]:
    """Measure plans side by side in rounds that alternate in direction; plans close to the best get more rounds."""
    # A seed that no search has used.
    engine = make_engine(job, settings.seed + settings.repetitions)
    engine.run(2)
    engine.memory_budget_bytes = ruler.budget_bytes
    seen: list[dict[Plan, Measurement]] = []

    def rounds(some: Sequence[Plan], count: int) -> dict[Plan, Worth]:
        reporter.stage(f"measure {len(some)} plans again, side by side", count)
        for number in range(count):
            seen.append({})
            for plan in alternating(some, number):
                engine.apply(plan)
                seen[-1][plan] = engine.run(_WINDOW_STEPS)
            reporter.advance(number + 1)
        return _worths(seen, ruler)

    worths = rounds(plans, settings.rounds)
    limit = min(worth.seconds_per_sample for worth in worths.values()) * (1 + CLOSE_FRAC)
    close = [plan for plan in plans if worths[plan].seconds_per_sample <= limit]
    worths = rounds(close, settings.rounds * _MORE_ROUNDS)
    engine.close()
    return worths


def _worths(rounds: Sequence[Mapping[Plan, Measurement]], ruler: _Ruler) -> dict[Plan, Worth]:
    steady = steadied([{plan: ruler.seconds(plan, window) for plan, window in one.items()} for one in rounds])
    return {
        plan: Worth(
            seconds_per_sample=_median(seconds),
            halves=(_median(seconds[0::2]), _median(seconds[1::2])),
            window=merge_windows([one[plan] for one in rounds if plan in one]),
        )
        for plan, seconds in steady.items()
    }


def _median(seconds: Sequence[float]) -> float:
    """Return a plan's median over rounds; infinite if it did not fit in every round."""
    return math.inf if not seconds or math.isinf(max(seconds)) else statistics.median(seconds)

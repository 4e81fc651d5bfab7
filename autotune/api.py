"""Offer whole commands as functions: tune a job, or find arms and compare them, down to the documents on disk."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.agents.planner import PLANNERS, planned
from autotune.agents.study_store import checked, without_password
from autotune.budget import MemoryBudget, format_bytes
from autotune.campaign import comparison, tuning
from autotune.campaign.arms import (
    LIVE,
    arm_names,
    live_arm,
    named_arm,
    needs_profile,
    refuse_broken_policies,
    static_arm,
)
from autotune.campaign.journal import Journal, JournaledEngine
from autotune.campaign.profiling import cached_profile, find_profile, profile_elsewhere
from autotune.campaign.progress import Reporter, Silent
from autotune.campaign.runs import RunDirectory, device_kind, device_name, require_writable
from autotune.campaign.tracking import Tracker, send_pending
from autotune.catalog import content_folder, load_job
from autotune.cluster import ClusterOptions
from autotune.data import pointed_at
from autotune.engines.deepspeed_config import STAGES
from autotune.engines.engine import Engine
from autotune.engines.isolated_engine import RankOptions
from autotune.engines.profiler import ProfilerOptions
from autotune.errors import BudgetError, InputError, JobError, RunDirectoryError
from autotune.job import Job
from autotune.physics.memory_model import peak_bytes
from autotune.physics.profile import Profile
from autotune.physics.solver import Goal, require_feasible, solve, with_shadow_price
from autotune.physics.time_model import seconds_per_step
from autotune.plan import Launch, Plan
from autotune.report.figures import draw_comparison

if TYPE_CHECKING:
    from autotune.agents.recipe import Recipe

FIGURE = "comparison.png"
# What a finished campaign leaves, by the key that tells its kind.
_FINISHED = {"method": "tuned.json", "arms": "comparison.json", "table": "reproduction.json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Hold what every command needs.

    Attributes:
        job: the job.
        runs: the runs folder.
        budget: the memory budget; ``None`` for none.
        settings: what a search may spend.
        reporter: shows progress.
        dips: how the budget dips in compared runs; ``None`` if it stays. Static plans are searched for within what a
            dip leaves.
        profiler: what a profile may cost, where there is none yet.
        isolate: the job's reference, if its windows shall run in a process of their own; ``None`` for this one.
        ranks: how many such processes train it together, through DeepSpeed; ``None`` for one without.
        cluster: where many such processes measure plans at once; ``None`` for one after another, here.
        asked: the arguments of the command, to take it up with.
        journal: what the campaign did so far.
        run: the run directory of a campaign that is taken up; ``None`` makes one.
    """

    job: Job
    runs: Path
    budget: MemoryBudget | None
    settings: tuning.TuningSettings
    reporter: Reporter
    dips: comparison.Dips | None = None
    profiler: ProfilerOptions = field(default_factory=ProfilerOptions)
    isolate: str | None = None
    ranks: RankOptions | None = None
    cluster: ClusterOptions | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)
    journal: Journal = field(default_factory=Journal)
    run: RunDirectory | None = None

    def tune(self, method: str) -> dict[str, Any]:
        """Find a plan with one method and return ``tune --json``'s document.

        Raises:
            InputError: for wrong input, before anything is written.
        """
        if method not in tuning.METHODS:
            raise InputError(f"method is {method!r}", where="--method", allowed=tuning.METHODS)
        if self.ranks is not None and method in tuning.PROFILED:
            raise InputError(
                f"{method} plans from a profile, and none is taken of several ranks",
                where="--method",
                allowed=[name for name in tuning.METHODS if name not in tuning.PROFILED],
            )
        if self.cluster is not None and method not in tuning.SPREADING:
            raise InputError(
                f"{method} measures plans one after another, and a cluster would not make it faster",
                where="--cluster",
                allowed=f"--method {', '.join(tuning.SPREADING)}",
            )
        require_writable(self.runs)
        self._refuse_budget_early()
        with contextlib.closing(self._engine()) as engine:
            references = self._references(engine, with_leanest=method not in PLANNERS)
            profile = self._profile([method])
            if profile is not None:
                # A budget that cannot be met is answered here, before anything is written.
                planned(method if method in PLANNERS else "exact", profile, references.memory_budget_bytes, Goal())
            run = self._create("tune", {"method": method})
            tracker = Tracker(self.runs, run.path, f"tune {self.job.name} {method}")
            result = self._search(method, engine, references, profile, run, tracker)
        if self.ranks is not None:
            launched = result.plan.changed(launch=Launch(zero_stage=self.ranks.zero_stage))
            result = replace(result, plan=launched)
        document = {
            "plan": result.plan.to_json(),
            "predicted": None if profile is None else predicted(profile, result.plan, references.memory_budget_bytes),
            "measured": {
                "seconds_per_step": result.measurement.seconds_per_step,
                "peak_bytes": result.measurement.peak_bytes,
                "throughput": result.measurement.throughput,
                "cost": result.cost,
                "baseline_seconds_per_step": result.baseline.seconds_per_step,
                "baseline_peak_bytes": references.baseline.peak_bytes,
                "memory_budget_bytes": references.memory_budget_bytes,
            },
            "tuning_s": result.tuning_s,
            "tuning_steps": result.tuning_steps,
            "run": str(run.path),
        }
        plan = tuning.save_tuned_plan(run, result)
        tracker.artifact(plan)
        if (run.path / "policy").is_dir():
            tracker.artifact(run.path / "policy")
        tracker.artifact(run.write("tuned.json", document))
        tracker.close()
        return document

    def compare(self, names: Sequence[str], seeds: Sequence[int], *, verb: str = "compare") -> dict[str, Any]:
        """Find the arms that must be searched for, compare all of them and return ``comparison.json``.

        Args:
            names: arms: rules, methods, plan files or policy folders; the baseline first.
            seeds: the paired seeds.
            verb: what the run directory is called after.

        Raises:
            InputError: for wrong input, before anything is written.
        """
        require_writable(self.runs)
        refuse_broken_policies(names)
        self._refuse_budget_early()
        with contextlib.closing(self._engine()) as engine:
            run, tracker, arms, references = self._arms(engine, names, seeds, verb)
        return self._compare(names, arms, seeds, references, run, tracker)

    def _arms(
        self, engine: Engine, names: Sequence[str], seeds: Sequence[int], verb: str
    ) -> tuple[RunDirectory, Tracker, dict[str, comparison.Arm], tuning.References]:
        """Make the run directory, and find the arms that must be searched for."""
        references = self._references(engine)
        profile = self._profile(names)
        budget = references.memory_budget_bytes
        arms: dict[str, comparison.Arm] = {}
        for name in (name for name in names if name in LIVE or name not in tuning.METHODS):
            if needs_profile(name):
                assert profile is not None
                arms[name] = live_arm(name, profile, budget)
            else:
                arms[name] = named_arm(name, self.job, engine.space)
        lowest = references
        if self.dips is not None and budget is not None:
            lowest = replace(references, memory_budget_bytes=int(budget * self.dips.share))
            least = None if references.leanest is None else references.leanest.peak_bytes
            if least is not None and least > int(budget * self.dips.share):
                raise InputError(
                    f"a dip leaves {format_bytes(int(budget * self.dips.share))}",
                    where="--dips",
                    allowed=f"at least {format_bytes(least)}, what the leanest plan needs",
                )
        run = self._create(verb, {"arms": list(names), "seeds": list(seeds)})
        tracker = Tracker(self.runs, run.path, f"{verb} {self.job.name}")
        for method in (name for name in names if name not in arms):
            result = self._search(method, engine, lowest, profile, run, tracker)
            tuning.save_tuned_plan(run, result, f"plan-{method}.json")
            arms[method] = static_arm(method, result.plan, tuning_s=result.tuning_s, tuning_steps=result.tuning_steps)
        return run, tracker, arms, references

    def _compare(
        self,
        names: Sequence[str],
        arms: dict[str, comparison.Arm],
        seeds: Sequence[int],
        references: tuning.References,
        run: RunDirectory,
        tracker: Tracker,
    ) -> dict[str, Any]:
        length = self._horizon()
        protocol = comparison.Protocol(
            job=self.job.name,
            arms=tuple(arms[name].name for name in names),
            seeds=tuple(seeds),
            horizon_samples=length,
            memory_budget_bytes=references.memory_budget_bytes,
            dips=self.dips,
        )
        total = len(names) * len(seeds)
        self.reporter.stage(f"compare {len(names)} arms on {len(seeds)} seeds", total)
        finished: set[tuple[str, int]] = set()

        def on_progress(arm: str, seed: int, share: float) -> None:
            if share >= 1:
                finished.add((arm, seed))
            self.reporter.advance(len(finished) + (share if share < 1 else 0), f"{arm}, seed {seed}")

        document = comparison.compare(
            self.job,
            [arms[name] for name in names],
            protocol,
            device=device_name(),
            tracker=tracker,
            journal=self.journal,
            on_progress=on_progress,
        )
        document = {**document, "run": str(run.path)}
        tracker.artifact(run.write("comparison.json", document))
        tracker.artifact(draw_comparison(document, run.path / FIGURE))
        best = fastest_fitting_plan(document)
        if best is not None:
            tracker.artifact(run.write("plan.json", best))
        for entry in document["against_baseline"]:
            tracker.metrics({f"time_ratio.{entry['arm']}": entry["time_ratio"]})
            tracker.tags({f"verdict.{entry['arm']}": entry["verdict"]})
        if (run.path / "policy").is_dir():
            tracker.artifact(run.path / "policy")
        tracker.close()
        return document

    def _horizon(self) -> int:
        self.reporter.stage("pilot run of the baseline, to fix the length of all runs", 1)

        def find() -> int:
            return comparison.find_horizon(
                self.job, on_pilot=lambda number, share: self.reporter.advance(share, f"pilot {number + 1}")
            )

        return int(self.journal.once({"horizon": self.job.name}, find))

    def _refuse_budget_early(self) -> None:
        """Refuse a budget that a profile in the cache shows to be too small, before anything runs."""
        profile = None if self.budget is None else find_profile(self.job, self.runs)
        if profile is not None and self.budget is not None:
            require_feasible(profile, self.budget.resolve(peak_bytes(profile, profile.space.baseline())))

    def _engine(self) -> JournaledEngine:
        self.reporter.stage("measure the baseline", 1)
        made = tuning.make_engine(
            self.job, self.settings.seed, isolate=self.isolate, ranks=self.ranks, cluster=self.cluster
        )
        return JournaledEngine(made, self.journal)

    def _references(self, engine: Engine, *, with_leanest: bool = True) -> tuning.References:
        references = tuning.measure_references(engine, self.budget, with_leanest=with_leanest, clock=self.journal.clock)
        size = references.memory_budget_bytes
        self.reporter.advance(1, "" if size is None else f"budget {format_bytes(size)}")
        return references

    def _profile(self, names: Sequence[str]) -> Profile | None:
        """Return the job's profile if any of the named methods plans from it."""
        if not set(names) & set(tuning.PROFILED) and not any(needs_profile(name) for name in names):
            return None
        self.reporter.stage("profile the units, once", 1)
        if self.isolate is not None and find_profile(self.job, self.runs) is None:
            profile_elsewhere(self.isolate, self.runs, lean=self.profiler.is_lean)
        profile, _, _ = cached_profile(self.job, self.runs, options=self.profiler, on_progress=self.reporter.advance)
        return profile

    def _search(
        self,
        method: str,
        engine: Engine,
        references: tuning.References,
        profile: Profile | None,
        run: RunDirectory,
        tracker: Tracker,
    ) -> tuning.TuningResult:
        self.reporter.stage(f"tune with {method}", self.settings.steps)
        # The database's first connection migrates its schema, which must not fall into a timed window.
        tracker.settle(20.0)
        return tuning.tune(
            self.job,
            method,
            engine,
            references,
            self.settings,
            run=run,
            tracker=tracker,
            profile=profile,
            on_progress=lambda done, _total: self.reporter.advance(done),
            clock=self.journal.clock,
        )

    def _create(self, verb: str, config: dict[str, Any]) -> RunDirectory:
        if self.run is not None:
            return self.run
        budget = None
        if self.budget is not None:
            budget = {"size_bytes": self.budget.size_bytes, "share": self.budget.share}
        run = RunDirectory.create(
            self.runs,
            verb,
            self.job,
            {
                **config,
                "memory_budget": budget,
                "steps": self.settings.steps,
                "seed": self.settings.seed,
                "asked": {**self.asked, **config},
            },
        )
        self.journal.keep_in(run.path)
        send_pending(self.runs)
        return run


def tune(
    job: str | Job,
    method: str = "ppo",
    *,
    memory_budget: str | None = None,
    steps: int = 120,
    trials: int | None = None,
    seed: int = 0,
    lean: bool = True,
    isolate: bool = False,
    ranks: RankOptions | None = None,
    cluster: ClusterOptions | None = None,
    storage: str | None = None,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Find the fastest plan for a job within a memory budget, by measuring plans on the job itself.

    Args:
        job: the job, or its reference.
        method: ``exact``, ``greedy``, ``planner``, ``ppo``, ``random``, ``optuna``, ``optuna-prices`` or
            ``ppo-scratch``.
        memory_budget: a size (``20GiB``) or a share of the FP32 baseline's peak (``75%``); ``None`` for no budget.
        steps: real optimizer steps that may be spent.
        trials: plans that may be measured; ``None`` for as many as the steps allow.
        seed: of the search and of the engine.
        lean: whether a profile, where there is none yet, may be one in a tenth of the steps.
        isolate: whether windows run in a process of their own, so that what kills or hangs it is a failed window. The
            job is then given by its reference.
        ranks: how many such processes train it together, through DeepSpeed, at which ZeRO stage; ``None`` for one
            without.
        cluster: a Ray cluster on whose workers plans are measured at once, each in a process of its own; ``None`` for
            one after another, here. For ``random``, ``optuna`` and ``optuna-prices``.
        storage: a database for Optuna's studies, ``postgresql://user@host:port/database``; ``None`` keeps them in the
            run directory.
        runs_dir: where the run directory is made.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that ``autotune tune --json`` prints.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    session = _session(
        job,
        memory_budget,
        steps,
        trials,
        seed,
        runs_dir,
        reporter,
        lean=lean,
        isolate=isolate,
        ranks=ranks,
        cluster=cluster,
        storage=storage,
    )
    return session.tune(method)


def tune_stages(
    job: str,
    method: str,
    count: int,
    *,
    memory_budget: str | None = None,
    config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Tune a job at every ZeRO stage in turn, and return the fastest plan of all of them.

    Args:
        job: the job's reference.
        method: as for :func:`tune`.
        count: how many ranks.
        memory_budget: as for :func:`tune`; a share is one of the baseline's peak at stage 0, for all stages.
        config: a DeepSpeed configuration of the user's own.
        settings: what else :func:`tune` takes, for each stage.

    Returns:
        The fastest one's document, and under ``stages`` what was measured at each, or why it was not.

    Raises:
        InputError: for wrong input; or for a budget that is met at no stage.
    """
    budget, found, stages = memory_budget, [], {}
    for stage in STAGES:
        try:
            document = tune(
                job,
                method,
                memory_budget=budget,
                ranks=RankOptions(count=count, zero_stage=stage, config=config),
                **settings,
            )
        except BudgetError as error:
            if budget is not None and MemoryBudget.parse(budget).share is not None:
                raise
            stages[str(stage)] = {"refused": str(error)}
            continue
        found.append(document)
        stages[str(stage)] = {"measured": document["measured"], "run": document["run"]}
        if budget is not None:
            budget = f"{document['measured']['memory_budget_bytes']}B"
    if not found:
        raise BudgetError(f"{memory_budget} is met at no ZeRO stage", where="--memory-budget", allowed="a larger one")
    best = min(found, key=lambda document: document["measured"]["seconds_per_step"] or math.inf)
    return {**best, "stages": stages}


def resume(run: str | Path, *, job: Job | None = None, reporter: Reporter | None = None) -> dict[str, Any]:
    """Take up a tuning or a comparison that was interrupted at any instant, and finish it.

    What was measured stays; the model begins anew, so that windows after the interruption see an earlier stage of
    training than they would have. Of a campaign that was finished, the document is returned as it is.

    Args:
        run: its run directory.
        job: the job, if it was handed over as an object.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that the command would have returned.

    Raises:
        InputError: if the folder holds no such run, or a damaged one.
    """
    folder = RunDirectory.open(Path(run))
    config = folder.read("config.json")
    asked = config.get("asked")
    if not isinstance(asked, dict) or not {"method", "arms", "table"} & set(asked):
        raise RunDirectoryError("holds no tuning and no comparison", where=str(run), allowed="the run of one")
    finished = next(name for key, name in _FINISHED.items() if key in asked)
    if (folder.path / finished).is_file():
        return folder.read(finished)
    if "table" in asked:
        return _reproduced(asked, folder, Journal.opened(folder.path), reporter or Silent())
    if asked["job"] is None and job is None:
        raise RunDirectoryError("its job was an object", where=str(run), allowed="autotune.resume(run, job=...)")
    session = replace(
        _session(
            job or asked["job"],
            asked["memory_budget"],
            asked["steps"],
            asked["trials"],
            asked["seed"],
            folder.path.parent,
            reporter,
            lean=asked["lean"],
            isolate=asked["isolate"],
            ranks=None if asked.get("ranks") is None else RankOptions(**asked["ranks"]),
            cluster=None if asked.get("cluster") is None else ClusterOptions(**asked["cluster"]),
            storage=asked.get("storage"),
        ),
        journal=Journal.opened(folder.path),
        run=folder,
    )
    if "method" in asked:
        return session.tune(asked["method"])
    dips = asked["dips"]
    session = replace(session, dips=None if dips is None else comparison.Dips.parse(dips))
    return session.compare(asked["arms"], tuple(asked["seeds"]), verb=config["verb"])


def compare(
    job: str | Job,
    arms: Sequence[str],
    *,
    seeds: int = 10,
    memory_budget: str | None = None,
    steps: int = 120,
    trials: int | None = None,
    seed: int = 0,
    dips: str | None = None,
    lean: bool = True,
    storage: str | None = None,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
    verb: str = "compare",
) -> dict[str, Any]:
    """Compare arms on paired, interleaved, fresh seeds; methods among them are searched for first.

    Args:
        job: the job, or its reference.
        arms: rules, methods, plan files or policy folders.
        seeds: how many paired seeds; fewer than six give an indication.
        memory_budget: as for :func:`tune`.
        steps: as for :func:`tune`, for each search.
        trials: as for :func:`tune`, for each search.
        seed: of the searches and of the tuning engine.
        dips: how the budget dips in compared runs, ``EVERY:SHARE`` as in ``5:70%``; ``None`` if it stays.
        lean: as for :func:`tune`.
        storage: as for :func:`tune`.
        runs_dir: where the run directory is made.
        reporter: shows progress; ``None`` shows nothing.
        verb: what the run directory is called after.

    Returns:
        The document ``comparison.json``.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    names, drawn = arm_names(arms), comparison.paired_seeds(seeds)
    moves = None if dips is None else comparison.Dips.parse(dips)
    if moves is not None and memory_budget is None:
        raise InputError("dips are given without a memory budget", where="--dips", allowed="--memory-budget beside it")
    session = _session(job, memory_budget, steps, trials, seed, runs_dir, reporter, lean=lean, storage=storage)
    session = replace(session, dips=moves, asked={**session.asked, "dips": dips})
    return session.compare(names, drawn, verb=verb)


def reproduce(
    table: str,
    *,
    data: str | Path | None = None,
    scale: str = "paper",
    seeds: int = 6,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Repeat one of the paper's tables: its numbers, ours, and the ratio.

    Args:
        table: ``table1`` to ``table4``, or ``error-analysis``.
        data: the folder that CIFAR-10 and WikiText-2 lie in, in a published format; ``None`` for the one that the
            environment names, or for a scale that needs none.
        scale: ``paper`` for the paper's own jobs; ``cpu`` for small ones on data that every machine has.
        seeds: how many paired seeds; fewer than six give an indication.
        runs_dir: where the run directory is made.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that ``autotune reproduce --json`` prints.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    from autotune.campaign.reproduce.tables import experiments_for, sources_of

    runs = Path(runs_dir)
    comparison.paired_seeds(seeds)
    with pointed_at(data):
        sources = sources_of(experiments_for(table, scale))
    require_writable(runs)
    asked = {
        "table": table,
        "data": None if data is None else str(Path(data).absolute()),
        "scale": scale,
        "seeds": seeds,
    }
    config = {"asked": asked, "data": [asdict(source) for source in sources]}
    run = RunDirectory.create(runs, "reproduce", table, config)
    journal = Journal()
    journal.keep_in(run.path)
    return _reproduced(asked, run, journal, reporter or Silent())


def _reproduced(asked: Mapping[str, Any], run: RunDirectory, journal: Journal, reporter: Reporter) -> dict[str, Any]:
    from autotune.campaign.reproduce.races import Campaign
    from autotune.campaign.reproduce.tables import experiments_for, reproduced

    began = journal.clock()
    with pointed_at(asked["data"]):
        experiments = experiments_for(asked["table"], asked["scale"])
        campaign = Campaign(
            run=run,
            journal=journal,
            seeds=comparison.paired_seeds(asked["seeds"]),
            reporter=reporter,
            place=device_kind(),
        )
        document = reproduced(asked["table"], asked["scale"], experiments, campaign)
    document = {**document, "seconds": journal.clock() - began, "run": str(run.path)}
    run.write("reproduction.json", document)
    return document


def train(
    recipe: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    processes: int | None = None,
    cluster: ClusterOptions | None = None,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Train the policy that leans on the planner, by PPO on simulated jobs.

    Args:
        recipe: a recipe file; ``None`` for the defaults, or for what ``resume`` was begun with.
        resume: the run directory of an interrupted training.
        processes: seeds trained at once; ``None`` for one per core, or per worker of the cluster.
        cluster: a Ray cluster that trains them; ``None`` for this machine.
        runs_dir: where the run directory is made.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that ``autotune train --json`` prints.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    from autotune.campaign import training

    if resume is not None:
        found, run, config = _taken_up(recipe, resume)
        if "search" in config:
            raise InputError(
                "holds a search", where=str(resume), allowed="a training, or --search N beside --resume to take it up"
            )
    else:
        found = _recipe(recipe)
        require_writable(Path(runs_dir))
        run = RunDirectory.create(Path(runs_dir), "train", "simulated", {"recipe": found.to_json()})
    tracker = Tracker(run.path.parent, run.path, "train")
    document = training.train(found, run, tracker, reporter or Silent(), processes=processes, cluster=cluster)
    tracker.close()
    return document


def search_recipe(
    recipe: str | Path | None = None,
    *,
    trials: int = 20,
    decisions: int | None = None,
    resume: str | Path | None = None,
    processes: int | None = None,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Search for the PPO settings that a recipe trains best with, by Optuna over short trainings.

    Args:
        recipe: a recipe file, whose own values are tried first; ``None`` for the defaults, or for what ``resume`` was
            begun with.
        trials: short trainings, those that ``resume`` holds included.
        decisions: that each trains on; ``None`` for a fifth of the recipe's, or for what ``resume`` was begun with.
        resume: the run directory of an interrupted search.
        processes: trials trained at once; ``None`` for one per core.
        runs_dir: where the run directory is made.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that ``autotune train --search --json`` prints.

    Raises:
        InputError: for wrong input, before anything is written.
        AutotuneError: if a trial was killed, or every trial failed.
    """
    from autotune.agents.recipe_space import space_around
    from autotune.campaign import recipe_search

    if resume is not None:
        found, run, config = _taken_up(recipe, resume)
        begun = recipe_search.begun_search(config, where=run.path)
        if decisions not in (None, begun):
            raise InputError(f"is {decisions}", where="--search-decisions", allowed=f"{begun}, as the search was begun")
        settings = recipe_search.SearchSettings(trials=trials, decisions=begun)
    else:
        found = _recipe(recipe)
        each = recipe_search.share_of(found) if decisions is None else decisions
        settings = recipe_search.SearchSettings(trials=trials, decisions=each)
        space_around(found.ppo)
        require_writable(Path(runs_dir))
        config = {"recipe": found.to_json(), "search": {"trials": trials, "decisions": each}}
        run = RunDirectory.create(Path(runs_dir), "train", "search", config)
    with recipe_search.opened(found, settings, run) as search:
        send_pending(run.path.parent)
        tracker = Tracker(run.path.parent, run.path, "train search")
        document = recipe_search.run_search(search, tracker, reporter or Silent(), processes=processes)
        tracker.close()
    return document


def _recipe(path: str | Path | None) -> Recipe:
    from autotune.agents.recipe import Recipe, read_recipe

    return Recipe() if path is None else read_recipe(Path(path))


def _taken_up(recipe: str | Path | None, resume: str | Path) -> tuple[Recipe, RunDirectory, dict[str, Any]]:
    """Return the recipe, the run and the configuration of an interrupted training."""
    from autotune.agents.recipe import recipe_of

    if recipe is not None:
        raise InputError("both --recipe and --resume are given", where="train", allowed="one of them")
    run = RunDirectory.open(Path(resume))
    config = run.read("config.json")
    begun = config.get("recipe")
    if not isinstance(begun, dict):
        raise InputError("holds no training", where=str(resume), allowed="the run directory of a training")
    return recipe_of(begun, where=str(run.path / "config.json")), run, config


def fine_tune(
    job: str | Job,
    policy: str | Path | None = None,
    *,
    memory_budget: str | None = None,
    windows: int = 96,
    seed: int = 0,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Train a policy on with one real job; the better of before and after is kept.

    Args:
        job: the job, or its reference.
        policy: the policy folder to begin with; ``None`` for the shipped one.
        memory_budget: as for :func:`tune`.
        windows: windows of the job to train on.
        seed: of training.
        runs_dir: where the run directory is made.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that ``autotune train JOB --json`` prints.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    from autotune.agents.bundle import load_policy
    from autotune.agents.ppo import FineTuning
    from autotune.campaign import fine_tuning

    found, runs, shows = load_job(job), Path(runs_dir), reporter or Silent()
    folder = content_folder("policies") / "ppo" if policy is None else Path(policy)
    load_policy(folder)
    if memory_budget is not None:
        MemoryBudget.parse(memory_budget)
    require_writable(runs)
    shows.stage("profile the units, once", 1)
    profile, _, _ = cached_profile(found, runs, on_progress=shows.advance)
    run = RunDirectory.create(runs, "train", found, {"from": str(folder), "memory_budget": memory_budget, "seed": seed})
    tracker = Tracker(runs, run.path, f"train {found.name}")
    recipe = FineTuning(windows=windows)
    document = fine_tuning.go_on(found, folder, profile, memory_budget, recipe, run, tracker, shows, seed=seed)
    tracker.close()
    return document


def _session(
    job: str | Job,
    memory_budget: str | None,
    steps: int,
    trials: int | None,
    seed: int,
    runs_dir: str | Path,
    reporter: Reporter | None,
    *,
    lean: bool = False,
    isolate: bool = False,
    ranks: RankOptions | None = None,
    cluster: ClusterOptions | None = None,
    storage: str | None = None,
) -> Session:
    if ranks is not None and cluster is not None:
        raise InputError("stands beside ranks", where="--cluster", allowed="one of both: ranks are on one machine")
    isolate = isolate or ranks is not None or cluster is not None
    if isolate and not isinstance(job, str):
        raise JobError(
            f"is {type(job).__name__}", where="isolate", allowed="a job's name, since it crosses a process border"
        )
    asked = {
        "job": job if isinstance(job, str) else None,
        "memory_budget": memory_budget,
        "steps": steps,
        "trials": trials,
        "seed": seed,
        "lean": lean,
        "isolate": isolate,
        "ranks": None if ranks is None else asdict(ranks),
        "cluster": None if cluster is None else asdict(cluster),
        # Where it is taken up, a password comes from PGPASSWORD.
        "storage": None if storage is None else without_password(storage),
    }
    budget = None if memory_budget is None else MemoryBudget.parse(memory_budget)
    settings = tuning.TuningSettings(
        steps=steps, trials=trials, seed=seed, storage=None if storage is None else checked(storage)
    )
    session = Session(
        job=load_job(job),
        runs=Path(runs_dir),
        budget=budget,
        settings=settings,
        reporter=reporter or Silent(),
        isolate=job if isolate and isinstance(job, str) else None,
        ranks=ranks,
        cluster=cluster,
        asked=asked,
    )
    return replace(session, profiler=ProfilerOptions.lean()) if lean else session


def predicted(profile: Profile, plan: Plan, budget_bytes: int | None = None) -> dict[str, float]:
    """Return what a profile predicts of a plan.

    Args:
        profile: the profile.
        plan: the plan.
        budget_bytes: the budget that it was made for; ``None`` for none.

    Returns:
        ``seconds_per_step``, ``peak_bytes`` and, under a budget, ``seconds_per_gib``: what one more GiB would save in
        each step of the exact solver's plan.
    """
    document = {"seconds_per_step": seconds_per_step(profile, plan), "peak_bytes": peak_bytes(profile, plan)}
    if budget_bytes is not None:
        priced = with_shadow_price(profile, solve(profile, budget_bytes), budget_bytes)
        document["seconds_per_gib"] = priced.shadow_price or 0.0
    return document


def fastest_fitting_plan(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return the plan of the fastest arm that stayed within the budget on every seed; ``None`` if there is none."""
    ratios = {document["baseline"]: 1.0}
    ratios.update({entry["arm"]: entry["time_ratio"] for entry in document["against_baseline"]})
    fitting = [
        arm
        for arm in document["arms"]
        if "plan" in arm
        and ratios[arm["name"]] is not None
        and all(run["within_budget"] and run["reached"] for run in arm["runs"])
    ]
    if not fitting:
        return None
    best = min(fitting, key=lambda arm: ratios[arm["name"]])
    plan: dict[str, Any] = best["plan"]
    return plan

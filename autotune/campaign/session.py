"""One campaign on one job from the first check to the last file: what every command shares."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.agents.planner import PLANNERS, planned
from autotune.agents.study_store import checked
from autotune.budget import MemoryBudget, format_bytes
from autotune.campaign import comparison, plan_search
from autotune.campaign.arms import (
    LIVE,
    live_arm,
    named_arm,
    needs_profile,
    refuse_broken_policies,
    require_distinct,
    static_arm,
)
from autotune.campaign.baselines import References, measure_references
from autotune.catalog import load_job
from autotune.cost_model.carbon import Intensity
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.paper_equations import Weights
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import Goal, require_feasible, solve, with_shadow_price
from autotune.cost_model.time_model import seconds_per_step
from autotune.engines.engine import Engine
from autotune.engines.job_checks import build_model, build_optimizer
from autotune.engines.ray_cluster import ClusterOptions
from autotune.engines.registry import RankOptions
from autotune.engines.tuning_windows import make_engine
from autotune.errors import InputError, JobError
from autotune.gym.reward import Objective
from autotune.io.addresses import without_secrets
from autotune.io.documents import Count
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.launching import launched, split, suffix
from autotune.mechanics.devices import (
    device_kind,
    device_name,
    is_accelerator,
    require_devices,
    require_fp32_choice,
)
from autotune.mechanics.energy_meter import require_watts
from autotune.plan import Launch, Plan
from autotune.profiling.profile_cache import Ranked, cached_profile, find_profile, profile_elsewhere
from autotune.profiling.profiler import ProfilerOptions
from autotune.records.journal import Journal, JournaledEngine
from autotune.records.protocol import Arm, Dips, Protocol
from autotune.records.run_directory import PROFILE, RunDirectory, require_writable
from autotune.records.tracking import Tracker, send_pending
from autotune.report.figures import draw_comparison
from autotune.report.writing import publish

FIGURE = "comparison.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What every command needs.

    Attributes:
        job: the job.
        runs: the runs folder.
        budget: the memory budget; ``None`` for none.
        settings: what a search may spend.
        reporter: shows progress.
        watts: the device's power, for an estimate of energy where it cannot be measured; ``None`` makes none.
        intensity: grams of CO2 per kWh, for compared runs; ``None`` if it was not given.
        dips: how the budget dips in compared runs; ``None`` if it stays. Static plans are searched for within what a
            dip leaves.
        profiler: what a profile may cost, where there is none yet.
        isolate: the job's reference, if its windows shall run in a process of their own; ``None`` for this one.
        ranks: how many such processes train it together, through DeepSpeed; ``None`` for one without.
        cluster: where many such processes measure plans at once; ``None`` for one after another, here.
        asked: the arguments of the command, to take it up with.
        journal: what the campaign did so far.
        run: the run directory of a campaign that is taken up; ``None`` makes one.
        opened: closes what the campaign opened, its run directory above all.
    """

    job: Job
    runs: Path
    budget: MemoryBudget | None
    settings: plan_search.TuningSettings
    reporter: Reporter
    watts: float | None = None
    intensity: Intensity | None = None
    dips: Dips | None = None
    profiler: ProfilerOptions = field(default_factory=ProfilerOptions)
    isolate: str | None = None
    ranks: RankOptions | None = None
    cluster: ClusterOptions | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)
    journal: Journal = field(default_factory=Journal)
    run: RunDirectory | None = None
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def tune(self, method: str) -> dict[str, Any]:
        """Find a plan with one method and return ``tune --json``'s document.

        Raises:
            InputError: for wrong input, before anything is written.
        """
        if method not in plan_search.METHODS:
            raise InputError(f"method is {method!r}", where="--method", allowed=plan_search.METHODS)
        if self.cluster is not None and method not in plan_search.SPREADING:
            raise InputError(
                f"{method} measures plans one after another, and a cluster would not make it faster",
                where="--cluster",
                allowed=f"--method {', '.join(plan_search.SPREADING)}",
            )
        weights = self.settings.objective.weights
        if method in plan_search.PROFILED and not weights.time and not weights.memory:
            raise InputError(
                f"{method} plans by time and memory, and neither has a weight",
                where="--weights",
                allowed=f"w1 or w2 above 0, or --method {', '.join(plan_search.SEARCHES)}",
            )
        require_writable(self.runs)
        self._refuse_budget_early()
        if self._fills_device:
            self._profile([method])
        with contextlib.closing(self._engine()) as engine:
            references = self._references(engine, with_leanest=method not in PLANNERS)
            self.settings.objective.check(references.baseline)
            profile = self._profile([method])
            if profile is not None:
                # A budget that cannot be met is answered here, before anything is written.
                planned(method if method in PLANNERS else "exact", profile, references.memory_budget_bytes, Goal())
            run = self._create("tune", {"method": method})
            self._keep_profile(run, profile)
            tracker = Tracker(self.runs, run.path, f"tune {self.job.name} {method}")
            result = self._search(method, engine, references, profile, run, tracker)
        result = replace(result, plan=result.plan.changed(launch=self._launch))
        document = {
            "plan": result.plan.to_json(),
            "predicted": None if profile is None else predicted(profile, result.plan, references.memory_budget_bytes),
            "measured": {
                "seconds_per_step": result.measurement.seconds_per_step,
                "peak_bytes": result.measurement.peak_bytes,
                "throughput": result.measurement.throughput,
                "cost": result.cost,
                "sample_j": result.measurement.sample_j,
                "baseline_sample_j": result.baseline.sample_j,
                "energy_source": result.measurement.energy_source,
                "baseline_seconds_per_step": result.baseline.seconds_per_step,
                "baseline_peak_bytes": references.baseline.peak_bytes,
                "memory_budget_bytes": references.memory_budget_bytes,
            },
            "tuning_s": result.tuning_s,
            "tuning_steps": result.tuning_steps,
            "run": str(run.path),
        }
        plan = plan_search.save_tuned_plan(run, result)
        tracker.artifact(plan)
        if (run.path / "policy").is_dir():
            tracker.artifact(run.path / "policy")
        tracker.artifact(run.write("tuned.json", document))
        publish(run.path, tracker)
        tracker.close()
        return document

    @property
    def _launch(self) -> Launch:
        """Return what a plan of this campaign is launched with."""
        return self.job.launch if self.ranks is None else replace(self.job.launch, zero_stage=self.ranks.zero_stage)

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
        refuse_broken_policies([split(name, where="--arms")[0] for name in names])
        require_distinct(names)
        own, others = self._by_launch(names)
        self._refuse_budget_early()
        if self._fills_device:
            self._profile(own)
        with contextlib.closing(self._engine()) as engine:
            run, tracker, arms, references = self._arms(engine, names, seeds, verb)
        del engine
        for launch, group in others.items():
            arms |= self._launched_arms(launch, group, references, run, tracker)
        return self._compare(names, arms, seeds, references, run, tracker)

    def _arms(
        self, engine: Engine, names: Sequence[str], seeds: Sequence[int], verb: str
    ) -> tuple[RunDirectory, Tracker, dict[str, Arm], References]:
        """Make the run directory, and find the arms that must be searched for."""
        references = self._references(engine)
        own, others = self._by_launch(names)
        for name in itertools.chain.from_iterable(others.values()):
            if name not in plan_search.METHODS and not needs_profile(name):
                # A name that is none, or a plan of another model, is refused before anything is spent.
                named_arm(name, self.job, engine.space)
        for launch in others:
            changed = launched(self.job, launch)
            build_optimizer(changed, build_model(self.job))
        profile = self._profile(own)
        budget = references.memory_budget_bytes
        arms = {name: self._plain_arm(name, engine, profile, budget) for name in own if not _is_searched(name)}
        lowest = self._lowest(references)
        run = self._create(verb, {"arms": list(names), "seeds": list(seeds)})
        self._keep_profile(run, profile)
        tracker = Tracker(self.runs, run.path, f"{verb} {self.job.name}")
        for method in (name for name in own if _is_searched(name)):
            arms[method] = self._searched_arm(method, engine, lowest, profile, run, tracker)
        return run, tracker, arms, references

    def _lowest(self, references: References) -> References:
        """Return the references with what a dip leaves of the budget, within which static plans are searched for.

        Raises:
            InputError: if the leanest plan needs more.
        """
        budget = references.memory_budget_bytes
        if self.dips is None or budget is None:
            return references
        lowest = replace(references, memory_budget_bytes=int(budget * self.dips.share))
        least = None if references.leanest is None else references.leanest.peak_bytes
        if least is not None and least > int(budget * self.dips.share):
            raise InputError(
                f"a dip leaves {format_bytes(int(budget * self.dips.share))}",
                where="--dips",
                allowed=f"at least {format_bytes(least)}, what the leanest plan needs",
            )
        return lowest

    def _by_launch(self, names: Sequence[str]) -> tuple[list[str], dict[Launch, list[str]]]:
        """Return the arms that train the job as it is, and the others by what they are launched with.

        Raises:
            InputError: if the job is launched too, or an arm cannot be on this machine.
        """
        own: list[str] = []
        others: dict[Launch, list[str]] = {}
        for name in names:
            plain, launch = split(name, where="--arms")
            require_fp32_choice(launch.fp32, device_kind(), where=f"arm {name!r}")
            if launch == Launch():
                own.append(name)
            elif self.job.launch == Launch():
                others.setdefault(launch, []).append(plain)
            else:
                raise InputError(
                    f"arm {name!r} is launched differently from the job",
                    where="--arms",
                    allowed=f"arms without it, or the job without {suffix(self.job.launch)}",
                )
        return own, others

    def _plain_arm(self, name: str, engine: Engine, profile: Profile | None, budget: int | None) -> Arm:
        if needs_profile(name):
            assert profile is not None
            return live_arm(name, profile, budget)
        return named_arm(name, self.job, engine.space)

    def _searched_arm(
        self,
        method: str,
        engine: Engine,
        references: References,
        profile: Profile | None,
        run: RunDirectory,
        tracker: Tracker,
    ) -> Arm:
        result = self._search(method, engine, references, profile, run, tracker)
        result = replace(result, plan=result.plan.changed(launch=self._launch))
        plan_search.save_tuned_plan(run, result, f"plan-{method}.json")
        return static_arm(method, result.plan, tuning_s=result.tuning_s, tuning_steps=result.tuning_steps)

    def _launched_arms(
        self, launch: Launch, names: Sequence[str], plain: References, run: RunDirectory, tracker: Tracker
    ) -> dict[str, Arm]:
        """Find the arms that train the job launched differently, within the same budget in bytes.

        What is measured to find them stands in a folder of their own.
        """
        # What compiling left in cycles is not the next engine's memory.
        gc.collect()
        budget = plain.memory_budget_bytes
        session = replace(
            self,
            job=launched(self.job, launch),
            budget=None if budget is None else MemoryBudget(size_bytes=budget),
        )
        if self._fills_device:
            session._profile(names)
        with contextlib.closing(session._engine()) as engine:
            references = session._references(engine)
            profile = session._profile(names)
            folder = RunDirectory(run.path / f"{run.path.name}{suffix(launch)}")
            folder.path.mkdir(exist_ok=True)
            arms = {}
            for name in names:
                if _is_searched(name):
                    arm = session._searched_arm(name, engine, session._lowest(references), profile, folder, tracker)
                else:
                    arm = session._plain_arm(name, engine, profile, budget)
                called = arm.name + suffix(launch)
                arms[name + suffix(launch)] = replace(arm, name=called, job=session.job)
        return arms

    def _compare(
        self,
        names: Sequence[str],
        arms: dict[str, Arm],
        seeds: Sequence[int],
        references: References,
        run: RunDirectory,
        tracker: Tracker,
    ) -> dict[str, Any]:
        length = self._horizon()
        protocol = Protocol(
            job=self.job.name,
            arms=tuple(arms[name].name for name in names),
            seeds=tuple(seeds),
            horizon_samples=length,
            memory_budget_bytes=references.memory_budget_bytes,
            dips=self.dips,
            watts=self.watts,
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
            intensity=self.intensity,
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
        publish(run.path, tracker)
        tracker.close()
        return document

    def _horizon(self) -> int:
        self.reporter.stage("pilot run of the baseline, to fix the length of all runs", 1)

        def find() -> int:
            return comparison.find_horizon(
                self.job, on_pilot=lambda number, share: self.reporter.advance(share, f"pilot {number + 1}")
            )

        return int(self.journal.once({"horizon": self.job.name}, find, Count))

    def _refuse_budget_early(self) -> None:
        """Refuse a budget that a profile in the cache shows to be too small, before anything runs."""
        profile = None if self.budget is None else find_profile(self.job, self.runs, self._ranked)
        if profile is not None and self.budget is not None:
            require_feasible(profile, self.budget.resolve(peak_bytes(profile, profile.space.baseline())))

    def _engine(self) -> JournaledEngine:
        self.reporter.stage("measure the baseline", 1)
        made = make_engine(
            self.job,
            self.settings.seed,
            isolate=self.isolate,
            ranks=self.ranks,
            cluster=self.cluster,
            watts=self.watts,
        )
        return JournaledEngine(made, self.journal)

    def _references(self, engine: Engine, *, with_leanest: bool = True) -> References:
        references = measure_references(engine, self.budget, with_leanest=with_leanest, clock=self.journal.clock)
        size = references.memory_budget_bytes
        self.reporter.advance(1, "" if size is None else f"budget {format_bytes(size)}")
        return references

    def _profile(self, names: Sequence[str]) -> Profile | None:
        """Return the job's profile if any of the named methods plans from it."""
        if not set(names) & set(plan_search.PROFILED) and not any(needs_profile(name) for name in names):
            return None
        self.reporter.stage("profile the units, once", 1)
        ranked = self._ranked
        if ranked is None and self.isolate is not None and find_profile(self.job, self.runs) is None:
            profile_elsewhere(self.isolate, self.runs, lean=self.profiler.is_lean)
        profile, _, _ = cached_profile(
            self.job, self.runs, options=self.profiler, on_progress=self.reporter.advance, ranked=ranked
        )
        return profile

    @property
    def _fills_device(self) -> bool:
        """Return whether an engine holds memory that a profile must find free: then the profile is taken first."""
        return self.ranks is not None or is_accelerator(device_kind())

    @property
    def _ranked(self) -> Ranked | None:
        """Return the ranks that train the job together, if several do."""
        if self.ranks is None:
            return None
        assert self.isolate is not None
        return Ranked(self.isolate, self.ranks)

    def _keep_profile(self, run: RunDirectory, profile: Profile | None) -> None:
        """Keep what the job cost beside the run, for its report; a profile that is there already will do."""
        # Without profiles, the job is not built once more to look for its own.
        found = profile or (
            find_profile(self.job, self.runs, self._ranked) if (self.runs / "profiles").is_dir() else None
        )
        if found is not None:
            run.write(PROFILE, found.to_json())

    def _search(
        self,
        method: str,
        engine: Engine,
        references: References,
        profile: Profile | None,
        run: RunDirectory,
        tracker: Tracker,
    ) -> plan_search.TuningResult:
        self.reporter.stage(f"tune with {method}", self.settings.steps)
        # The database's first connection migrates its schema, which must not fall into a timed window.
        tracker.settle(20.0)
        return plan_search.tune(
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
        self.opened.callback(run.close)
        self.journal.keep_in(run.path)
        send_pending(self.runs)
        return run


def _is_searched(name: str) -> bool:
    """Tell whether an arm is a plan that must be searched for."""
    return name in plan_search.METHODS and name not in LIVE


def session_of(
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
    weights: str | None = None,
    watts: float | None = None,
) -> Session:
    """Return the session that a command asks for; its arguments are those of :func:`autotune.tune`.

    Raises:
        InputError: if one of them is wrong, or two contradict each other.
    """
    if ranks is not None and cluster is not None:
        raise InputError(
            "cannot be combined with ranks", where="--cluster", allowed="one of the two: ranks run on one machine"
        )
    if ranks is not None:
        require_devices(ranks.count, "--ranks")
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
        "ranks": None if ranks is None else {**asdict(ranks), "config": digest_of(ranks.config)},
        "cluster": None if cluster is None else asdict(cluster),
        # Where it is taken up, the address is given again.
        "storage": None if storage is None else without_secrets(storage),
        "weights": weights,
        "watts": watts,
    }
    require_watts(watts)
    objective = Objective() if weights is None else Objective(weights=Weights.parse(weights))
    budget = None if memory_budget is None else MemoryBudget.parse(memory_budget)
    settings = plan_search.TuningSettings(
        steps=steps,
        trials=trials,
        seed=seed,
        objective=objective,
        storage=None if storage is None else checked(storage),
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
        watts=watts,
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
    judged = [entry for entry in document["against_baseline"] if entry["verdict"] != "not comparable"]
    ratios = {document["baseline"]: 1.0, **{entry["arm"]: entry["time_ratio"] for entry in judged}}
    fitting = [
        arm
        for arm in document["arms"]
        if "plan" in arm
        and ratios.get(arm["name"]) is not None
        and all(run["within_budget"] and run["reached"] for run in arm["runs"])
    ]
    if not fitting:
        return None
    best = min(fitting, key=lambda arm: ratios[arm["name"]])
    plan: dict[str, Any] = best["plan"]
    return plan


def digest_of(config: Mapping[str, Any] | None) -> str | None:
    """Return the SHA-256 of a configuration that is not kept itself, since it may hold secrets; ``None`` for none."""
    return None if config is None else hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()

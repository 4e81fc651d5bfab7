"""Comparisons for a table: arms on paired seeds, run as by ``autotune compare`` and kept in one run's journal."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.agents.rules import rule_policy
from autotune.budget import MemoryBudget
from autotune.campaign import comparison
from autotune.campaign.baselines import measure_references
from autotune.cost_model.profile import Profile
from autotune.engines.tuning_windows import make_engine
from autotune.io.documents import Count
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.launching import launched
from autotune.mechanics.devices import arithmetic_shown, device_kind, device_name, fp32_arithmetic, has_tf32
from autotune.paper.experiments import Experiment
from autotune.paper.paper_numbers import MEMORY, QUALITY, SAMPLES, THROUGHPUT, TIME
from autotune.plan import Launch, PlanSpace
from autotune.profiling.profile_cache import cached_profile
from autotune.profiling.profiler import ProfilerOptions
from autotune.records.journal import Journal, JournaledEngine
from autotune.records.protocol import Arm, Protocol
from autotune.records.run_directory import RunDirectory
from autotune.records.run_documents import Run
from autotune.records.verdicts import samples_to_target
from autotune.report.campaign_run import arm_named
from autotune.report.costs import peak_of, whole_mean

# Random seeds for pilot runs; no compared run uses them.
_PILOT_SEEDS = (0, 1, 2)
# Number of seeds of a comparison that only tries a length of runs; no comparison has fewer.
_FEWEST_SEEDS = 2
# Name of the baseline that computes fp32 in TF32.
TF32 = "baseline+tf32"
_SECONDS = {"min": 60.0, "hr": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """The measurement setup of all tables.

    Attributes:
        run: the run directory.
        journal: everything measured so far.
        seeds: random seeds of the paired runs.
        reporter: shows progress.
    """

    run: RunDirectory
    journal: Journal
    seeds: tuple[int, ...]
    reporter: Reporter

    @property
    def runs(self) -> Path:
        """Return the folder of runs."""
        return self.run.path.parent

    def profile(self, job: Job) -> Profile:
        """Return the profile of a job, from the cache where possible."""
        self.reporter.stage(f"{job.name}: profile the units, once", 1)
        options = ProfilerOptions.lean()
        return cached_profile(job, self.runs, options=options, on_progress=self.reporter.advance)[0]

    def budget(self, job: Job, share: float) -> int:
        """Return a share of the measured FP32 baseline's peak, in bytes."""
        with closing(JournaledEngine(make_engine(job, 0), self.journal)) as engine:
            found = measure_references(engine, MemoryBudget(share=share), with_leanest=False, clock=self.journal.clock)
        assert found.memory_budget_bytes is not None
        return found.memory_budget_bytes

    def space(self, job: Job) -> PlanSpace:
        """Return the plans that a job allows on this device."""
        with closing(make_engine(job, 0)) as engine:
            return engine.space

    def race(
        self,
        experiment: Experiment,
        arms: Sequence[Arm],
        budget_bytes: int | None,
        *,
        kept: str = "comparison",
        longest: int = 1,
    ) -> dict[str, Any]:
        """Run arms on every seed, the baseline first, and return the content of ``comparison.json``.

        Args:
            experiment: the task; runs are longer than its FP32 baseline needs, with or without a schedule.
            arms: the arms.
            budget_bytes: memory budget that runs are judged by; ``None`` for no budget.
            kept: prefix of the comparison's file name.
            longest: largest multiple of that length to which all runs are lengthened while an arm misses the target.
        """
        length = self._horizon(experiment)
        cap = longest * length
        # The first seeds alone tell cheaply which lengths are too short.
        for seeds in dict.fromkeys((self.seeds[: _FEWEST_SEEDS if longest > 1 else None], self.seeds)):
            document = self._raced(experiment, arms, budget_bytes, seeds, length)
            while missed(document) and length < cap:
                length = min(2 * length, cap)
                document = self._raced(experiment, arms, budget_bytes, seeds, length)
        self.run.write(f"{kept}-{experiment.constant.name}.json", document)
        return document

    def _raced(
        self,
        experiment: Experiment,
        arms: Sequence[Arm],
        budget_bytes: int | None,
        seeds: tuple[int, ...],
        samples: int,
    ) -> dict[str, Any]:
        """Run arms on some seeds for a number of samples, and return the content of ``comparison.json``."""
        job, reporter = experiment.constant, self.reporter
        protocol = Protocol(
            job=job.name,
            arms=tuple(arm.name for arm in arms),
            seeds=seeds,
            horizon_samples=samples,
            memory_budget_bytes=budget_bytes,
        )
        reporter.stage(
            f"{job.name}: {len(arms)} arms on {len(seeds)} seeds, {samples} samples each", len(arms) * len(seeds)
        )
        return comparison.compare(job, arms, protocol, device=device_name(), journal=self.journal, reporter=reporter)

    def _horizon(self, experiment: Experiment) -> int:
        """Return the samples of every run, enough for the baseline with and without a learning-rate schedule.

        At a constant rate, the time to target does not depend on the length of the run, so the slowest of a few pilot
        runs decides. A schedule depends on the length, so the length is searched for.
        """
        job, pilots = experiment.constant, _PILOT_SEEDS[: len(self.seeds)]
        self.reporter.stage(f"{job.name}: pilot runs of the baseline, to fix the length of all runs", len(pilots) + 1)
        arrivals = []
        for number, seed in enumerate(pilots):
            found = self.journal.once(
                {"pilot": job.name, "seed": seed}, functools.partial(self._pilot, job, number, seed), Run
            )
            arrivals.append(samples_needed(found) if found["reached"] else job.total_samples)
        stride = job.evaluate_every * job.batch_size
        constant = math.ceil(comparison.HORIZON * max(arrivals) / stride) * stride
        find = functools.partial(comparison.find_horizon, experiment.job)
        return max(constant, int(self.journal.once({"horizon": job.name}, find, Count)))

    def _pilot(self, job: Job, number: int, seed: int) -> dict[str, Any]:
        def on_step(samples: int) -> None:
            self.reporter.advance(number + samples / job.total_samples, f"pilot {number + 1}")

        return comparison.pilot(job, job.total_samples, seed=seed, on_step=on_step).to_json()


def rule_arm(rule: str, job: Job, name: str = "") -> Arm:
    """Return the arm of a rule that trains a job of its own; it is named like the rule unless a name is given."""
    return Arm(name=name or rule, policy=lambda space: rule_policy(rule, space, job), job=job)


def tf32_arms(experiment: Experiment) -> list[Arm]:
    """Return the arm of the baseline in TF32, where the device has TF32 and the baseline does not use it."""
    kind = device_kind()
    if not has_tf32(kind) or fp32_arithmetic(kind)["matrix products"] != "fp32":
        return []
    return [rule_arm("baseline", launched(experiment.constant, Launch(fp32="tf32")), TF32)]


def fp32_notes(document: Mapping[str, Any]) -> list[str]:
    """Return a note on how the baseline of ``comparison.json`` computes fp32, where the document says so."""
    return [f"baseline: products in {arithmetic_shown(document['fp32'])}"] if "fp32" in document else []


def missed(document: Mapping[str, Any]) -> list[str]:
    """Return the arms of ``comparison.json`` with a run that ended without the target, though it did not fail."""
    return [
        arm["name"]
        for arm in document["arms"]
        if any(not run["reached"] and run["failure"] is None for run in arm["runs"])
    ]


def verdict_notes(document: Mapping[str, Any]) -> list[str]:
    """Return the verdict on each arm of ``comparison.json``, with its reason."""
    return [f"{entry['arm']}: {entry['verdict']}, {entry['reason']}" for entry in document["against_baseline"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """Summary of an arm's runs.

    Attributes:
        time_s: mean seconds to the target; ``None`` if a run did not reach it.
        samples: mean samples to the target; ``None`` likewise.
        peak_bytes: largest peak of all runs.
        throughput: mean samples per second.
        metric: mean of the job's final metric.
        problem: why a number is missing.
    """

    time_s: float | None
    samples: float | None
    peak_bytes: int | None
    throughput: float | None
    metric: float | None
    problem: str = ""


def summarised(document: Mapping[str, Any], name: str) -> ArmSummary:
    """Return the summary of an arm's runs in a comparison."""
    arm = arm_named(document, name)
    runs = arm["runs"]
    missed = [run for run in runs if not run["reached"]]
    failed = [run["failure"] for run in runs if run["failure"] is not None]
    problem = f"{len(missed)} of {len(runs)} runs did not reach the target" if missed else ""
    return ArmSummary(
        time_s=None if missed else statistics.fmean(run["time_to_target_s"] for run in runs),
        samples=None if missed else statistics.fmean(samples_needed(run) for run in runs),
        peak_bytes=peak_of(arm),
        throughput=whole_mean([run["throughput"] for run in runs]),
        metric=whole_mean([run["final_metric"] for run in runs]),
        problem=f"{len(failed)} of {len(runs)} runs ended with {failed[0]}" if failed else problem,
    )


def number_of(summary: ArmSummary, metric: str, unit: str, experiment: Experiment) -> float | None:
    """Return a number of an arm in the unit of a table; ``None`` where it is missing.

    Args:
        summary: summary of the arm's runs.
        metric: ``TIME``, ``SAMPLES``, ``MEMORY``, ``THROUGHPUT`` or ``QUALITY``.
        unit: unit of the time; ``min`` or ``hr``.
        experiment: the task, which defines items and quality.
    """
    if metric == QUALITY:
        return None if summary.metric is None else experiment.quality(summary.metric)
    value, divisor = {
        TIME: (summary.time_s, _SECONDS.get(unit, 1.0)),
        SAMPLES: (summary.samples, 1.0),
        MEMORY: (summary.peak_bytes, 1e9),
        THROUGHPUT: (summary.throughput, 1 / experiment.items),
    }[metric]
    return None if value is None else value / divisor


def samples_needed(run: Mapping[str, Any]) -> int:
    """Return the number of samples after which a run of ``comparison.json`` reached its target."""
    return samples_to_target(run["curve"], run["time_to_target_s"])

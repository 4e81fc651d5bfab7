"""Peers' techniques for training within a memory budget against our plans, side by side in one interleaved run.

Every peer may accumulate, and every setting and k of it is tried. Those that are the fastest of their peer within some
budget stay and take turns with our plans.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autotune.bench.harness import SILENT, alternating, document_of
from autotune.bench.peer_arms import (
    OURS,
    WINDOW_STEPS,
    Arm,
    Candidate,
    own_candidates,
    peer_candidates,
    require_baseline,
)
from autotune.bench.peer_engine import PEERS, comparable, techniques
from autotune.budget import MemoryBudget, format_bytes
from autotune.catalog import load_job
from autotune.errors import InputError
from autotune.io.progress import Reporter
from autotune.io.scratch import ScratchFolder
from autotune.profiling.profile_cache import cached_profile
from autotune.profiling.profiler import ProfilerOptions
from autotune.stats import paired_ratio

# Factor on the time of a family's fastest arm within which a second one is measured, too.
_NEARLY = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerBenchSettings:
    """Settings of the peers benchmark.

    Attributes:
        budgets: memory budgets.
        peers: some of :data:`PEERS`, or single settings such as ``compile-blocks-0.2``; accumulation is added.
        rounds: number of windows of every arm.
        seed: random seed for all arms.
        threads: torch threads of all arms; ``None`` for torch's default.
        profiler: options of the profile that our plans come from.
    """

    budgets: tuple[MemoryBudget, ...]
    peers: tuple[str, ...] = tuple(PEERS)
    rounds: int = 8
    seed: int = 0
    threads: int | None = None
    profiler: ProfilerOptions

    def __post_init__(self) -> None:
        techniques(self.peers, bf16=True)
        if self.rounds < 2:
            raise InputError(f"rounds is {self.rounds}", where="--rounds", allowed="at least 2")


def bench_peers(reference: str, runs: Path, settings: PeerBenchSettings, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Return, for each budget, time and peak of the best arm of every peer and of every family of our plans.

    Args:
        reference: the job's reference. Its steps consume one batch each, whatever its batching.
        runs: the folder of runs, where the profile is kept.
        settings: settings of the benchmark.
        reporter: shows progress.

    Raises:
        InputError: if the job cannot be used, or does not train without any technique.
    """
    job = comparable(load_job(reference))
    with _threads(settings.threads) as threads, ScratchFolder() as cache, contextlib.ExitStack() as started:
        reporter.stage("profile the units", 1)
        profile = cached_profile(job, runs, options=settings.profiler, on_progress=reporter.advance)[0]

        def survey(candidate: Candidate) -> Arm:
            arm = Arm(candidate, reference, seed=settings.seed, threads=threads, cache=str(cache))
            started.callback(arm.close)
            arm.survey()
            return arm

        first, *others = asked = peer_candidates(profile.space, settings.peers)
        families = [*dict.fromkeys(name for one in asked for name in one.families), *OURS]
        baseline = survey(first)
        peak = require_baseline(baseline, job)
        budgets = [budget.resolve(peak) for budget in settings.budgets]
        others += own_candidates(profile, budgets)
        arms, kept = [baseline], [baseline]
        reporter.stage("try every setting", len(others))
        for number, candidate in enumerate(others, 1):
            arms.append(survey(candidate))
            rivals = [*kept, arms[-1]]
            leading = [_leaders(rivals, {family}, budget) for family in families for budget in budgets]
            kept = [arm for arm in rivals if arm is baseline or any(arm in leaders for leaders in leading)]
            for arm in rivals:
                if arm not in kept:
                    arm.close()
            reporter.advance(number, candidate.name)
        _take_turns(kept, settings.rounds, reporter)
    judged = [_judged(arms, families, budget, peak) for budget in budgets]
    return document_of(
        "peers",
        {
            "job": job.name,
            "seed": settings.seed,
            "threads": threads,
            "rounds": settings.rounds,
            "window_steps": WINDOW_STEPS,
            "baseline": {"name": baseline.candidate.name, **_measured(baseline)},
            "budgets": [summary for summary, _ in judged],
            "arms": [row for _, rows in judged for row in rows],
            "tried": [
                {"name": arm.candidate.name, **_measured(arm), "rounds_s": arm.seconds, "failure": arm.failure}
                for arm in arms
            ],
        },
    )


@contextlib.contextmanager
def _threads(wanted: int | None) -> Iterator[int]:
    """Run the body with a number of torch threads, which the profile depends on, and yield it."""
    former = torch.get_num_threads()
    torch.set_num_threads(wanted or former)
    try:
        yield wanted or former
    finally:
        torch.set_num_threads(former)


def _take_turns(arms: Sequence[Arm], rounds: int, reporter: Reporter) -> None:
    """Measure every arm once in each round; who is first changes, and so does the direction."""
    reporter.stage(f"measure {len(arms)} arms in turn", rounds)
    for number in range(rounds):
        first = number // 2 % len(arms)
        for arm in alternating([*arms[first:], *arms[:first]], number):
            arm.take()
        reporter.advance(number + 1)


def _leaders(arms: Iterable[Arm], families: Collection[str], budget: int) -> list[Arm]:
    """Return the fastest arm of some families that fits a budget, and a second one if it is nearly as fast.

    Few steps cannot tell which of them is faster.
    """
    fitting = [arm for arm in arms if arm.candidate.families & set(families) and arm.fits(budget)]
    first_two = sorted(fitting, key=lambda arm: arm.seconds_per_step)[:2]
    return [arm for arm in first_two if arm.seconds_per_step <= _NEARLY * first_two[0].seconds_per_step]


def _best(arms: Iterable[Arm], families: Collection[str], budget: int) -> Arm | None:
    """Return the fastest arm of some families that fits a budget; ``None`` if none does."""
    return next(iter(_leaders(arms, families, budget)), None)


def _judged(
    arms: Sequence[Arm], families: Sequence[str], budget: int, baseline_peak: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return who is the fastest within a budget, and a row for each family, the fastest first."""
    frac = budget / baseline_peak
    turned = [arm for arm in arms if arm.seconds]
    ours, peer = _best(turned, OURS, budget), _best(turned, set(families) - set(OURS), budget)
    fastest = min([arm for arm in (ours, peer) if arm is not None], key=lambda arm: arm.seconds_per_step, default=None)
    found = {family: _best(turned, {family}, budget) for family in families}
    rows = [
        {
            "family": family,
            "name": family if arm is None or family in OURS else arm.candidate.name,
            "budget_frac": frac,
            "fits": arm is not None,
            "failure": _failure(arms, family) if arm is None else None,
            **_measured(arm),
            "plan": arm.candidate.plan.to_json() if arm is not None and family in OURS else None,
            "over_fastest": None if arm is None or fastest is None else paired_ratio(arm.seconds, fastest.seconds),
        }
        for family, arm in found.items()
    ]
    rows.sort(key=lambda row: row["seconds_per_step"] if row["fits"] else math.inf)
    summary = {
        "budget_frac": frac,
        "budget_bytes": budget,
        "fastest": None if fastest is None else rows[0]["name"],
        "ours": next((row["name"] for row in rows if row["fits"] and row["family"] in OURS), None),
        "peer": None if peer is None else peer.candidate.name,
        "ours_over_peer": None if ours is None or peer is None else paired_ratio(ours.seconds, peer.seconds),
    }
    return summary, rows


def _failure(arms: Sequence[Arm], family: str) -> str | None:
    """Return why a family's first arm failed, if all of them did."""
    failures = [arm.failure for arm in arms if family in arm.candidate.families]
    return failures[0] if failures and None not in failures else None


def _measured(arm: Arm | None) -> dict[str, Any]:
    """Return what was measured of an arm; nothing of none."""
    names = ("seconds_per_step", "peak_bytes", "compile_s", "loss")
    if arm is None or arm.failure is not None:
        return dict.fromkeys(names)
    return {name: getattr(arm, name) for name in names}


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return, in words, who is the fastest within each budget, by how much, and who does not meet it."""
    found = []
    for one in document["budgets"]:
        beyond = [row for row in document["arms"] if row["budget_frac"] == one["budget_frac"] and not row["fits"]]
        failed = [f"{row['name']} failed ({row['failure']})" for row in beyond if row["failure"] is not None]
        far = ", ".join(row["name"] for row in beyond if row["failure"] is None)
        parts = [_told(one), *([f"out of reach: {far}"] if far else []), *failed]
        found.append(f"within {one['budget_frac']:.0%} ({format_bytes(one['budget_bytes'])}): {'; '.join(parts)}")
    return found


def _told(one: Mapping[str, Any]) -> str:
    ours, peer, ratio = one["ours"], one["peer"], one["ours_over_peer"]
    if ratio is None:
        alone = f"{ours or peer} is the fastest, and {'no peer' if ours else 'no plan of ours'} fits"
        return "nothing fits" if one["fastest"] is None else alone
    low, high = ratio["ratio_ci95"]
    taken = f"{ratio['ratio_median']:.3f} [{low:.3f}, {high:.3f}]"
    if one["fastest"] == ours:
        return f"{ours} is the fastest; it takes {taken} of the time of {peer}"
    return f"{peer} is the fastest; {ours} takes {taken} of its time"

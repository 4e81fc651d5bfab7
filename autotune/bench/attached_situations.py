"""Measure what a live plan wins where no static plan can follow: static, live and oracle in turn at each batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autotune.bench.attached_arms import Arm, LiveArm, PlacedArm, endless, take_turns
from autotune.budget import format_bytes
from autotune.catalog import load_job
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import solve
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.live.placement import Placements, usable
from autotune.mechanics import controls
from autotune.mechanics.devices import device_name
from autotune.mechanics.memory_meter import MemoryMeter, resident_tensors, tensor_bytes
from autotune.mechanics.trees import tensors
from autotune.plan import Plan, Precision
from autotune.profiling.profiler import profile
from autotune.stats import mean_with_interval

# Runs of different plan and batch size whose memory is metered after a run, those nearest to their budget first.
_METERED = 24
# Shares of the way from the leanest plan's peak to the baseline's, at the largest batch: budgets of the situations.
_TIGHT, _ROOMY = 0.3, 1.1
# Steps after which the profile is there.
_PROFILED_AFTER = 20
# Optimizer steps after which a budget that moves moves.
_STRETCH = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Name a situation in which no static plan can follow.

    Attributes:
        name: what it is called.
        job: the job's reference.
        moves: whether the budget moves, too.
        free_k: whether batches may be cut.
    """

    name: str
    job: str
    moves: bool
    free_k: bool = False

    @property
    def mode(self) -> str:
        """Return the mode of a live run."""
        return "rounding" if self.free_k else "exact"

    def budget_at(self, number: int, budgets: Sequence[int]) -> int:
        """Return the budget of a step.

        Args:
            number: of the step.
            budgets: the tight one and the roomy one.
        """
        return budgets[(number // _STRETCH) % 2 == 0] if self.moves else budgets[0]


SITUATIONS = (
    Situation(name="mixed lengths", job="charlm_long", moves=False),
    Situation(name="curriculum", job="charlm_long:curriculum", moves=False),
    Situation(name="moving budget", job="charlm_long:even", moves=True),
    Situation(name="mixed lengths with k free", job="charlm_long", moves=False, free_k=True),
    Situation(name="moving budget with k free", job="charlm_long:even", moves=True, free_k=True),
)


def bench_situation(
    situation: Situation, *, steps: int, seeds: int, policy: str = "ppo", reporter: Reporter | None = None
) -> dict[str, Any]:
    """Return how much of what an oracle wins over the best static plan a live plan wins, paired over seeds.

    The static plan is the exact solver's for the largest batch and the smallest budget, so that it never exceeds it.
    The oracle knows each step's batch and budget and a full profile beforehand, and pays for nothing.

    Args:
        situation: the situation.
        steps: steps of each run.
        seeds: paired runs.
        policy: what is attached.
        reporter: shows progress.
    """
    shows = reporter or Silent()
    job = load_job(situation.job)
    known = profile_of(situation, job, steps, shows)
    placements = Placements(known)
    budgets = budgets_of(placements)
    static = solve(known, budgets[0]).plan
    results = []
    shows.stage(f"{situation.name}: static, live and oracle in turn", steps * seeds)
    for seed in range(seeds):
        results.append(_compare(situation, job, known, placements, static, budgets, steps, seed, policy, shows))
    saved = [one["static_s"] - one["live_s"] for one in results]
    ceiling = [one["static_s"] - one["oracle_s"] for one in results]
    shares = [won / most for won, most in zip(saved, ceiling, strict=True)]
    return {
        "situation": situation.name,
        "job": job.name,
        "policy": policy,
        "steps": steps,
        "budgets": budgets if situation.moves else budgets[:1],
        "budgets_shown": [format_bytes(size) for size in (budgets if situation.moves else budgets[:1])],
        "static_plan": str(static),
        "live_over_static": mean_with_interval([one["live_s"] / one["static_s"] for one in results]),
        "oracle_over_static": mean_with_interval([one["oracle_s"] / one["static_s"] for one in results]),
        "share_of_ceiling": mean_with_interval(shares),
        "share_of_ceiling_after_profile": mean_with_interval(
            [
                (one["static_after_profile_s"] - one["live_after_profile_s"])
                / (one["static_after_profile_s"] - one["oracle_after_profile_s"])
                for one in results
            ]
        ),
        "over_budget_steps": sum(one["over_budget"] for one in results),
        "metered": sum(one["metered"] for one in results),
        "largest_measured_over_budget": max(one["pressure"] for one in results),
        "identical": None if situation.free_k else all(one["identical"] for one in results),
        "attached": all(one["attached"] for one in results),
        "placed": [one["placed"] for one in results],
        "runs": results,
    }


def profile_of(situation: Situation, job: Job, steps: int, reporter: Reporter) -> Profile:
    """Return what a situation's largest batch costs, of the plans that its live runs choose from.

    Args:
        situation: the situation.
        job: its job.
        steps: steps of each run.
        reporter: shows progress.
    """
    batches = itertools.islice(endless(job, 0), steps)
    worst = max(batches, key=lambda batch: tensor_bytes(tensors(batch)))
    reporter.stage(f"{situation.name}: profile the largest batch", 1)
    alike = replace(job, batches=lambda _seed: itertools.repeat(worst))
    found = profile(alike, device_name=device_name(), on_progress=reporter.advance)
    return _storage_only(found, free_k=situation.free_k)


def budgets_of(placements: Placements) -> list[int]:
    """Return a tight budget and a roomy one, between the leanest plan's peak and above the baseline's."""
    highest = placements.peak_bytes(placements.profile.space.baseline(), 1.0)
    lowest = placements.peak_bytes(placements.leanest(), 1.0)
    return [int(lowest + share * (highest - lowest)) for share in (_TIGHT, _ROOMY)]


def _compare(
    situation: Situation,
    job: Job,
    known: Profile,
    placements: Placements,
    static: Plan,
    budgets: list[int],
    steps: int,
    seed: int,
    policy: str,
    shows: Reporter,
) -> dict[str, Any]:
    now = 0
    rows = placements.group(known.space.baseline())
    reference = known.tables[0].batch_bytes

    def budget() -> int:
        return situation.budget_at(now, budgets)

    def oracle(batch: Any) -> Plan:
        length = tensor_bytes(tensors(batch)) / reference
        found = placements.fastest(usable(budget()), length, rows)
        assert found is not None
        return found

    live = LiveArm(job, seed, {"policy": policy, "mode": situation.mode, "memory_budget_bytes": budget})
    arms: dict[str, Arm] = {
        "static": PlacedArm(job, seed, lambda _batch: static),
        "live": live,
        "oracle": PlacedArm(job, seed, oracle),
    }
    held = []
    for now, batch in enumerate(itertools.islice(endless(job, seed), steps)):
        take_turns(arms, batch, now)
        held.append((live.plans[-1], batch, budget()))
        shows.advance(seed * steps + now + 1)
    status = live.tuner.status
    live.tuner.detach()
    pressures = _metered(live, held, placements, reference)
    return {
        "seed": seed,
        **{f"{name}_s": sum(arm.seconds) for name, arm in arms.items()},
        # Cut in pieces, dropout draws other masks.
        "identical": arms["static"].losses == live.losses == arms["oracle"].losses
        or (None if situation.free_k else False),
        "attached": status["attached"],
        "detached_because": status.get("detached_because"),
        # Without the first steps, in which a live run is profiled.
        **{f"{name}_after_profile_s": sum(arm.seconds[_PROFILED_AFTER:]) for name, arm in arms.items()},
        "placed": status.get("placed"),
        "trips": status.get("trips"),
        "overhead_frac": status.get("overhead_frac"),
        "over_budget": sum(pressure > 1 for pressure in pressures),
        "metered": len(pressures),
        "pressure": max(pressures, default=0.0),
    }


def _metered(arm: LiveArm, held: list[tuple[Plan, Any, int]], placements: Placements, reference: int) -> list[float]:
    """Meter the steps that came nearest to their budget again; return each one's peak over its budget."""
    distinct: dict[tuple[int, int, int], tuple[float, Plan, Any, int]] = {}
    for plan, batch, budget in held:
        size = tensor_bytes(tensors(batch))
        predicted = placements.peak_bytes(plan, size / reference) / budget
        distinct[id(plan), size, budget] = predicted, plan, batch, budget
    pressures = []
    for _, plan, batch, budget in sorted(distinct.values(), key=lambda entry: -entry[0])[:_METERED]:
        controls.apply(arm.model, plan)
        arm.k = plan.accumulation_steps
        meter = MemoryMeter(torch.device("cpu"))
        with meter.metering(resident_tensors(arm.model, arm.optimizer, [batch])):
            Arm.step(arm, batch)
        pressures.append((meter.peak_bytes or 0) / budget)
    controls.remove(arm.model)
    return pressures


def _storage_only(found: Profile, *, free_k: bool) -> Profile:
    """Return a profile of the plans that leave precision, and k where it is not free, as the job has it."""
    inherit = Precision.INHERIT
    first = str(found.precisions[0])

    def renamed(name: str) -> str:
        return name.replace(f"{first}/", f"{inherit}/")

    tables = []
    kept = found.tables if free_k else found.tables[:1]
    for table in kept:
        segments = tuple(
            replace(
                segment,
                costs={renamed(n): c for n, c in segment.costs.items() if n.startswith((f"{first}/", "fixed"))},
            )
            for segment in table.segments
        )
        boundaries = tuple(
            replace(
                boundary,
                keepers={
                    key: tuple(renamed(n) for n in names if n.startswith(f"{first}/"))
                    for key, names in boundary.keepers.items()
                },
            )
            for boundary in table.boundaries
        )
        tables.append(replace(table, segments=segments, boundaries=boundaries))
    return replace(
        found,
        tables=tuple(tables),
        uniform_tables={},
        precisions=(inherit,),
        accumulation_choices=tuple(table.accumulation_steps for table in kept),
    )

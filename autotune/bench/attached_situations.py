"""Gain of a live plan where no static plan is always best: static, live and oracle arms in turn at each batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autotune.bench.attached_arms import Arm, LiveArm, PlacedArm, endless, take_turns
from autotune.bench.harness import SILENT
from autotune.budget import format_bytes
from autotune.catalog import load_job
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import solve
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.live.placement import Placements, usable
from autotune.mechanics import controls
from autotune.mechanics.devices import device_name
from autotune.mechanics.memory_meter import MemoryMeter, resident_tensors, tensor_bytes
from autotune.mechanics.trees import tensors
from autotune.plan import Plan, Precision
from autotune.profiling.profiler import profile
from autotune.stats import mean_with_interval

# Limit on the steps of different plan, batch size or budget metered after a run, those nearest to their budget first.
_METERED = 24
# Budgets, as shares of the way from the leanest plan's peak to that of the baseline, at the largest batch.
_TIGHT, _ROOMY = 0.3, 1.1
# Number of steps after which a live run has its profile.
_PROFILED_AFTER = 20
# Optimizer steps between two changes of a moving budget.
_STRETCH = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSituation:
    """A situation in which no static plan is always best.

    Attributes:
        name: name of the situation.
        job: the job's reference.
        moves: whether the budget changes during a run.
        free_k: whether batches may be split.
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
            number: number of the step, from 0.
            budgets: the tight budget and the roomy one.
        """
        return budgets[(number // _STRETCH) % 2 == 0] if self.moves else budgets[0]


SITUATIONS = (
    LiveSituation(name="mixed lengths", job="charlm_long", moves=False),
    LiveSituation(name="curriculum", job="charlm_long:curriculum", moves=False),
    LiveSituation(name="moving budget", job="charlm_long:even", moves=True),
    LiveSituation(name="mixed lengths with k free", job="charlm_long", moves=False, free_k=True),
    LiveSituation(name="moving budget with k free", job="charlm_long:even", moves=True, free_k=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """The common setup of all paired runs of a situation.

    Attributes:
        situation: the situation.
        job: its job.
        placements: plans with their predicted peaks, from the profile of the largest batch.
        budgets: the tight budget and the roomy one.
        static: the best static plan.
    """

    situation: LiveSituation
    job: Job
    placements: Placements
    budgets: list[int]
    static: Plan


def bench_situation(
    situation: LiveSituation, *, steps: int, seeds: int, policy: str = "ppo", reporter: Reporter = SILENT
) -> dict[str, Any]:
    """Return the time that a live plan saves over the best static plan, as a share of what an oracle saves.

    The static plan is the exact solver's for the largest batch and the smallest budget, so that it always fits. The
    oracle knows each step's batch and budget and a full profile in advance, and its decisions are not timed.

    Args:
        situation: the situation.
        steps: steps of each run.
        seeds: number of paired runs.
        policy: the policy that is attached.
        reporter: shows progress.
    """
    job = load_job(situation.job)
    known = profile_of(situation, job, steps, reporter)
    placements = Placements(known)
    budgets = budgets_of(placements)
    setup = _Setup(
        situation=situation, job=job, placements=placements, budgets=budgets, static=solve(known, budgets[0]).plan
    )
    results = []
    reporter.stage(f"{situation.name}: static, live and oracle in turn", steps * seeds)
    for seed in range(seeds):
        results.append(_compare(setup, steps, seed, policy, reporter))

    def over_static(arm: str) -> dict[str, Any]:
        return mean_with_interval([one[f"{arm}_s"] / one["static_s"] for one in results])

    def share_of_ceiling(part: str) -> dict[str, Any]:
        static, live, oracle = ([one[f"{arm}{part}_s"] for one in results] for arm in ("static", "live", "oracle"))
        return mean_with_interval([(s - own) / (s - most) for s, own, most in zip(static, live, oracle, strict=True)])

    budgets = setup.budgets if situation.moves else setup.budgets[:1]
    return {
        "situation": situation.name,
        "job": job.name,
        "policy": policy,
        "steps": steps,
        "budgets": budgets,
        "budgets_shown": [format_bytes(size) for size in budgets],
        "static_plan": str(setup.static),
        "live_over_static": over_static("live"),
        "oracle_over_static": over_static("oracle"),
        "share_of_ceiling": share_of_ceiling(""),
        "share_of_ceiling_after_profile": share_of_ceiling("_after_profile"),
        "over_budget_steps": sum(one["over_budget"] for one in results),
        "metered": sum(one["metered"] for one in results),
        "largest_measured_over_budget": max(one["pressure"] for one in results),
        "identical": None if situation.free_k else all(one["identical"] for one in results),
        "attached": all(one["attached"] for one in results),
        "placed": [one["placed"] for one in results],
        "runs": results,
    }


def profile_of(situation: LiveSituation, job: Job, steps: int, reporter: Reporter) -> Profile:
    """Return the profile of a situation's largest batch, for the plans that its live runs choose from.

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
    """Return a tight budget between the peaks of the leanest plan and the baseline, and a roomy one above both."""
    highest = placements.peak_bytes(placements.profile.space.baseline(), 1.0)
    lowest = placements.peak_bytes(placements.leanest(), 1.0)
    return [int(lowest + share * (highest - lowest)) for share in (_TIGHT, _ROOMY)]


def _compare(setup: _Setup, steps: int, seed: int, policy: str, reporter: Reporter) -> dict[str, Any]:
    now = 0
    situation, job, placements = setup.situation, setup.job, setup.placements
    rows = placements.group(placements.profile.space.baseline())
    reference = placements.profile.tables[0].batch_bytes

    def budget() -> int:
        return situation.budget_at(now, setup.budgets)

    def oracle(batch: Any) -> Plan:
        length = tensor_bytes(tensors(batch)) / reference
        found = placements.fastest(usable(budget()), length, rows)
        assert found is not None
        return found

    live = LiveArm(job, seed, {"policy": policy, "mode": situation.mode, "memory_budget_bytes": budget})
    arms: dict[str, Arm] = {
        "static": PlacedArm(job, seed, lambda _batch: setup.static),
        "live": live,
        "oracle": PlacedArm(job, seed, oracle),
    }
    held = []
    for now, batch in enumerate(itertools.islice(endless(job, seed), steps)):
        take_turns(arms, batch, now)
        held.append((live.plans[-1], batch, budget()))
        reporter.advance(seed * steps + now + 1)
    status = live.tuner.status
    live.tuner.detach()
    pressures = _metered(live, held, placements, reference)
    return {
        "seed": seed,
        **{f"{name}_s": sum(arm.seconds) for name, arm in arms.items()},
        # Dropout draws different masks in a split batch.
        "identical": arms["static"].losses == live.losses == arms["oracle"].losses
        or (None if situation.free_k else False),
        "attached": status["attached"],
        "detached_because": status.get("detached_because"),
        # The first steps, in which a live run is profiled, are left out.
        **{f"{name}_after_profile_s": sum(arm.seconds[_PROFILED_AFTER:]) for name, arm in arms.items()},
        "placed": status.get("placed"),
        "trips": status.get("trips"),
        "overhead_frac": status.get("overhead_frac"),
        "over_budget": sum(pressure > 1 for pressure in pressures),
        "metered": len(pressures),
        "pressure": max(pressures, default=0.0),
    }


def _metered(arm: LiveArm, held: list[tuple[Plan, Any, int]], placements: Placements, reference: int) -> list[float]:
    """Repeat the steps that came nearest to their budget; return each one's ratio of peak to budget."""
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
    """Return the profile without plans that change precision or, unless k is free, k."""
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

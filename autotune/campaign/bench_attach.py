"""Measure what attaching costs, and what it wins where no static plan can follow: all arms step by step in one run.

In exact mode every arm trains the same bits, so that arms can take turns at each batch: what differs is time alone.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autotune.budget import format_bytes
from autotune.campaign.bench_overhead import bootstrap_median
from autotune.campaign.progress import Reporter, Silent
from autotune.campaign.verdicts import interval
from autotune.catalog import load_job
from autotune.engines.inspection import build_model, build_optimizer
from autotune.engines.profiler import profile
from autotune.errors import InputError
from autotune.job import Job
from autotune.live.attach import attach
from autotune.live.limits import Limits
from autotune.live.placement import Placements, usable
from autotune.mechanics import controls, devices, randomness, stepping
from autotune.mechanics.devices import device_name
from autotune.mechanics.memory_meter import MemoryMeter, resident_tensors, tensor_bytes
from autotune.mechanics.trees import tensors
from autotune.physics.profile import Profile
from autotune.physics.solver import solve
from autotune.plan import Plan, Precision

# Runs of different plan and batch size whose memory is metered after a run, those nearest to their budget first.
_METERED = 24
# Shares of the way from the leanest plan's peak to the baseline's, at the largest batch: budgets of the situations.
_TIGHT, _ROOMY = 0.3, 1.1
# Steps after which the profile is there.
_PROFILED_AFTER = 20
# Optimizer steps after which a budget that moves moves.
_STRETCH = 30


class Arm:
    """Train one copy of a job, a step at a time, on generators of its own.

    Args:
        job: the job.
        seed: of its weights and of everything random.
    """

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        devices.require_fp32_choice(job.launch.fp32, "cpu", where=f"job {job.name!r}")
        with randomness.isolated():
            randomness.seed_all(seed)
            self.model = build_model(job)
            self.model.train()
            self.optimizer = build_optimizer(job, self.model)
            self.random = randomness.capture()
        self.k = 1
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def take(self, batch: Any) -> None:
        """Train on one batch, and note how long that took."""
        with randomness.isolated():
            randomness.restore(self.random)
            began = time.perf_counter()
            loss = self.step(batch)
            devices.synchronize(loss.device)
            self.seconds.append(time.perf_counter() - began)
            self.random = randomness.capture()
        self.losses.append(float(loss.detach()))

    def step(self, batch: Any) -> torch.Tensor:
        """Train on one batch, in k pieces, as the job's own loop would; return the last piece's loss."""
        pieces = stepping.split(batch, self.k)
        weights = stepping.weights([stepping.count_items(piece, self.job.count) for piece in pieces])
        for piece, weight in zip(pieces, weights, strict=True):
            loss = self.job.loss(self.model, piece)
            (loss if len(pieces) == 1 else loss * weight).backward()
        self.update()
        return loss

    def update(self) -> None:
        """Clip, step and clear the gradients."""
        if self.job.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


class PlacedArm(Arm):
    """Train under a plan that somebody who knows everything chose for each batch; choosing costs nothing.

    Args:
        job: the job.
        seed: of its weights.
        choose: returns the plan of a batch.
    """

    def __init__(self, job: Job, seed: int, choose: Callable[[Any], Plan]) -> None:
        super().__init__(job, seed)
        self._choose = choose
        self.plan: Plan | None = None

    def take(self, batch: Any) -> None:
        """Train on one batch under its plan."""
        plan = self._choose(batch)
        if plan is not self.plan:
            controls.apply(self.model, plan)
            self.plan, self.k = plan, plan.accumulation_steps
        super().take(batch)


class LiveArm(Arm):
    """Train with a tuner attached.

    Args:
        job: the job.
        seed: of its weights.
        arguments: what ``attach`` is called with.
    """

    def __init__(self, job: Job, seed: int, arguments: Mapping[str, Any]) -> None:
        super().__init__(job, seed)
        self.tuner = attach(self.model, self.optimizer, clip_norm=job.clip_norm, runs_dir=None, **arguments)
        self.plans: list[Plan] = []

    def step(self, batch: Any) -> torch.Tensor:
        """Train on one batch through the tuner's three calls."""
        for micro in self.tuner.micro_batches(batch, self.job.count):
            loss = self.job.loss(self.model, micro)
            self.tuner.backward(loss)
        self.plans.append(self.tuner.plan)
        self.tuner.step()
        return loss


def bench_overhead_attached(
    job: Job, *, steps: int, seed: int, reporter: Reporter | None = None, limits: Limits | None = None
) -> dict[str, Any]:
    """Return the ratio of an attached step's time to an unattached one's, observing and acting, step by step in turn.

    Acting has a budget under which something must be recomputed only if the baseline were larger: the plan stays the
    baseline's, and what is measured is the tuner.

    Args:
        job: the job.
        steps: steps of each arm.
        seed: of all of them.
        reporter: shows progress.
        limits: of the tuners.
    """
    shows = reporter or Silent()
    shows.stage(f"{job.name}: unattached, observing and acting in turn", steps)
    arms: dict[str, Arm] = {
        "unattached": Arm(job, seed),
        "observe": LiveArm(job, seed, {"stage": "observe", "memory_budget_bytes": 2**45, "limits": limits}),
        "act": LiveArm(job, seed, {"stage": "act", "memory_budget_bytes": 2**45, "limits": limits}),
    }
    for number, batch in enumerate(itertools.islice(endless(job, seed), steps)):
        _turn(arms, batch, number)
        shows.advance(number + 1)
    plain = arms["unattached"].seconds
    found = {}
    for name in ("observe", "act"):
        arm = arms[name]
        ratios = [own / other for own, other in zip(arm.seconds, plain, strict=True)]
        low, high = bootstrap_median(ratios)
        more = sum(arm.seconds) - sum(plain)
        found[name] = {
            "ratio_median": statistics.median(ratios),
            "ratio_ci95": [low, high],
            "ratio_total": sum(arm.seconds) / sum(plain),
            # Probing and profiling are paid once, however long the run.
            "ratio_total_1000_steps": 1 + more / (statistics.median(plain) * max(steps, 1000)),
            "identical": arm.losses == arms["unattached"].losses,
            "overhead_frac": arm.tuner.status.get("overhead_frac") if isinstance(arm, LiveArm) else None,
            "attached": isinstance(arm, LiveArm) and arm.tuner.attached,
        }
    return {"job": job.name, "steps": steps, "step_s_median": statistics.median(plain), **found}


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
    batches = list(itertools.islice(endless(job, 0), steps))
    worst = max(batches, key=lambda batch: tensor_bytes(tensors(batch)))
    shows.stage(f"{situation.name}: profile the largest batch", 1)
    known = _storage_only(
        profile(
            replace(job, batches=lambda _seed: _repeated(worst)), device_name=device_name(), on_progress=shows.advance
        ),
        free_k=situation.free_k,
    )
    placements = Placements(known)
    highest = placements.peak_bytes(known.space.baseline(), 1.0)
    lowest = placements.peak_bytes(placements.leanest(), 1.0)
    budgets = [int(lowest + share * (highest - lowest)) for share in (_TIGHT, _ROOMY)]
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
        "live_over_static": ratio_of([one["live_s"] / one["static_s"] for one in results]),
        "oracle_over_static": ratio_of([one["oracle_s"] / one["static_s"] for one in results]),
        "share_of_ceiling": ratio_of(shares),
        "share_of_ceiling_after_profile": ratio_of(
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
        return budgets[(now // _STRETCH) % 2 == 0] if situation.moves else budgets[0]

    def oracle(batch: Any) -> Plan:
        length = tensor_bytes(tensors(batch)) / reference
        found = placements.fastest(usable(budget()), length, rows)
        assert found is not None
        return found

    mode = "rounding" if situation.free_k else "exact"
    live = LiveArm(job, seed, {"policy": policy, "mode": mode, "memory_budget_bytes": budget})
    arms: dict[str, Arm] = {
        "static": PlacedArm(job, seed, lambda _batch: static),
        "live": live,
        "oracle": PlacedArm(job, seed, oracle),
    }
    held = []
    for now, batch in enumerate(itertools.islice(endless(job, seed), steps)):
        _turn(arms, batch, now)
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


def _turn(arms: Mapping[str, Arm], batch: Any, number: int) -> None:
    """Let every arm take a batch, in an order that changes from step to step."""
    names = list(arms)
    names = names[number % len(names) :] + names[: number % len(names)]
    for name in names if (number // len(names)) % 2 == 0 else reversed(names):
        arms[name].take(batch)


def endless(job: Job, seed: int) -> Iterator[Any]:
    """Yield a job's batches, begun anew with other seeds where they end."""
    return itertools.chain.from_iterable(job.batches(seed + number) for number in itertools.count())


def _repeated(batch: Any) -> Iterator[Any]:
    return itertools.repeat(batch)


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


def ratio_of(values: list[float]) -> dict[str, Any]:
    """Return the mean of paired values with a 95 % t-interval."""
    low, high = interval(values, 0.95) if len(values) > 1 else (values[0], values[0])
    return {"mean": statistics.fmean(values), "ci95": [low, high], "values": values}


def bench_attach(
    jobs: list[str],
    situations: list[str],
    *,
    steps: int,
    situation_steps: int,
    seeds: int,
    policy: str,
    seed: int,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Return what attaching costs on some jobs, and what it wins in some situations.

    Args:
        jobs: the jobs whose overhead is measured; the first one's is the headline.
        situations: names of situations.
        steps: steps of each arm for the overhead.
        situation_steps: steps of each run in a situation.
        seeds: paired runs of a situation.
        policy: what is attached in situations.
        seed: of the overhead's arms.
        reporter: shows progress.

    Raises:
        InputError: if a job or a situation is unknown.
    """
    named = {situation.name: situation for situation in SITUATIONS}
    unknown = [name for name in situations if name not in named]
    if unknown:
        raise InputError(f"situation {unknown[0]!r} is unknown", where="--situations", allowed=named)
    loaded = [load_job(name) for name in jobs]
    overhead = [bench_overhead_attached(job, steps=steps, seed=seed, reporter=reporter) for job in loaded]
    won = [
        bench_situation(named[name], steps=situation_steps, seeds=seeds, policy=policy, reporter=reporter)
        for name in situations
    ]
    headline = overhead[0]["act"] if overhead else {}
    return {
        "version": 1,
        "benchmark": "attach",
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ratio_median": headline.get("ratio_median"),
        "ratio_ci95": headline.get("ratio_ci95"),
        "overhead": overhead,
        "situations": won,
    }

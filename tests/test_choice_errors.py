"""Choices that approximate the gradient are judged and locked by unit, and every plan keeps to that."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_job
import torch
import torch.nn.functional as F
from torch import nn

import autotune
from autotune import EngineOptions, Plan, PlanError, Precision, Storage, TorchEngine
from autotune.agents.optuna_search import OptunaPriceSearch, OptunaSearch
from autotune.agents.planner import close_plans, greedy_plan, policy_plans
from autotune.agents.priced_plans import PricedPlans
from autotune.agents.rules import RULES, rule_plan
from autotune.agents.search import RandomSearch
from autotune.cost_model.cost_arrays import CostArrays
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.plan_pool import make_pool
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import Goal, pareto_front, smallest
from autotune.errors import ProfileError
from autotune.gym.job_env import TuningEnv
from autotune.mechanics import known_precisions
from autotune.plan import PlanSpace
from autotune.profiling.choice_errors import find_errors
from autotune.profiling.job_shape import fixed_shape
from autotune.profiling.profiler import ProfilerOptions, profile
from autotune.profiling.tracing_engine import WatchedEngine

COMPRESSED = ["compress8", "compress4"]
COMPRESSED_STORAGES = [Storage(name) for name in COMPRESSED]
SPOILT = "blocks.1"
LEAN = ProfilerOptions.lean()


class Outlying(tiny_job.Block):
    """A block that may multiply one of its activations by a million, and divide the weight that meets it by as much.

    Formats with a common range for many numbers then keep nothing of the other activations.
    """

    outlies = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(tiny_job.WIDTH)
        scale[0] = 1e6 if self.outlies else 1.0
        up = F.linear(self.norm(x) * scale, self.up.weight / scale, self.up.bias)
        return x + self.down(F.gelu(up))


class OutlyingLater(Outlying):
    """A block whose activations outlie once it has learnt a little."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.outlies = float(self.norm.bias.detach().abs().max()) > 0.04
        return super().forward(x)


class Network(tiny_job.Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Outlying() for _ in range(3))
        self.blocks[1].outlies = True


class LaterNetwork(tiny_job.Network):
    """Blocks of which one, made alike so that all are units, outlies later."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OutlyingLater() for _ in range(3))
        for healthy in (self.blocks[0], self.blocks[2]):
            healthy.norm.bias.requires_grad_(requires_grad=False)


def job_with(model: type[nn.Module] = Network, **changes: Any) -> autotune.Job:
    return tiny_job.make(model=model, **{"accumulation_choices": (1, 2), "storages": COMPRESSED, **changes})


def one_k_with(model: type[nn.Module] = Network, **changes: Any) -> autotune.Job:
    """Return the job without accumulation, which is profiled in half the steps."""
    return job_with(model, accumulation_choices=(1,), **changes)


def spoilt_job() -> autotune.Job:
    return job_with()


@pytest.fixture(scope="module")
def found() -> Profile:
    return profile(job_with(), device_name="here", options=LEAN)


def obeys(plan: Plan) -> bool:
    return plan.storage_of(SPOILT).exact


def test_a_storage_is_locked_in_the_one_unit_that_it_spoils(found: Profile) -> None:
    assert found.locked == {SPOILT: ("compress4", "compress8")}
    assert set(COMPRESSED) <= set(found.space.storages)
    for table in (*found.tables, *(one for tables in found.uniform_tables.values() for one in tables)):
        for segment in table.segments:
            compressed = {name for name in segment.costs if name.partition("/")[2] in COMPRESSED}
            assert bool(compressed) is (segment.unit in {"blocks.0", "blocks.2"})
    told = [warning for warning in found.warnings if " is locked in " in warning]
    assert [warning.split(":")[0] for warning in told] == [f"{one} is locked in {SPOILT}" for one in COMPRESSED]
    assert all("off by more than 100% (cosine " in one and "), above the limit of " in one for one in told), told
    assert not any("no plan may use it" in warning for warning in found.warnings)


def test_the_profile_round_trips_and_one_without_locks_loads(found: Profile) -> None:
    document = json.loads(json.dumps(found.to_json()))
    assert Profile.from_json(document) == found
    del document["locked"]
    old = Profile.from_json(document)
    assert old.locked == {}
    assert old.space == dataclasses.replace(found.space, locked={})
    assert PlanSpace.from_json(json.loads(json.dumps(found.space.to_json()))) == found.space
    space = json.loads(json.dumps(found.space.to_json()))
    del space["locked"]
    assert PlanSpace.from_json(space).locked == {}


@pytest.mark.parametrize("locked", [{"blocks.0": ["compress4"]}, {"nothing": ["compress4"]}])
def test_a_profile_with_costs_of_a_locked_choice_is_damaged(found: Profile, locked: dict[str, list[str]]) -> None:
    with pytest.raises(ProfileError, match="is damaged"):
        Profile.from_json({**json.loads(json.dumps(found.to_json())), "locked": locked})


def test_the_space_refuses_a_locked_choice_and_offers_none(found: Profile) -> None:
    space = found.space
    spoilt = space.baseline().changed(storage=dict.fromkeys(space.recomputable, Storage.COMPRESS4))
    with pytest.raises(
        PlanError, match=r"'blocks.1' is 'compress4', which .* too far off \(allowed: recompute, save\)"
    ):
        space.check(spoilt)
    instead = space.permitted(spoilt)
    assert space.check(instead) == instead
    assert instead.storage == {**spoilt.storage, SPOILT: Storage.RECOMPUTE}
    assert space.decode(space.encode(spoilt)) == instead
    assert space.plan(accumulation_steps=1, precision=Precision.FP32, storage=Storage.COMPRESS4) == instead
    assert space.decode(space.encode(instead)) == instead


def test_plans_of_every_planner_obey(found: Profile) -> None:
    least, most = smallest(found).peak_bytes, peak_bytes(found, found.space.baseline())
    for budget in [None, *(int(least + share * (most - least)) + 100_000 for share in (0.0, 0.2, 0.5, 0.9))]:
        plans = [*close_plans(found, budget, Goal()), greedy_plan(found, budget, Goal())]
        for name in ("planner", "ppo"):
            plans += policy_plans(name, found, budget, Goal())
        assert all(map(obeys, plans))
    front = [solution.plan for solution in pareto_front(found)]
    assert all(map(obeys, front))
    arrays = CostArrays([found])
    pool = make_pool(arrays)
    pooled = [arrays.decode(0, int(pool.k[0, row]), pool.choices[0, row]) for row in np.flatnonzero(pool.there[0])]
    assert all(map(obeys, pooled))
    # Other units are compressed, and predictions hold beside the locked one.
    assert any(not plan.storage_of("blocks.0").exact for plan in pooled)


def test_peaks_beside_a_locked_unit_are_predicted(found: Profile) -> None:
    generator = np.random.default_rng(0)
    engine = TorchEngine(job_with(), options=EngineOptions(discard_steps=1))
    for _ in range(4):
        plan = found.space.sample(generator)
        engine.apply(plan)
        measured = engine.run(3).peak_bytes
        assert measured is not None
        assert measured <= peak_bytes(found, plan) <= 1.001 * measured
    engine.close()


def test_plans_of_every_search_and_rule_obey(found: Profile, tmp_path: Path) -> None:
    space = found.space
    assert all(obeys(rule_plan(name, space)) for name in RULES.registered)
    searches = [
        RandomSearch(space, 0),
        OptunaSearch(space, tmp_path, 0, [space.baseline(), space.leanest()]),
        OptunaPriceSearch(PricedPlans(found, None), space, tmp_path, 0),
    ]
    for search in searches:
        plans = [search.ask() for _ in range(20)]
        assert all(space.check(plan) == plan for plan in plans)
        search.close()


class LockedEngine(TorchEngine):
    """An engine whose space has the locks of a profile."""

    space_of: PlanSpace

    def __init__(self, job: autotune.Job) -> None:
        super().__init__(job, options=EngineOptions(meter_memory=False, discard_steps=0))
        self.space = self.space.within(self.space_of)


def test_an_environment_masks_locked_choices_and_runs_others_instead(found: Profile) -> None:
    LockedEngine.space_of = found.space
    env = TuningEnv(job_with(), lambda _seed: LockedEngine(job_with()), window_steps=1, evaluate=False)
    space = env.plan_space
    assert space.locked == found.locked
    mask = env.action_masks()
    assert mask.size == sum(space.sizes)
    assert mask.size - mask.sum() == 2
    env.reset(seed=0)
    spoilt = space.baseline().changed(storage=dict.fromkeys(space.recomputable, Storage.COMPRESS4))
    info = env.step(np.array(space.encode(spoilt)))[4]
    assert info["plan"]["storage"] == {"blocks.0": "compress4", SPOILT: "recompute", "blocks.2": "compress4"}
    env.close()


@pytest.mark.parametrize("method", ["random", "optuna"])
def test_a_search_without_a_profile_of_its_own_measures_one_and_obeys(method: str, tmp_path: Path) -> None:
    told = autotune.tune(one_k_with(), method, steps=66, runs_dir=tmp_path, report_to="none")
    run = Path(told["run"])
    assert json.loads((run / "profile.json").read_text())["locked"] == {SPOILT: ["compress4", "compress8"]}
    trials = [json.loads(row) for row in (run / "trials.jsonl").read_text().splitlines()]
    chosen = [trial["plan"]["storage"] for trial in trials]
    assert {one[SPOILT] for one in chosen} <= {"save", "recompute"}
    assert {one[name] for one in chosen for name in ("blocks.0", "blocks.2")} & set(COMPRESSED)
    # What it costs to measure the profile is part of what the search costs.
    assert told["tuning_steps"] > 66


def test_a_unit_that_is_spoilt_only_later_is_locked_later() -> None:
    found = profile(one_k_with(LaterNetwork), device_name="here", options=LEAN)
    assert found.locked == {SPOILT: ("compress4", "compress8")}
    told = [warning for warning in found.warnings if " is locked in " in warning]
    late = f"after {LEAN.late_steps} steps of training, "
    assert [one.removeprefix(late).split(":")[0] for one in told] == [
        f"{one} is locked in {SPOILT}" for one in COMPRESSED
    ]
    assert all(one.startswith(late) for one in told)
    assert Profile.from_json(json.loads(json.dumps(found.to_json()))) == found
    early = profile(one_k_with(LaterNetwork), device_name="here", options=dataclasses.replace(LEAN, late_steps=0))
    assert early.locked == {}
    assert found.steps - early.steps == LEAN.late_steps


def test_exact_choices_cost_no_further_steps() -> None:
    exact = profile(one_k_with(storages=None), device_name="here", options=LEAN)
    without = profile(one_k_with(storages=None), device_name="here", options=dataclasses.replace(LEAN, late_steps=0))
    assert exact.steps == without.steps
    assert exact.locked == {}


def engine_of(job: autotune.Job) -> tuple[WatchedEngine, list[Plan]]:
    """Return an engine, and the plans of the gradients that it computes from now on."""
    engine = WatchedEngine(fixed_shape(job), options=EngineOptions(meter_memory=False))
    engine.run(1)
    plans: list[Plan] = []
    gradient = engine.gradient

    def counted(plan: Plan, batches: list[Any] | None = None) -> list[torch.Tensor | None]:
        plans.append(plan)
        return gradient(plan, batches)

    engine.gradient = counted  # type: ignore[method-assign]
    return engine, plans


def test_choices_that_spoil_nothing_cost_one_pass_each() -> None:
    job = job_with(tiny_job.Network)
    engine, plans = engine_of(job)
    found = find_errors(engine, job, 0, COMPRESSED_STORAGES)
    assert [one.choice for one in found] == COMPRESSED
    assert not any(one.locks for one in found)
    # The exact gradient, the same again, and that of another batch.
    assert len(plans) == 3 + len(COMPRESSED)
    assert all(one.whole.relative < 0.2 and one.whole.cosine > 0.98 and one.whole.noise > 0.2 for one in found)


def test_errors_are_those_of_a_careful_measurement() -> None:
    job = job_with()
    engine, _ = engine_of(job)
    for one in find_errors(engine, job, 0, COMPRESSED_STORAGES):
        # Four bits round at random.
        error, rel = one.locked[SPOILT], 0.2 if one.choice is Storage.COMPRESS4 else 1e-3
        lean = engine.space.leanest().changed(precision=engine.space.baseline().precision)
        plan = lean.changed(storage={**lean.storage, SPOILT: one.choice})
        exact, other = engine.gradient(lean), engine.gradient(plan)
        names = next(unit.parameter_names for unit in engine.space.units if unit.name == error.unit)
        order = [name for name, parameter in engine.model.named_parameters() if parameter.requires_grad]
        g, h = (torch.cat([part[order.index(name)].flatten() for name in names]).double() for part in (exact, other))
        assert error.relative == pytest.approx(float((h - g).norm() / g.norm()), rel=rel)
        assert error.cosine == pytest.approx(float(g @ h / g.norm() / h.norm()), abs=0.05)


def test_a_job_with_a_single_batch_has_no_noise_to_compare_with() -> None:
    def one_batch(seed: int) -> Iterator[torch.Tensor]:
        yield next(tiny_job.batches(0))

    job = job_with(tiny_job.Network, batches=one_batch)
    assert [one.whole.noise for one in find_errors(engine_of(job)[0], job, 0, COMPRESSED_STORAGES)] == [None, None]


def test_the_limit_is_the_noise_where_that_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def alike(seed: int) -> Iterator[torch.Tensor]:
        while True:
            yield next(tiny_job.batches(0))

    job = job_with(tiny_job.Network, batches=alike)
    engine = engine_of(job)[0]
    found = find_errors(engine, job, 0, COMPRESSED_STORAGES)
    assert all(one.whole.noise == pytest.approx(0, abs=1e-6) and one.whole.limit == 0.2 for one in found)
    monkeypatch.setattr("autotune.profiling.choice_errors._LEAST_LIMIT", 0.03)
    eight, four = find_errors(engine, job, 0, COMPRESSED_STORAGES)
    assert not eight.locks
    assert four.locks


def test_a_precision_is_locked_in_the_one_unit_that_it_spoils(monkeypatch: pytest.MonkeyPatch) -> None:
    known_precisions.forget()
    monkeypatch.setenv(known_precisions.PRECISIONS_VARIABLE, "fp32,bf16,fp8")
    monkeypatch.setattr("autotune.mechanics.precision._reason_against_float8", lambda _: "")
    try:
        found = profile(one_k_with(storages=None), device_name="here", options=LEAN)
    finally:
        known_precisions.forget()
    assert found.locked == {SPOILT: ("fp8",)}
    assert Precision.FP8 in found.precisions
    (told,) = [warning for warning in found.warnings if " is locked in " in warning]
    assert told.startswith(f"fp8 is locked in {SPOILT}: there alone, it puts the gradient of ")
    assert Profile.from_json(json.loads(json.dumps(found.to_json()))) == found
    plans = [*close_plans(found, None, Goal()), *(solution.plan for solution in pareto_front(found))]
    plans += [found.space.sample(np.random.default_rng(seed)) for seed in range(30)]
    assert all(plan.precision_of(SPOILT) in ("fp32", "bf16") for plan in plans)
    assert any(plan.precision_of("blocks.0") == "fp8" for plan in plans)
    assert found.space.plan(accumulation_steps=1, precision=Precision.FP8).precision_of(SPOILT) == "bf16"


def test_a_choice_that_is_locked_everywhere_leaves_the_space(found: Profile) -> None:
    less = found.locking({name: ["compress8"] for name in ("blocks.0", "blocks.2")})
    assert less.space.storages == ("save", "compress4", "recompute")
    assert less.locked == {SPOILT: ("compress4",)}
    assert found.locking({}) == found
    other = TorchEngine(job_with(), options=EngineOptions(meter_memory=False)).space
    assert other.within(less.space).storages == less.space.storages
    assert other.within(less.space).locked == less.locked
    assert other.within(other) == other


def test_sparse_and_complex_gradients_are_compared() -> None:
    class Odd(tiny_job.Network):
        def __init__(self) -> None:
            super().__init__()
            self.embedding.sparse = True
            self.turn = nn.Parameter(torch.polar(torch.ones(tiny_job.WIDTH), torch.rand(tiny_job.WIDTH)))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head((x * self.turn).real)

    def optimizer(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)  # type: ignore[arg-type]

    job = one_k_with(Odd, storages=["compress8"], optimizer=optimizer, clip_norm=None)
    found = profile(job, device_name="here", options=ProfilerOptions.lean())
    assert Storage.COMPRESS8 in found.space.storages
    assert any("cosine 1.000" in warning for warning in found.warnings)


def blocks_on(batches: Any, **changes: Any) -> autotune.Job:
    return job_with(tiny_job.Network, batches=batches, **changes)


def test_another_batch_that_cannot_run_leaves_the_noise_unknown() -> None:
    def batches(seed: int) -> Iterator[torch.Tensor]:
        for number, batch in enumerate(tiny_job.batches(seed)):
            yield batch[:1] if number % 8 == 7 else batch

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == 1:
            raise ValueError("more than 1 value per channel expected")
        return tiny_job.mean_loss(model, batch)

    job = blocks_on(batches, loss=loss, max_steps=5)
    found = profile(job, device_name="here", options=dataclasses.replace(LEAN, late_steps=3))
    assert {*COMPRESSED} <= {*found.space.storages}
    assert not any("two batches differ" in warning for warning in found.warnings)


def test_a_gradient_that_is_not_finite_judges_nothing() -> None:
    def batches(seed: int) -> Iterator[torch.Tensor]:
        for number, batch in enumerate(tiny_job.batches(seed)):
            yield torch.zeros_like(batch) if number == 3 else batch

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return tiny_job.mean_loss(model, batch) * (torch.nan if int(batch.sum()) == 0 else 1.0)

    job = blocks_on(batches, loss=loss, accumulation_choices=(1,))
    found = profile(job, device_name="here", options=dataclasses.replace(LEAN, late_steps=3))
    assert {*COMPRESSED} <= {*found.space.storages}
    told = "after 3 steps of training, how far compress8, compress4 put the gradient off is not known: the gradient"
    assert any(warning.startswith(told) for warning in found.warnings)


def test_a_gradient_that_another_pass_does_not_repeat_judges_nothing() -> None:
    own = torch.Generator().manual_seed(1)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return tiny_job.mean_loss(model, batch) * torch.rand((), generator=own)

    found = profile(blocks_on(tiny_job.batches, loss=loss, accumulation_choices=(1,)), device_name="here", options=LEAN)
    assert {*COMPRESSED} <= {*found.space.storages}
    assert not found.locked
    assert any("two passes over the same batch differ by" in warning for warning in found.warnings)


def test_another_batch_without_items_leaves_the_noise_unknown() -> None:
    def batches(seed: int) -> Iterator[torch.Tensor]:
        for number, batch in enumerate(tiny_job.batches(seed)):
            yield torch.zeros_like(batch) if number % 8 == 7 else batch

    job = job_with(tiny_job.Network, batches=batches, count=lambda batch: int((batch[:, 1:] > 0).sum()))
    found = find_errors(engine_of(job)[0], job, 0, COMPRESSED_STORAGES)
    assert found
    assert all(one.whole.noise is None for one in found)

"""Tests of assembling profiles: results of a sparse record compared with a complete one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from small_jobs import convolution_job, gpt_job

from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Cost, Profile
from autotune.cost_model.time_model import seconds_per_step
from autotune.plan import PlanSpace, Storage
from autotune.profiling import profiler
from autotune.profiling.homogeneous_plans import homogeneous_plans
from autotune.profiling.profile_assembly import assemble
from autotune.profiling.profiler import ProfilerOptions, profile
from autotune.profiling.step_record import StepRecord, TracedStep
from autotune.profiling.unseen_costs import Ratio, with_bounds
from autotune.profiling.whole_steps import corrected


@pytest.fixture(scope="module", params=[gpt_job, convolution_job], ids=["gpt", "convolution"])
def recorded(request: pytest.FixtureRequest) -> tuple[StepRecord, PlanSpace]:
    """Return the record of a lean profile without 16-bit borders, which live runs do not have."""
    found: list[tuple[StepRecord, PlanSpace]] = []

    def noted(record: StepRecord, space: PlanSpace) -> Profile:
        found.append((record, space))
        return assemble(record, space)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, "assemble", noted)
        profile(request.param(accumulation_choices=(1, 2)), device_name="here", options=ProfilerOptions.lean())
    [(record, space)] = found
    return replace(record, steps=[steps for steps in record.steps if steps.borders is None]), space


def test_sparse_record_gives_the_memory_and_update_costs_of_a_complete_one(
    recorded: tuple[StepRecord, PlanSpace],
) -> None:
    record, space = recorded
    complete, sparse = assemble(record, space), assemble(replace(record, is_sparse=True), space)
    for one, other in zip(complete.tables, sparse.tables, strict=True):
        for first, second in zip(one.segments, other.segments, strict=True):
            assert first.unit == second.unit
            memory = [
                {name: replace(cost, forward_s=0.0, backward_s=0.0) for name, cost in segment.costs.items()}
                for segment in (first, second)
            ]
            assert memory[0] == memory[1]
        assert one.update_s == other.update_s
        assert one.update_peak_bytes == other.update_peak_bytes


def test_recompute_only_record_gives_upper_bounds_for_saving(
    recorded: tuple[StepRecord, PlanSpace],
) -> None:
    record, space = recorded

    def recomputing(traces: Sequence[TracedStep]) -> list[TracedStep]:
        return [trace for trace in traces if Storage.RECOMPUTE in trace.plan.storage.values()]

    lean = [replace(steps, traces=recomputing(steps.traces)) for steps in record.steps]
    complete, bounded = assemble(record, space), assemble(replace(record, steps=lean, is_sparse=True), space)
    generator = np.random.default_rng(0)
    for plan in [space.leanest(), *(space.sample(generator) for _ in range(50))]:
        assert peak_bytes(bounded, plan) >= peak_bytes(complete, plan)
    assert peak_bytes(bounded, space.leanest()) == peak_bytes(complete, space.leanest())


def test_no_plan_has_a_k_that_only_one_precision_was_profiled_at(recorded: tuple[StepRecord, PlanSpace]) -> None:
    record, space = recorded
    [first, second] = record.steps
    uniform = [replace(steps, borders="bf16") for steps in (first, second)]
    found = assemble(replace(record, steps=[first, *uniform]), space)
    assert found.accumulation_choices == (first.accumulation_steps,)
    assert [table.accumulation_steps for table in found.uniform_tables["bf16"]] == [first.accumulation_steps]


def test_whole_steps_correct_the_times_of_homogeneous_plans(recorded: tuple[StepRecord, PlanSpace]) -> None:
    complete = assemble(*recorded)
    space, predicted = complete.space, functools.partial(seconds_per_step, complete)
    plans = homogeneous_plans(space, space.accumulation_choices)
    # As if watching a step slowed it the more, the smaller its micro-batches are, and most for plans that save.
    measured = {
        plan: predicted(plan) / (1 + 0.1 * name.accumulation_steps + 0.2 * (name.storage == "save"))
        for name, plan in plans.items()
    }
    found = corrected(complete, measured)
    for plan in measured:
        assert seconds_per_step(found, plan) == pytest.approx(measured[plan], rel=1e-6), plan
        assert peak_bytes(found, plan) == peak_bytes(complete, plan)
    saving, leanest = space.baseline(), space.baseline().changed(storage=space.leanest().storage)
    mixed = saving.changed(storage=dict.fromkeys(space.recomputable[:1], "recompute"))
    assert seconds_per_step(found, saving) < seconds_per_step(found, mixed) <= seconds_per_step(found, leanest)


@pytest.mark.parametrize(("alive", "saved"), [(110032, 78848), (128532, 78848), (102612, 78848), (90_000, 69_000)])
def test_what_a_called_again_unit_saves_is_bounded_by_all_of_its_kind(alive: int, saved: int) -> None:
    """Of two calls of a layer, one is recomputed beside temporary gradients of its weights, the other beside kept ones.

    The figures are those of a BERT whose loss calls it twice.
    """
    like = [Ratio(135952, 78848 / 135952), Ratio(102612, 78848 / 102612)]
    cost = Cost(
        forward_s=1.0, backward_s=2.0, saved_bytes=5056, forward_peak_bytes=(0, 0), backward_peak_bytes=(alive, 0)
    )
    recomputed = {"inherit/recompute": cost}
    bound = with_bounds(recomputed, like)["inherit/save"].saved_bytes
    assert saved <= bound <= alive
    assert with_bounds(recomputed, [Ratio(alive // 2, 0.1)])["inherit/save"].saved_bytes == alive

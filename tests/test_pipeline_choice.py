"""Tests of the choice of stages and schedule from a job's profile."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from autotune.cost_model.cost_arrays import CostArrays
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.pipeline_choice import _IN_PARTS, _passes, chosen_pipelines, pipelined, within
from autotune.cost_model.pipeline_ranks import rank_parts, stages_of
from autotune.cost_model.profile import Profile, Segment
from autotune.cost_model.solver import SAFETY_MARGIN, smallest, solve_each
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import BudgetError, InputError, ProfileError
from autotune.pipeline import SCHEDULES, Pipeline, divisions, predict
from autotune.plan import Plan, Precision, Storage
from autotune.simulator.random_jobs import draw_job


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_chosen_stages_are_within_five_percent_of_the_best_of_all(seed: int, ranks: int) -> None:
    profile = draw_job(np.random.default_rng(seed), depth=(4, 7)).profile
    every = []
    units = len(profile.units)
    for schedule, k in itertools.product(SCHEDULES, profile.accumulation_choices):
        stages = Pipeline(ranks=ranks, schedule=schedule).stages
        if stages > units or (stages > ranks and k % ranks):
            continue
        parts = _passes(profile, profile.space.baseline().changed(accumulation_steps=k))
        for counts in divisions(units, stages):
            ends = [*itertools.accumulate(counts, initial=0)]
            forward, backward, weights = (
                [sum(getattr(one, part) for one in parts.units[slice(*pair)]) for pair in itertools.pairwise(ends)]
                for part in ("forward_s", "backward_s", "weights_s")
            )
            forward = [seconds + parts.before.forward_s for seconds in forward]
            backward[0] += parts.before.backward_s
            forward[-1] += parts.after.forward_s
            backward[-1] += parts.after.backward_s
            weights[-1] += parts.after.weights_s
            layout = Pipeline(ranks=ranks, schedule=schedule)
            for stage in filter(layout.splits, range(stages)):
                longer = _IN_PARTS * weights[stage]
                backward[stage], weights[stage] = backward[stage] + longer, weights[stage] + longer
            every.append(predict(layout, k, forward, backward, 5e-4, weights_s=weights).seconds)
    found = chosen_pipelines(profile, ranks)
    assert [one.step.seconds for one in found] == sorted(one.step.seconds for one in found)
    assert len({one.pipeline.schedule for one in found}) == len(found) >= 2
    assert all(sum(one.pipeline.units) == units for one in found)
    assert min(every) * (1 - 1e-9) <= found[0].step.seconds <= 1.05 * min(every)


def test_more_ranks_than_units_are_refused() -> None:
    profile = draw_job(np.random.default_rng(0), depth=(3, 3)).profile
    with pytest.raises(InputError, match=f"there are 99 ranks, and the model has {len(profile.units)} units"):
        chosen_pipelines(profile, 99)


def drawn(seed: int, layout: str, depth: tuple[int, int] = (2, 4)) -> Profile:
    """Return the profile of a random job in a pipeline, of which each unit holds three times its weights."""
    profile = draw_job(np.random.default_rng(seed), depth=depth).profile
    sizes = {part.unit: 3 * part.gradient_bytes for part in profile.tables[0].segments if part.unit is not None}
    return pipelined(dataclasses.replace(profile, unit_bytes=sizes), Pipeline.parse(layout))


def every_plan(profile: Profile, k: int) -> list[Plan]:
    space = profile.space
    kinds = [[(p, s) for p in space.precisions for s in space.storages_of(unit.name)] for unit in profile.units]
    return [
        Plan(
            accumulation_steps=k,
            precision={unit.name: p for unit, (p, _) in zip(profile.units, chosen, strict=True)},
            storage={unit.name: s for unit, (_, s) in zip(profile.units, chosen, strict=True) if unit.recomputable},
        )
        for chosen in itertools.product(*kinds)
    ]


@pytest.mark.parametrize("layout", ["pipe=2", "pipe=2,schedule=gpipe", "pipe=2,schedule=interleaved", "pipe=3"])
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 2, 3])
def test_solved_plan_of_a_pipeline_is_the_best_of_all(seed: int, layout: str) -> None:
    profile = drawn(seed, layout)
    least, most = smallest(profile).peak_bytes, peak_bytes(profile, profile.space.baseline())
    every = {
        k: [(peak_bytes(profile, one), seconds_per_step(profile, one)) for one in every_plan(profile, k)]
        for k in profile.accumulation_choices
    }
    assert least == min(peak for costs in every.values() for peak, _ in costs)
    for share in (0.05, 0.4, 0.8):
        budget = int((least + share * (max(most, least) - least)) / (1 - SAFETY_MARGIN)) + 1
        found = {one.plan.accumulation_steps: one for one in solve_each(profile, budget)}
        for k, costs in every.items():
            fitting = [seconds for peak, seconds in costs if peak <= budget * (1 - SAFETY_MARGIN)]
            assert bool(fitting) == (k in found)
            if fitting:
                assert peak_bytes(profile, found[k].plan) <= budget
                best = min(fitting)
                assert found[k].seconds_per_step <= best * (1 + 1e-6) + found[k].gap * best
    with pytest.raises(BudgetError):
        solve_each(profile, int(0.9 * least))


def test_ranks_hold_less_than_one_process_and_earlier_ones_more_micro_batches() -> None:
    alone = draw_job(np.random.default_rng(3), depth=(6, 6)).profile
    whole = peak_bytes(alone, alone.space.baseline())
    assert peak_bytes(drawn(3, "pipe=2", (6, 6)), alone.space.baseline()) < whole
    k = alone.accumulation_choices[-1]
    baseline = alone.space.baseline().changed(accumulation_steps=k)
    peaks = {one: peak_bytes(drawn(3, f"pipe=2{one},units=4/4", (6, 6)), baseline) for one in ("", ",schedule=gpipe")}
    assert k == 1 or peaks[""] < peaks[",schedule=gpipe"]


def test_each_rank_has_the_gradients_of_what_stages_share_and_sends_none_to_frozen_ones() -> None:
    profile = drawn(2, "pipe=2")
    k = profile.accumulation_choices[-1]
    head, size = profile.units[-1].name, 10**9
    tied = dataclasses.replace(profile, shared_bytes={profile.units[0].name: size, head: size})
    baseline = profile.space.baseline().changed(accumulation_steps=k)
    assert peak_bytes(tied, baseline) >= peak_bytes(profile, baseline) + 0.9 * size
    (_, last), (_, shared) = ([parts[0].profile for parts in rank_parts(one, k)] for one in (profile, tied))
    assert shared.tables[0].update_peak_bytes >= last.tables[0].update_peak_bytes + size

    def frozen(one: Segment) -> Segment:
        return dataclasses.replace(one, gradient_bytes=0)

    table = profile.table(k)
    begin = stages_of(profile, table.segments).index(1)
    table = dataclasses.replace(table, segments=(*map(frozen, table.segments[:begin]), *table.segments[begin:]))
    still = dataclasses.replace(profile, tables=(*profile.tables[:-1], table))
    (_, moving), (_, quiet) = ([parts[0].profile.tables[0] for parts in rank_parts(one, k)] for one in (profile, still))
    assert quiet.batch_bytes < moving.batch_bytes


def test_what_an_engine_lacks_is_left_out_of_a_profile() -> None:
    profile = drawn(1, "pipe=2")
    space = dataclasses.replace(profile.space, precisions=(Precision.FP32,), storages=(Storage.SAVE,))
    assert within(profile, space).space.precisions == (Precision.FP32,)
    assert within(profile, space).space.storages == (Storage.SAVE,)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("pipe=99", "does not divide the model's"),
        ("pipe=2,units=1/1", "does not divide the model's"),
        ("pipe=3,schedule=interleaved", "can be interleaved on 3 ranks"),
    ],
)
def test_layout_that_a_profile_cannot_have_is_rejected(layout: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        drawn(1, layout, (8, 8))


def test_profile_of_a_pipeline_is_read_as_it_is_written_and_priced_by_no_array() -> None:
    profile = drawn(1, "pipe=2")
    assert Profile.from_json(profile.to_json()) == profile
    for pipeline in ("pipe=2", "pipe=2,units=1/1", "dp=2", "pipe=99"):
        with pytest.raises(ProfileError, match="pipeline is"):
            Profile.from_json({**profile.to_json(), "pipeline": pipeline})
    with pytest.raises(InputError, match="plans of a pipeline cannot be priced at once"):
        CostArrays([profile])
    with pytest.raises(ProfileError, match="does not tell the bytes of units"):
        pipelined(dataclasses.replace(profile, unit_bytes={}), Pipeline(ranks=2))

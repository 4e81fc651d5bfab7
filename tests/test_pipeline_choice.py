"""Tests of the choice of stages and schedule from a job's profile."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autotune.cost_model.pipeline_choice import _passes, chosen_pipelines
from autotune.errors import InputError
from autotune.pipeline import Pipeline, predict
from autotune.simulator.random_jobs import draw_job


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_chosen_stages_are_within_five_percent_of_the_best_of_all(seed: int, ranks: int) -> None:
    profile = draw_job(np.random.default_rng(seed), depth=(4, 7)).profile
    every = []
    units = len(profile.units)
    for schedule, k in itertools.product(("1f1b", "gpipe", "interleaved"), profile.accumulation_choices):
        stages = Pipeline(ranks=ranks, schedule=schedule).stages
        if stages > units or (stages > ranks and k % ranks):
            continue
        parts = _passes(profile, k)
        for borders in itertools.combinations(range(1, units), stages - 1):
            ends = [0, *borders, units]
            forward, backward = (
                [sum(one[place] for one in parts.units[begin:end]) for begin, end in itertools.pairwise(ends)]
                for place in (0, 1)
            )
            forward = [seconds + parts.before[0] for seconds in forward]
            backward[0] += parts.before[1]
            forward[-1] += parts.after[0]
            backward[-1] += parts.after[1]
            every.append(predict(Pipeline(ranks=ranks, schedule=schedule), k, forward, backward, 5e-4).seconds)
    found = chosen_pipelines(profile, ranks)
    assert [one.step.seconds for one in found] == sorted(one.step.seconds for one in found)
    assert len({one.pipeline.schedule for one in found}) == len(found) >= 2
    assert all(sum(one.pipeline.units) == units for one in found)
    assert min(every) * (1 - 1e-9) <= found[0].step.seconds <= 1.05 * min(every)


def test_more_ranks_than_units_are_refused() -> None:
    profile = draw_job(np.random.default_rng(0), depth=(3, 3)).profile
    with pytest.raises(InputError, match=f"there are 99 ranks, and the model has {len(profile.units)} units"):
        chosen_pipelines(profile, 99)

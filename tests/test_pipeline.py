"""Tests of pipelines' layouts, orders of passes and predicted steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autotune.engines.registry import RankOptions
from autotune.errors import InputError, PlanError
from autotune.pipeline import Pass, Pipeline, balanced, passes_of, predict, unread
from autotune.plan import Launch

LAYOUTS = [
    Pipeline(ranks=ranks, schedule=schedule) for ranks in (1, 2, 3, 4) for schedule in ("1f1b", "gpipe", "zero-bubble")
] + [Pipeline(ranks=ranks, schedule="interleaved") for ranks in (2, 4)]


@pytest.mark.parametrize(
    "text", ["pipe=4", "pipe=4,schedule=gpipe", "pipe=2,units=3/5", "pipe=2,schedule=interleaved,units=1/2/3/4"]
)
def test_layout_is_written_as_it_is_read(text: str) -> None:
    assert str(Pipeline.parse(text)) == text
    assert Launch(pipeline=text).to_json() == {"pipeline": text}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "pipeline is ''"),
        ("pipe", "pipeline is 'pipe'"),
        ("pipe=0", "pipeline is 'pipe=0'"),
        ("pipe=2,pipe=2", "pipeline is"),
        ("pipe=2,dp=2", "pipeline is"),
        ("pipe=2,units=1/x", "pipeline is"),
        ("pipe=2,schedule=zb", "schedule is 'zb' .allowed: 1f1b, gpipe, zero-bubble, interleaved"),
        ("pipe=2,units=3", "has 1 stages on 2 ranks"),
        ("pipe=2,units=1/1/1/1", "has 4 stages on 2 ranks"),
        ("pipe=2,schedule=interleaved,units=1/1", "has 2 stages on 2 ranks"),
        ("pipe=1,schedule=interleaved", "has 1 rank"),
    ],
)
def test_text_that_is_no_layout_is_rejected(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Pipeline.parse(text)
    with pytest.raises(PlanError, match=r"launch\.pipeline"):
        Launch(pipeline=text)


def test_layout_of_other_numbers_of_ranks_is_rejected() -> None:
    with pytest.raises(InputError, match=r"mesh pipe=3 is for 3 ranks, and there are 2 .allowed: pipe=4"):
        RankOptions(engine="pipeline", count=2, mesh="pipe=3")
    assert RankOptions(engine="pipeline", count=4).layout == "pipe=4"
    assert RankOptions(engine="pipeline", count=2).launched(Launch()).pipeline == "pipe=2"


@pytest.mark.parametrize("micros", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("pipeline", LAYOUTS, ids=str)
def test_every_rank_runs_each_micro_batch_once_forward_and_then_backward(pipeline: Pipeline, micros: int) -> None:
    if pipeline.schedule == "interleaved" and micros % pipeline.ranks:
        with pytest.raises(ValueError, match="cannot be interleaved"):
            passes_of(pipeline, 0, micros)
        return
    for rank in range(pipeline.ranks):
        order = passes_of(pipeline, rank, micros)
        stages = range(rank, pipeline.stages, pipeline.ranks)
        for stage, micro in itertools.product(stages, range(micros)):
            found = [(one.backward, one.late) for one in order if (one.stage, one.micro) == (stage, micro)]
            assert found == [(False, False), (True, False), (True, True)][: 2 + pipeline.splits(stage)]
        assert {(one.stage, one.micro) for one in order} == {*itertools.product(stages, range(micros))}
        # A stage's gradients add up in the order of micro-batches, as in one process.
        for stage, late in itertools.product(stages, (False, True)):
            backward_of_stage = [one.micro for one in order if one.backward and one.stage == stage and one.late is late]
            assert backward_of_stage == sorted(backward_of_stage)


@pytest.mark.parametrize("micros", [4, 8])
@pytest.mark.parametrize("pipeline", LAYOUTS, ids=str)
def test_gradients_that_need_no_waiting_were_received_before(pipeline: Pipeline, micros: int) -> None:
    orders = [passes_of(pipeline, rank, micros) for rank in range(pipeline.ranks)]
    for rank, order in enumerate(orders):
        before = orders[(rank - 1) % pipeline.ranks]
        late = unread(pipeline, rank, micros)
        sent: list[Pass] = []
        reached = -1
        for one, unseen in zip(order, late, strict=True):
            if one.stage and not one.backward:
                # What this pass is handed was sent at the end of that one.
                reached = before.index(Pass(one.stage - 1, one.micro, backward=False))
            received = [own for own in sent if before.index(Pass(own.stage - 1, own.micro, backward=True)) < reached]
            assert set(sent) - set(unseen) == set(received)
            if one.stage and one.backward and not one.late:
                sent.append(one)
        if pipeline.schedule == "1f1b":
            # In the steady state, few are kept, however many micro-batches there are.
            steady = [len(kept) for one, kept in zip(order, late, strict=True) if not one.backward]
            assert max(steady) <= 1


@pytest.mark.parametrize("micros", [4, 8, 16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bubbles_of_equal_stages_are_those_of_the_literature(ranks: int, micros: int) -> None:
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        pipeline = Pipeline(ranks=ranks, schedule=schedule)
        found = predict(pipeline, micros, [1.0] * pipeline.stages, [2.0] * pipeline.stages)
        # (p - 1) / (v m + p - 1), Narayanan et al. 2021.
        assert found.bubble == pytest.approx((ranks - 1) / (chunks * micros + ranks - 1))
        assert found.seconds == pytest.approx(3 * (chunks * micros + ranks - 1))
    assert predict(Pipeline(ranks=ranks), micros, [1.0] * ranks, [2.0] * ranks).alive == tuple(
        min(ranks - rank, micros) for rank in range(ranks)
    )
    assert (
        predict(Pipeline(ranks=ranks, schedule="gpipe"), micros, [1.0] * ranks, [1.0] * ranks).alive
        == (micros,) * ranks
    )


@pytest.mark.parametrize("micros", [4, 8, 16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bubbles_without_waiting_for_weights_are_those_of_the_literature(ranks: int, micros: int) -> None:
    forward_s, input_s, weights_s = 1.0, 1.25, 0.75
    found = predict(
        Pipeline(ranks=ranks, schedule="zero-bubble"),
        micros,
        [forward_s] * ranks,
        [input_s + weights_s] * ranks,
        weights_s=[weights_s] * ranks,
    )
    # ZB-H1 of Qi et al. 2024; each rank has as many micro-batches under way as the first one has under 1F1B.
    bubble_s = (ranks - 1) * (forward_s + input_s - weights_s)
    assert found.seconds == pytest.approx(micros * (forward_s + input_s + weights_s) + bubble_s)
    assert found.alive == (ranks,) * ranks


@pytest.mark.parametrize("pipeline", LAYOUTS, ids=str)
def test_step_is_as_long_as_its_slowest_stage_at_least(pipeline: Pipeline) -> None:
    generator = np.random.default_rng(3)
    for _ in range(20):
        forward, backward = (generator.uniform(0.1, 2, pipeline.stages).tolist() for _ in range(2))
        found = predict(pipeline, 4 * pipeline.ranks, forward, backward, send_s=0.1)
        loads = [
            sum(forward[stage] + backward[stage] for stage in range(rank, pipeline.stages, pipeline.ranks))
            for rank in range(pipeline.ranks)
        ]
        assert found.seconds >= 4 * pipeline.ranks * max(loads) - 1e-9
        assert found.seconds <= 4 * pipeline.ranks * sum(loads) + 100
        assert 0 <= found.bubble < 1


def test_no_other_division_has_a_cheaper_most_expensive_stage() -> None:
    generator = np.random.default_rng(4)
    for _ in range(40):
        count = int(generator.integers(3, 9))
        stages = int(generator.integers(1, min(count, 4) + 1))
        costs, (first, last) = generator.uniform(0, 1, count).tolist(), generator.uniform(0, 2, 2).tolist()

        def worst(counts: tuple[int, ...]) -> float:
            ends = [*itertools.accumulate(counts, initial=0)]
            sums = [sum(costs[begin:end]) for begin, end in itertools.pairwise(ends)]  # noqa: B023
            sums[0] += first  # noqa: B023
            sums[-1] += last  # noqa: B023
            return max(sums)

        found = balanced(costs, stages, first=first, last=last)
        every = [one for one in itertools.product(range(1, count + 1), repeat=stages) if sum(one) == count]
        assert found in every
        assert worst(found) == pytest.approx(min(map(worst, every)))

"""Tests of where a step's time goes: parts sum to the step, each is found where it is spent, and advice names it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_on_ranks
from small_jobs import convolution_job, gpt_job, next_token_loss, token_batches
from torch import nn

from autotune import EngineOptions, InputError, Job, Measurement, TorchEngine
from autotune.engines import torch_engine
from autotune.engines.tuning_windows import merge_windows
from autotune.mechanics import flops
from autotune.mechanics.flops import measure_peaks, model_flops, peak_of, step_flops
from autotune.mechanics.step_clock import completed
from autotune.plan import Precision
from autotune.step_parts import PARTS, StepParts, advice, mean_parts, parts_of_ranks

NAP_S = 0.06
seconds = st.floats(0, 100)
steps = st.fixed_dictionaries(dict.fromkeys(PARTS, seconds))


def ranks_of(count: int, length: int) -> st.SearchStrategy[list[list[dict[str, float]]]]:
    return st.lists(st.lists(steps, min_size=length, max_size=length), min_size=count, max_size=count)


def parts(**changes: Any) -> StepParts:
    """Return parts in seconds per step, 1 s in all unless the changes say otherwise."""
    found: dict[str, Any] = {"data_s": 0.0, "compute_s": 0.0, "update_s": 0.0, "control_s": 0.0, **changes}
    named = [found.get(f"{part}_s", 0.0) for part in PARTS]
    if "compute_s" not in changes:
        found["compute_s"] = 1.0 - math.fsum(named)
    return StepParts(**{"step_s": math.fsum(found.get(f"{part}_s", 0.0) for part in PARTS), **found})


@given(st.integers(1, 3).flatmap(lambda count: ranks_of(count, 2)))
def test_parts_of_ranks_sum_to_the_mean_step_and_the_quickest_in_collectives_waits_for_none(
    ranks: list[list[dict[str, float]]],
) -> None:
    found = parts_of_ranks([[{**step, "synchronisation": 0.0} for step in rank] for rank in ranks])
    assert found is not None
    whole = statistics.fmean(math.fsum(step.values()) - step["synchronisation"] for rank in ranks for step in rank)
    assert math.fsum(found.seconds().values()) == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert found.step_s == pytest.approx(whole, rel=1e-9, abs=1e-9)
    least = statistics.fmean(min(rank[number]["communication"] for rank in ranks) for number in range(2))
    assert found.communication_s == pytest.approx(least, rel=1e-9, abs=1e-9)
    if len(ranks) == 1:
        assert found.synchronisation_s == pytest.approx(0.0, abs=1e-9)
        assert found.rank_s == ()


def test_waiting_for_other_stages_is_not_a_ranks_own_time() -> None:
    first = {"compute": 1.0, "synchronisation": 2.0, "communication": 0.5}
    second = {"compute": 2.0, "synchronisation": 1.0, "communication": 0.5}
    found = parts_of_ranks([[first], [second]])
    assert found is not None
    assert found.rank_s == (1.0, 2.0)
    assert (found.synchronisation_s, found.communication_s, found.step_s) == (1.5, 0.5, 3.5)


@given(st.lists(st.tuples(st.integers(1, 9), st.lists(seconds, min_size=6, max_size=6)), min_size=1, max_size=3))
def test_mean_of_windows_stays_within_them_and_sums_to_its_step(windows: list[tuple[int, list[float]]]) -> None:
    every = [(weight, parts(**{f"{p}_s": s for p, s in zip(PARTS, own, strict=True)})) for weight, own in windows]
    found = mean_parts(every)
    assert found is not None
    for name in PARTS:
        own = [one.seconds()[name] for _, one in every]
        assert min(own) * (1 - 1e-9) <= found.seconds()[name] <= max(own) * (1 + 1e-9)


def test_parts_round_trip_with_a_measurement_and_earlier_documents_still_load() -> None:
    window = Measurement(steps=1, samples=8, items=8, total_s=1.0, parts=parts(data_s=0.5, rank_s=(0.5, 0.6), mfu=0.3))
    document = json.loads(json.dumps(window.to_json()))
    assert Measurement.from_json(document) == window
    del document["parts"]
    assert Measurement.from_json(document).parts is None


def test_parts_that_do_not_sum_to_the_step_are_refused() -> None:
    with pytest.raises(InputError, match=r"sum of the parts is 1\.0.*within 2%"):
        parts(step_s=1.03)
    assert parts(step_s=1.015).step_s == 1.015
    document = Measurement(steps=1, samples=8, items=8, total_s=1.0, parts=parts()).to_json()
    with pytest.raises(InputError, match="seconds >= 0"):
        Measurement.from_json({**document, "parts": {**document["parts"], "data_s": -0.1}})


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (None, None),
        (parts(), None),
        (parts(data_s=0.1, communication_s=0.1, synchronisation_s=0.05), None),
        (parts(data_s=0.41), "41% of the step waits for data: more loader workers would help more than any plan"),
        (parts(communication_s=0.33), "33% of the step is communication that nothing hides"),
        (
            parts(synchronisation_s=0.2, rank_s=(1.0, 1.0, 1.0, 1.4)),
            "rank 3 is 1.4 times as slow as the others, which wait for it in 20% of the step",
        ),
        (parts(synchronisation_s=0.2, rank_s=(1.0, 1.0)), None),
        (parts(synchronisation_s=0.4, rank_s=(1.0, 1.1)), "ranks that are equally fast wait for one another in 40%"),
        # The largest by its own measure is named.
        (parts(data_s=0.3, communication_s=0.6), "60% of the step is communication"),
    ],
)
def test_advice_names_the_part_that_costs_most(found: StepParts | None, told: str | None) -> None:
    line = advice(found)
    assert line is None if told is None else line is not None and line.startswith(told)
    assert line is None or "\n" not in line


class Napping(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(NAP_S)
        return super().step(closure)


def slow(part: str) -> Job:
    """Return a job that sleeps in one part of each step."""

    def batches(seed: int) -> Iterator[torch.Tensor]:
        for batch in token_batches(seed):
            if part == "data":
                time.sleep(NAP_S)
            yield batch

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if part == "compute" and model.training:
            time.sleep(NAP_S)
        return next_token_loss(model, batch)

    def count(batch: torch.Tensor) -> int:
        if part == "control":
            time.sleep(NAP_S)
        return len(batch)

    optimizer = Napping if part == "update" else torch.optim.SGD
    return gpt_job(batches=batches, loss=loss, count=count, optimizer=lambda params: optimizer(params, lr=1e-3))


@pytest.mark.parametrize("part", ["data", "compute", "update", "control"])
def test_time_counts_in_the_part_where_it_is_spent_and_parts_sum_to_the_step(part: str) -> None:
    engine = TorchEngine(slow(part), options=EngineOptions(meter_memory=False))
    window = engine.run(6)
    assert window.parts is not None
    shares = window.parts.shares()
    assert max(shares, key=shares.__getitem__) == part
    assert window.parts.step_s == pytest.approx(statistics.fmean(window.step_s), rel=0.02)
    assert math.fsum(window.parts.seconds().values()) == pytest.approx(window.parts.step_s, rel=0.02)
    line = advice(window.parts)
    assert line is not None and "waits for data" in line if part == "data" else line is None
    engine.close()


def test_clock_sees_the_whole_step_before_anything_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def noted(parts: dict[str, float], step_s: float) -> dict[str, float]:
        seen.append(math.fsum(parts.values()) / step_s)
        return completed(parts, step_s)

    monkeypatch.setattr(torch_engine, "completed", noted)
    engine = TorchEngine(slow("compute"), options=EngineOptions(meter_memory=False))
    engine.run(6)
    engine.close()
    # What is added to make the parts sum to the step is next to nothing where no device has a clock of its own.
    assert len(seen) == 6
    assert statistics.median(seen) == pytest.approx(1.0, rel=0.02)


def test_rates_are_those_of_the_timed_steps() -> None:
    engine = TorchEngine(gpt_job(count=lambda batch: 5 * len(batch)), options=EngineOptions(meter_memory=False))
    window = engine.run(5)
    found = window.parts
    assert found is not None
    assert found.samples_per_s is not None
    assert found.items_per_s is not None
    assert found.samples_per_s == pytest.approx(4 * len(window.step_s) / math.fsum(window.step_s))
    assert found.items_per_s == pytest.approx(5 * found.samples_per_s)
    engine.close()


def test_parts_of_a_step_of_another_length_have_the_same_shares() -> None:
    found = parts(data_s=0.25, rank_s=(1.0, 2.0)).of_step(3.0)
    assert found.step_s == 3.0
    assert found.data_s == pytest.approx(0.75)
    assert found.shares() == pytest.approx(parts(data_s=0.25).shares())
    assert found.rank_s == (1.0, 2.0)


def test_merged_windows_weigh_their_parts_by_timed_steps() -> None:
    def window(data_s: float, timed: int) -> Measurement:
        return Measurement(steps=4, samples=8, items=8, total_s=4.0, step_s=(1.0,) * timed, parts=parts(data_s=data_s))

    merged = merge_windows([window(0.1, 1), window(0.5, 3), dataclasses.replace(window(0.9, 2), parts=None)])
    assert merged.parts is not None
    assert merged.parts.data_s == pytest.approx(0.4)


@pytest.mark.parametrize("job", [gpt_job(), convolution_job()], ids=lambda job: job.name)
def test_operations_are_counted_without_computing_or_changing_anything(job: Job) -> None:
    torch.manual_seed(0)
    model, batch = job.model().train(), next(job.batches(0))
    before, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    found = model_flops(f"{job.name}, counted here", model, job.loss, batch)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found == step_flops(model, job.loss, batch)


def test_loss_that_depends_on_values_has_no_count() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found = next_token_loss(model, batch)
        return found if float(found.detach()) > 0 else -found

    job = gpt_job(name="depends on values")
    model, batch = job.model(), next(job.batches(0))
    assert model_flops(job.name, model, loss, batch) is None


def test_utilisation_is_of_the_model_and_not_of_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "_SIDES", (128,))
    monkeypatch.setattr(flops, "_measured", {})
    monkeypatch.setattr(flops, "useful_precisions", lambda device: (Precision.FP32,))
    options = EngineOptions(meter_memory=False, statistics_every=None)
    unknown = TorchEngine(gpt_job(), options=options)
    assert unknown.run(4).parts.mfu is None  # type: ignore[union-attr]
    measure_peaks("cpu")
    engine = TorchEngine(gpt_job(), options=options)
    peak = peak_of("cpu", [Precision.INHERIT])
    assert peak is not None
    assert "measured here on 1 thread" in peak.source
    per_step = step_flops(engine.model, next_token_loss, next(token_batches(0)))
    for plan in (
        engine.space.baseline(),
        engine.space.plan(accumulation_steps=1, precision=Precision.FP32, recomputed=engine.space.recomputable),
    ):
        engine.apply(plan)
        found = engine.run(4).parts
        assert found is not None
        assert found.mfu is not None
        assert found.mfu == pytest.approx(per_step / (found.step_s * peak.rate))
        assert found.peak_source == peak.source
    engine.apply(engine.space.plan(accumulation_steps=1, precision=Precision.BF16))
    assert engine.run(4).parts.mfu is None  # type: ignore[union-attr]
    engine.close()


def test_peak_of_several_precisions_is_that_of_the_fastest_and_needs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "_measured", {(Precision.FP32, 1): 1.0, (Precision.BF16, 1): 4.0})
    found = peak_of("cpu", [Precision.FP32, Precision.BF16])
    assert found is not None
    assert found.rate == 4.0
    assert peak_of("cpu", [Precision.FP32, Precision.FP16]) is None


installed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.mark.slow
@installed
@pytest.mark.parametrize("stage", [0, 2])
def test_slow_loader_slow_rank_and_slow_link_are_each_named_on_two_ranks(stage: int, tmp_path: Path) -> None:
    run_on_ranks("parts_rank.py", tmp_path, stage)
    found = json.loads((tmp_path / "rank0.json").read_text())
    assert "of the step waits for data" in found["loader"]["advice"]
    assert found["rank"]["advice"].startswith("rank 1 is ")
    assert "of the step is communication that nothing hides" in found["link"]["advice"]
    for one in found.values():
        measured = Measurement.from_json(one["window"])
        assert measured.parts is not None
        assert math.fsum(measured.parts.seconds().values()) == pytest.approx(
            statistics.fmean(measured.step_s), rel=0.02
        )
        assert len(measured.parts.rank_s) == 2
    # Both ranks compute the same parts from what they gathered.
    other = json.loads((tmp_path / "rank1.json").read_text())
    assert [one["advice"] for one in other.values()] == [one["advice"] for one in found.values()]

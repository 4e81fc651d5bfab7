"""Tests of what just fits, and the costs of whole runs on many devices."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.cli.main import run
from autotune.cost_model.cluster.constants import fitted
from autotune.cost_model.cluster.estimate import Estimate, estimate_layout
from autotune.cost_model.cluster.failures import Reliability, availability, best_interval, goodput
from autotune.cost_model.cluster.layout import Layout
from autotune.cost_model.cluster.limits import fewest_devices, largest_micro_batch, least_memory, longest_sequence
from autotune.cost_model.cluster.machines import find_machine
from autotune.cost_model.cluster.memory import predict_memory
from autotune.cost_model.cluster.run_cost import Money, front, parse_tokens, run_cost
from autotune.cost_model.cluster.search import Question
from autotune.cost_model.cluster.transformer import Transformer
from autotune.errors import BudgetError, InputError

H100 = find_machine("h100")
SEVEN = Transformer(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128_256, gated=True)
MODEL = ["--layers", "32", "--hidden", "4096", "--heads", "32", "--kv-heads", "8", "--vocab", "128256"]
BASE = ["plan", *MODEL, "--seq", "8192", "--device", "h100", "--plan", "cp=1", "--top", "1"]


def asked(**changes: Any) -> Question:
    base = Question(model=SEVEN, machine=H100, devices=8, sequence=8192, budget_bytes=H100.capacity_bytes)
    return replace(base, **{"fixed": {"cp": 1}, **changes})


def peak(layout: Layout) -> float:
    return predict_memory(SEVEN, layout, fitted()).total


def test_the_fewest_devices_are_enough_and_fewer_are_not() -> None:
    count, layout = fewest_devices(asked(), fitted())
    assert layout.devices == count == 2
    assert peak(layout) <= H100.capacity_bytes
    found = least_memory(asked(devices=1), fitted())
    assert found is not None
    assert found[0] > H100.capacity_bytes
    alone, _ = fewest_devices(replace(asked(), base=Layout(trainable=0.005)), fitted())
    assert alone == 1
    with pytest.raises(BudgetError, match=r"no layout of up to 131,072 devices"):
        fewest_devices(asked(budget_bytes=1e9), fitted())


def test_the_longest_sequence_fits_and_a_longer_one_does_not() -> None:
    tokens, layout = longest_sequence(asked(), fitted())
    assert layout.sequence == tokens
    assert peak(layout) <= H100.capacity_bytes
    longer = least_memory(asked(sequence=tokens + 1024), fitted())
    assert longer is not None
    assert longer[0] > H100.capacity_bytes
    split, _ = longest_sequence(asked(fixed={}), fitted())
    assert split > tokens
    bound, _ = longest_sequence(asked(model=replace(SEVEN, positions=4096)), fitted())
    assert bound == 4096
    short, _ = longest_sequence(asked(model=replace(SEVEN, positions=512)), fitted())
    assert short == 512


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not() -> None:
    size, layout = largest_micro_batch(asked(), fitted())
    assert layout.micro_batch == size > 1
    assert peak(layout) <= H100.capacity_bytes
    assert peak(replace(layout, micro_batch=size + 1)) > H100.capacity_bytes
    lean, _ = largest_micro_batch(replace(asked(), base=Layout(trainable=0.005)), fitted())
    assert lean > size
    with pytest.raises(BudgetError, match="not even one sequence fits"):
        largest_micro_batch(asked(budget_bytes=1e9), fitted())


@pytest.mark.parametrize("find", ["devices", "sequence", "micro-batch"])
def test_what_just_fits_is_an_estimate(find: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BASE, "--devices", "8", "--find", find, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["estimated"] is True
    assert document["value"] >= 1
    assert document["plan"]["fits"] is True
    assert run([*BASE, "--devices", "8", "--find", find]) == 0
    assert "estimated, not measured" in capsys.readouterr().out


def laid_out(**choices: Any) -> Estimate:
    layout = Layout(sequence=8192, micro_batch=2, micro_batches=8, compiled=True, **choices)
    return estimate_layout(SEVEN, layout, H100, fitted())


def test_a_run_takes_its_tokens_over_its_rate() -> None:
    estimate = laid_out(shard=8)
    price = Money(amount=2.0, currency="USD")
    one = run_cost(estimate, 1e12, price=price, watts=500, grams_per_kwh=100)
    assert one.seconds == pytest.approx(1e12 / estimate.tokens_per_s)
    assert one.cost == pytest.approx(2.0 * 8 * one.seconds / 3600)
    assert one.energy_j == pytest.approx(500 * 8 * one.seconds)
    assert one.grams == pytest.approx(one.energy_j / 3.6e6 * 100)
    assert one.energy_source == "estimated:given"
    assert run_cost(estimate, 1e12).energy_source == "estimated:tdp"
    assert run_cost(estimate, 1e12, goodput=0.5).seconds == pytest.approx(2 * one.seconds)


@pytest.mark.parametrize(
    ("text", "amount", "currency"), [("2.5USD", 2.5, "USD"), ("$2.5", 2.5, "USD"), ("10,000 €", 10_000, "EUR")]
)
def test_money_has_a_currency(text: str, amount: float, currency: str) -> None:
    assert Money.parse(text, where="--price") == Money(amount=amount, currency=currency)


def test_money_without_a_currency_or_amount_is_refused() -> None:
    with pytest.raises(InputError, match=r"'2\.5' has no currency"):
        Money.parse("2.5", where="--price")
    for text in ("", "USD", "0USD", "-1USD", "$1USD", "1 dollar"):
        with pytest.raises(InputError, match="an amount with its currency"):
            Money.parse(text, where="--price")


def test_tokens_have_suffixes() -> None:
    assert parse_tokens("1.5T") == 1.5e12
    assert parse_tokens("300b") == 3e11
    assert parse_tokens("2000") == 2000
    for text in ("", "0", "-1B", "1e12", "many"):
        with pytest.raises(InputError, match="a number of tokens"):
            parse_tokens(text)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_no_plan_beats_one_on_the_front(points: list[tuple[int, int]]) -> None:
    kept = front(points, lambda one: one[0], lambda one: one[1])
    assert kept

    def beaten(one: tuple[int, int]) -> bool:
        return any(a <= one[0] and b <= one[1] and (a, b) != one for a, b in points)

    assert not any(map(beaten, kept))
    assert all(beaten(one) for one in points if one not in kept)


@given(st.floats(600, 1e6), st.floats(1, 600), st.floats(0, 3600))
def test_no_interval_between_snapshots_is_better_than_the_best(mean: float, snapshot: float, restart: float) -> None:
    reliability = Reliability(failures_per_device_day=1.0, snapshot_s=snapshot, restart_s=restart)
    best = best_interval(mean, snapshot)
    top = goodput(best, mean, reliability)
    assert 0 <= top < 1
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert goodput(factor * best, mean, reliability) <= top * (1 + 1e-9)
    if snapshot < 0.001 * mean:
        assert best == pytest.approx(math.sqrt(2 * snapshot * mean), rel=0.05)


def test_the_goodput_is_that_of_simulated_failures() -> None:
    mean, reliability = 5000.0, Reliability(failures_per_device_day=1.0, snapshot_s=60.0, restart_s=300.0)
    interval = best_interval(mean, 60.0)
    generator = np.random.default_rng(0)
    done = elapsed = 0.0
    while done < 3000 * interval:
        life = generator.exponential(mean)
        # Failures may also come during the restart.
        if life < reliability.restart_s:
            elapsed += life
            continue
        stretches = int((life - reliability.restart_s) // (interval + 60.0))
        done += stretches * interval
        elapsed += life
    assert done / elapsed == pytest.approx(goodput(interval, mean, reliability), rel=0.05)


def test_more_devices_fail_more_often_and_need_more_spares() -> None:
    reliability = Reliability(failures_per_device_day=5e-4, snapshot_s=60, restart_s=900)
    small, large = (availability(count, 8, reliability) for count in (1_000, 100_000))
    assert large.goodput < small.goodput
    assert large.interval_s < small.interval_s
    assert large.spare_nodes > small.spare_nodes
    assert large.mean_time_between_failures_s == pytest.approx(small.mean_time_between_failures_s / 100)


def test_failures_of_a_published_run_leave_the_progress_that_was_published() -> None:
    # Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 devices, more than 90 % effective training time
    # (arXiv:2407.21783, section 3.3.4). The times of a snapshot and a restart are assumptions.
    reliability = Reliability(failures_per_device_day=419 / 54 / 16_384, snapshot_s=10, restart_s=600)
    found = availability(16_384, 8, reliability)
    assert found.mean_time_between_failures_s == pytest.approx(54 * 86_400 / 419)
    assert 0.90 < found.goodput < 0.93


def test_costs_choose_the_cheapest_within_a_time_and_the_fastest_within_a_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [*BASE, "--devices", "8,64", "--tokens", "100B", "--price", "2USD", "--json"]

    def chosen(*more: str) -> dict[str, Any]:
        assert run([*base, *more]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    document = chosen("--figure", str(tmp_path / "front.png"), "--failures", "0.001", "--carbon-intensity", "50")
    assert (tmp_path / "front.png").stat().st_size > 1000
    few, many = document["runs"]
    assert (few["devices"], many["devices"]) == (8, 64)
    assert few["seconds"] > many["seconds"]
    assert document["chosen"] == many
    assert [one["devices"] for one in document["failures"]] == [8, 64]
    assert many["grams"] > 0
    assert {one["devices"] for one in document["front"]} <= {8, 64}
    between = (few["seconds"] + many["seconds"]) / 2 / 3600
    cheapest = min((few, many), key=lambda one: one["cost"])
    assert chosen("--within", "3000d")["chosen"]["devices"] == cheapest["devices"]
    assert chosen("--within", f"{between:.0f}h")["chosen"]["devices"] == 64
    assert chosen("--within-cost", "1000000USD")["chosen"]["devices"] == 64


BAD: dict[str, tuple[list[str], str]] = {
    "price without currency": (["--tokens", "1T", "--price", "2.5"], "'2.5' has no currency"),
    "price without tokens": (["--price", "2.5USD"], "needs the tokens of the run"),
    "watts without tokens": (["--watts", "300"], "--watts: needs the tokens of the run"),
    "sequences of no mesh": (["--find", "sequence", "--plan", "tp=3"], "a mesh of 3 does not divide 8 devices"),
    "micro-batches of no mesh": (["--find", "micro-batch", "--plan", "tp=3"], "a mesh of 3 does not divide 8 devices"),
    "two currencies": (["--tokens", "1T", "--price", "2USD", "--within-cost", "9EUR"], "in EUR, the price in USD"),
    "impossible time": (["--tokens", "1T", "--within", "1h"], "no plan is within the given time and cost"),
    "unknown target": (["--export", "megatronn"], "did you mean 'megatron'"),
    "unknown find": (["--find", "device"], "did you mean 'devices'"),
    "no tokens": (["--tokens", "none"], "a number of tokens"),
    "no length": (["--tokens", "1T", "--within", "soon"], "soon"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = BAD[case]
    assert run([*BASE, "--devices", "8", *arguments]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("autotune: ")]
    assert len(told) == 1
    assert message in told[0]

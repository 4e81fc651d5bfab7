"""Attached on several ranks: one decision for all, the same plan at every step, no bit changed and no hang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_on_ranks


def run_ranks(folder: Path, way: str, steps: int, world: int) -> list[dict[str, Any]]:
    """Run a way on so many ranks, with a watchdog, and return what each wrote."""
    run_on_ranks("live_rank.py", folder, way, steps, ranks=world, timeout_s=1000)
    return [json.loads((folder / f"{way}-{rank}.json").read_text()) for rank in range(world)]


def assert_same_run(plain: list[dict[str, Any]], tuned: list[dict[str, Any]]) -> None:
    for one, two in zip(plain, tuned, strict=True):
        assert one["losses"] == two["losses"]
        assert one["weights"] == two["weights"]
        assert one["random"] == two["random"]


@pytest.mark.parametrize(
    ("way", "steps", "least"), [pytest.param("wandering", 60, 30, marks=pytest.mark.slow), ("troubled", 60, 20)]
)
def test_two_ranks_hold_the_same_plan_at_every_step_and_change_no_bit(
    way: str, steps: int, least: int, tmp_path: Path
) -> None:
    plain = run_ranks(tmp_path, "plain", steps, 2)
    tuned = run_ranks(tmp_path, way, steps, 2)
    assert all(rank["attached"] for rank in tuned), tuned[0]["why"]
    assert all(rank["switches"] >= least for rank in tuned)
    # While each rank profiles its own steps, storage is its own business.
    assert tuned[0]["plans"][12:] == tuned[1]["plans"][12:]
    assert bool(tuned[0]["trips"]) == (way == "troubled")
    assert_same_run(plain, tuned)


@pytest.mark.slow
def test_ranks_with_budgets_of_their_own_follow_the_tightest_together(tmp_path: Path) -> None:
    plain = run_ranks(tmp_path, "plain", 40, 2)
    tuned = run_ranks(tmp_path, "following", 40, 2)
    assert all(rank["attached"] for rank in tuned), tuned[0]["why"]
    assert tuned[0]["plans"][14:] == tuned[1]["plans"][14:]
    assert len(set(tuned[0]["plans"][14:])) > 1
    assert_same_run(plain, tuned)


def test_in_join_the_tuner_leaves_and_no_rank_waits_for_another(tmp_path: Path) -> None:
    plain = run_ranks(tmp_path, "plain-joining", 16, 2)
    joining = run_ranks(tmp_path, "joining", 16, 2)
    assert all("join()" in rank["why"] for rank in joining)
    assert_same_run(plain, joining)


@pytest.mark.parametrize("step", [0, 15])
def test_a_rank_that_leaves_takes_the_others_along_and_lets_none_wait(step: int, tmp_path: Path) -> None:
    plain = run_ranks(tmp_path, "plain", 24, 2)
    left = run_ranks(tmp_path, f"leaving-{step}", 24, 2)
    assert left[0]["why"] == "its loop wants to"
    assert "another rank has left" in left[1]["why"]
    # Ranks meet at each step once they have a profile.
    assert left[1]["left_at"] <= (step + 1 if step else 24)
    assert_same_run(plain, left)


@pytest.mark.slow
def test_ranks_whose_k_roams_learn_the_same_up_to_rounding(tmp_path: Path) -> None:
    plain = run_ranks(tmp_path, "plain-rounding", 40, 2)
    tuned = run_ranks(tmp_path, "rounding", 40, 2)
    assert all(rank["attached"] for rank in tuned), tuned[0]["why"]
    assert set(tuned[0]["ks"]) == {1, 2, 4}
    assert tuned[0]["weights"] == tuned[1]["weights"]
    for one, two in zip(plain[0]["parameters"], tuned[0]["parameters"], strict=True):
        assert one == pytest.approx(two, rel=1e-6, abs=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("world", [2, 4])
def test_500_switches_under_delays_lies_and_crashes(world: int, tmp_path: Path) -> None:
    plain = run_ranks(tmp_path, "plain", 800, world)
    tuned = run_ranks(tmp_path, "troubled", 800, world)
    assert all(rank["attached"] and rank["switches"] >= 500 for rank in tuned)
    for rank in tuned[1:]:
        assert rank["plans"][12:] == tuned[0]["plans"][12:]
    assert_same_run(plain, tuned)


@pytest.mark.parametrize(
    ("ways", "world"),
    [
        ("resharded,kept", 2),
        pytest.param("tensor,flattened", 2, marks=pytest.mark.slow),
        pytest.param("hybrid,both", 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_a_model_is_spread_over_hold_the_same_plan_and_change_no_bit(
    ways: str, world: int, tmp_path: Path
) -> None:
    run_on_ranks("spread_rank.py", tmp_path, ways, ranks=world)
    # One rank writes.
    assert len(list(tmp_path.glob("*/*/decisions.jsonl"))) == 2 * len(ways.split(","))


@pytest.mark.parametrize(
    ("ways", "world"),
    [
        # A rank that begins a step again keeps no other one waiting.
        ("parallel", 2),
        # Ranks that time units differently recompute the same ones from the first step on.
        ("skewed", 2),
        pytest.param("nested", 2, marks=pytest.mark.slow),
        pytest.param("halves", 4, marks=pytest.mark.slow),
        ("attach_alone", 2),
    ],
)
def test_ranks_that_differ_run_the_same_plans_and_change_no_bit(ways: str, world: int) -> None:
    run_on_ranks("apart_rank.py", ways, ranks=world)

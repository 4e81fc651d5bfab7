"""Tests of attaching on several ranks: one decision for all, bit-identical training and no hang."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from ranks import fork_ranks

Ranks = list[dict[str, Any]]
# The quick runs and their steps.
WAYS = {
    "plain": 32,
    "troubled": 32,
    "plain-joining": 16,
    "joining": 16,
    "plain-leaving": 20,
    "leaving-0": 20,
    "leaving-15": 20,
}


def read(folder: Path, ways: Iterable[str], world: int) -> list[Ranks]:
    """Return what each rank wrote, for each way."""
    written = [[folder / f"{way}-{rank}.json" for rank in range(world)] for way in ways]
    return [[json.loads(path.read_text()) for path in paths] for paths in written]


def run_ranks(folder: Path, ways: dict[str, int], world: int) -> list[Ranks]:
    """Run ways one after another on so many ranks, with a watchdog, and return what each rank wrote, for each way.

    Args:
        folder: where they write.
        ways: the steps of each way.
        world: number of ranks.
    """
    told = ",".join(f"{way}:{steps}" for way, steps in ways.items())
    fork_ranks("live_rank.py", folder, told, ranks=world, timeout_s=1000)
    return read(folder, ways, world)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the quick runs on two ranks; each of them has compared what it trained itself."""
    folder = tmp_path_factory.mktemp("quick")
    fork_ranks("quick_ranks.py", folder, json.dumps(WAYS))
    return folder


@pytest.fixture(scope="module")
def quick(started: Path) -> dict[str, Ranks]:
    """Return what each rank wrote of the quick data-parallel runs."""
    return dict(zip(WAYS, read(started, WAYS, 2), strict=True))


def assert_same_run(plain: Ranks, tuned: Ranks) -> None:
    for one, two in zip(plain, tuned, strict=True):
        assert one["losses"] == two["losses"]
        assert one["weights"] == two["weights"]
        assert one["random"] == two["random"]


def assert_switching_is_identical(plain: Ranks, tuned: Ranks, least: int) -> None:
    assert all(rank["attached"] for rank in tuned), tuned[0]["why"]
    assert all(rank["switches"] >= least for rank in tuned)
    # While a rank profiles its own steps, its storage may differ from other ranks'.
    assert tuned[0]["plans"][12:] == tuned[1]["plans"][12:]
    assert_same_run(plain, tuned)


def test_two_ranks_use_the_same_plan_at_every_step_and_stay_bit_identical(quick: dict[str, Ranks]) -> None:
    assert_switching_is_identical(quick["plain"], quick["troubled"], 13)
    assert quick["troubled"][0]["trips"]


@pytest.mark.slow
def test_two_ranks_without_trouble_use_the_same_plan_and_stay_bit_identical(tmp_path: Path) -> None:
    plain, tuned = run_ranks(tmp_path, {"plain": 60, "wandering": 60}, 2)
    assert_switching_is_identical(plain, tuned, 30)
    assert not tuned[0]["trips"]


@pytest.mark.slow
def test_ranks_with_different_budgets_follow_the_tightest(tmp_path: Path) -> None:
    plain, tuned = run_ranks(tmp_path, {"plain": 40, "following": 40}, 2)
    assert all(rank["attached"] for rank in tuned), tuned[0]["why"]
    assert tuned[0]["plans"][14:] == tuned[1]["plans"][14:]
    assert len(set(tuned[0]["plans"][14:])) > 1
    assert_same_run(plain, tuned)


def test_tuner_detaches_in_join_without_blocking_a_rank(quick: dict[str, Ranks]) -> None:
    assert all("join()" in rank["why"] for rank in quick["joining"])
    assert_same_run(quick["plain-joining"], quick["joining"])


@pytest.mark.parametrize("step", [0, 15])
def test_rank_that_detaches_makes_all_ranks_detach_without_blocking(step: int, quick: dict[str, Ranks]) -> None:
    plain, left = quick["plain-leaving"], quick[f"leaving-{step}"]
    assert left[0]["why"] == "its loop wants to"
    assert "another rank has left" in left[1]["why"]
    # Plans have the precisions that are fast on all ranks.
    assert "another rank has no fast path" in left[0]["locks"]["fp16"]
    assert "another rank has no fast path" in left[1]["locks"]["bf16"]
    # Ranks communicate at each step once they have a profile.
    assert left[1]["left_at"] <= (step + 1 if step else 20)
    assert_same_run(plain, left)


@pytest.mark.slow
def test_ranks_with_changing_k_learn_the_same_up_to_rounding(tmp_path: Path) -> None:
    plain, tuned = run_ranks(tmp_path, {"plain-rounding": 40, "rounding": 40}, 2)
    assert all(rank["attached"] for rank in tuned), tuned[0]["why"]
    assert set(tuned[0]["ks"]) == {1, 2, 4}
    assert tuned[0]["weights"] == tuned[1]["weights"]
    for one, two in zip(plain[0]["parameters"], tuned[0]["parameters"], strict=True):
        assert one == pytest.approx(two, rel=1e-6, abs=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("world", [2, 4])
def test_500_switches_with_delays_invalid_answers_and_crashes_are_bit_identical(world: int, tmp_path: Path) -> None:
    plain, tuned = run_ranks(tmp_path, {"plain": 800, "troubled": 800}, world)
    assert all(rank["attached"] and rank["switches"] >= 500 for rank in tuned)
    for rank in tuned[1:]:
        assert rank["plans"][12:] == tuned[0]["plans"][12:]
    assert_same_run(plain, tuned)


def test_ranks_of_a_sharded_model_use_the_same_plan_and_stay_bit_identical(started: Path) -> None:
    # Only one rank writes.
    assert len(list((started / "spread").glob("*/*/decisions.jsonl"))) == 2


def test_a_rank_that_begins_a_step_again_or_does_not_attach_keeps_no_other_one_waiting(started: Path) -> None:
    assert len(list(started.glob("ended-*"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("ways", "world"), [("kept", 2), ("tensor,flattened", 2), ("hybrid,both", 4)])
def test_ranks_of_a_model_sharded_otherwise_use_the_same_plan_and_stay_bit_identical(
    ways: str, world: int, tmp_path: Path
) -> None:
    fork_ranks("spread_rank.py", tmp_path, ways, ranks=world)
    assert len(list(tmp_path.glob("*/*/decisions.jsonl"))) == 2 * len(ways.split(","))


# Ranks that time units differently recompute the same ones from the first step on.
@pytest.mark.slow
@pytest.mark.parametrize(("way", "world"), [("skewed", 2), ("nested", 2), ("halves", 4)])
def test_ranks_that_differ_run_the_same_plans_and_change_no_bit(way: str, world: int) -> None:
    fork_ranks("apart_rank.py", way, ranks=world)

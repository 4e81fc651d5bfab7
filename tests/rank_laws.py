"""Laws that every engine of several ranks obeys, checked on what the ranks of sharded_rank.py wrote."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sharded_rank
from ranks import fork_ranks, run_on_ranks

from autotune.engines.isolated_engine import IsolatedEngine
from autotune.engines.registry import RankOptions
from autotune.engines.torch_engine import EngineOptions
from autotune.plan import Plan


def run_ranks(folder: Path, what: str, layout: int | str, steps: int, ranks: int = 2) -> list[dict[str, Any]]:
    """Run parts of sharded_rank.py on several ranks, with a watchdog, and return what each rank wrote.

    Torchrun starts ranks of DeepSpeed and pipelines, and those that share layers are forked.

    Args:
        folder: folder for the results.
        what: names of the parts, separated by commas.
        layout: ZeRO stage of DeepSpeed, or mesh of FSDP2.
        steps: number of steps of each part.
        ranks: number of ranks.
    """
    start = fork_ranks if "tp=" in str(layout) else run_on_ranks
    start("sharded_rank.py", folder, what, layout, steps, ranks=ranks, timeout_s=900)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def assert_equals_torch(ranks: list[dict[str, Any]], steps: int, apart: float = 1e-6) -> None:
    for found in (rank["equals_torch"] for rank in ranks):
        assert found["apart"] <= apart
        assert found["loss_apart"] <= 1e-6 * 10
        assert found["norm_apart"] <= 1e-5
        assert found["metric_apart"] <= 1e-5
        assert found["failures"] == 0
        assert found["samples"] == steps * sharded_rank.BATCH
        assert found["switches"] >= steps * 0.8
        assert found["sampled"] == steps
        assert found["per_unit"] == pytest.approx(found["per_unit_torch"], rel=1e-4)
    assert ranks[0]["equals_torch"]["digest"] == ranks[1]["equals_torch"]["digest"]


def assert_storage_is_exact(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["storage_is_exact"] for rank in ranks):
        assert len(set(found["digests"])) == 1
        assert found["recomputed"] > 10


def assert_troubles_are_shared(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["troubles"] for rank in ranks):
        # A nonfinite loss on either rank ends the window on both, and no weight has changed.
        assert set(found["failures"]) == {"non_finite"}
        assert found["kept"]
        assert found["restored"]
        assert found["same_after"]
        assert found["failure"] == "None"
        assert found["peak"] > 0
    assert ranks[0]["troubles"]["after"] == ranks[1]["troubles"]["after"]
    assert ranks[0]["troubles"]["peak"] == ranks[1]["troubles"]["peak"]


def assert_mixes_precisions(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["mixed_precision"] for rank in ranks):
        assert found["kinds"] == 2
        assert found["loss_apart"] < 0.02


def assert_adapts_as_torch(ranks: list[dict[str, Any]], apart: float) -> None:
    for found in (rank["adaptive_equals_torch"] for rank in ranks):
        assert found["apart"] <= apart


def assert_sent_otherwise(ranks: list[dict[str, Any]], most: float = 0.1) -> None:
    """Check updates that differ, but little: bf16 has 8 bits.

    Args:
        ranks: what the ranks wrote.
        most: largest difference of a weight, as a share of the largest update.
    """
    for found in (rank["sent_otherwise"] for rank in ranks):
        assert (found["apart"] > 1e-5) == (most > 1e-5)
        assert found["apart"] < most
        assert found["losses_apart"] < most / 10
        assert found["metrics_apart"] < 1e-5
        assert found["again"][0] == found["again"][1]
    assert len({rank["sent_otherwise"]["digest"] for rank in ranks}) == 1


def peaks_of(job: str, ranks: RankOptions, plans: Sequence[Plan]) -> dict[Plan, int]:
    with contextlib.closing(IsolatedEngine(job, ranks=ranks, options=EngineOptions(statistics_every=None))) as engine:
        engine.run(1)
        found = {}
        for plan in plans:
            engine.apply(plan)
            found[plan] = engine.run(2).peak_bytes or 0
        return found

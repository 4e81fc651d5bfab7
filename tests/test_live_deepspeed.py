"""Tests of attaching to a DeepSpeed engine: every rank stays bit-identical; unsupported use is rejected."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_on_ranks

import autotune
from autotune.errors import AttachError


def test_object_that_is_not_an_engine_is_rejected() -> None:
    with pytest.raises(AttachError, match=r"engine is a dict .*deepspeed\.initialize"):
        autotune.attach(engine={})


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", range(4))
def test_attached_engine_with_plan_switches_is_bit_identical(stage: int, tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, stage, 60)
    for found in (rank["runs"] for rank in ranks):
        for way in found:
            plain = found["plain" + way.partition("ing")[2]] if "ing" in way else found[way]
            for kind in ("losses", "weights", "random"):
                assert found[way][kind] == plain[kind], way
            if way.startswith("wandering"):
                assert found[way]["attached"], found[way]["why"]
                # Stage 3 is only observed.
                least = 0 if stage == 3 else 20
                assert least <= found[way]["switches"] <= 10**6 * least
    for way in ("wandering", "insisting"):
        plans = [rank["runs"][way]["plans"] for rank in ranks]
        # While a rank profiles its own steps, its storage may differ from other ranks'.
        assert plans[0][12:] == plans[1][12:]
    refused = ranks[0]["refusals"]
    assert "mode is rounding" in refused["mode"]
    assert "cannot be given with engine" in refused["beside"]
    assert "clip_norm is 0.5, and gradient_clipping is 1.0" in refused["clip"]
    assert "managed_gradient_accumulation" in refused["managed"]
    assert "attach(engine=engine)" in refused["as a model"]
    assert "attach" in refused["none"]


def run_ranks(folder: Path, stage: int, steps: int) -> list[dict[str, Any]]:
    """Run sharded_live_rank.py on two ranks, with a watchdog, and return what each rank wrote."""
    run_on_ranks("sharded_live_rank.py", folder, stage, steps)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]

"""Tests of the batching benchmark: constant k against a live run on the same batches, each trained to its target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_job

from autotune import Job, load_job
from autotune.bench.attached_arms import endless
from autotune.bench.bench_batching import ConstantArm, bench_growing_noise
from autotune.cli.main import run
from autotune.errors import InputError


def adaptive(**changes: object) -> Job:
    settings = {"batching": "adaptive", "lr_rule": "sqrt", "accumulation_choices": (1, 2, 4), "target": 3.4}
    return tiny_job.make(**{**settings, "max_steps": 90, "evaluate_every": 6, "schedule": None, **changes})


def test_arm_with_constant_k_updates_only_after_k_batches() -> None:
    job = adaptive()
    arm, updates = ConstantArm(job, 0, 4), []
    rates = {group["lr"] for group in arm.optimizer.param_groups}
    assert rates == {1e-2 * 2.0}
    before = [parameter.detach().clone() for parameter in arm.model.parameters()]
    for number, batch in zip(range(1, 9), endless(job, 0), strict=False):
        arm.take(batch)
        moved = any((now != then).any() for now, then in zip(arm.model.parameters(), before, strict=True))
        before = [parameter.detach().clone() for parameter in arm.model.parameters()]
        updates += [number] if moved else []
    assert updates == [4, 8]


def test_every_arm_trains_until_the_target() -> None:
    document = bench_growing_noise(adaptive(), seeds=2, policy="planner")
    assert set(document["constant_over_best"]) == {"k=1", "k=2", "k=4"}
    assert document["constant_over_best"][document["best_constant"]]["mean"] == 1.0
    assert len(document["runs"]) == len(document["live_over_best"]["values"]) == 2
    for one in document["runs"]:
        assert set(one["seconds"]) == {"k=1", "k=2", "k=4", "live"}
        assert all(seconds > 0 for seconds in one["seconds"].values())
        assert one["reached"]["k=1"]
        assert sum(number for _, number in one["ks"]) > 0
    json.dumps(document)


def test_job_with_fixed_batching_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="batching of tiny is 'fixed'"):
        bench_growing_noise(tiny_job.make(), seeds=1)
    assert run(["bench", "batching", str(Path(tiny_job.__file__)), "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "allowed: adaptive" in capsys.readouterr().err


def test_default_job_has_adaptive_batching() -> None:
    assert load_job("charlm_long:adaptive").batching == "adaptive"

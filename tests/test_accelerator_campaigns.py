"""Tests of whole campaigns on a fake accelerator: tuned, compared, attached and isolated."""

from __future__ import annotations

import contextlib
import gc
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import device_jobs
import fake_accelerator
import pytest
import torch
from leftovers import wait_until
from ranks import run_on_ranks
from test_accelerator import BATCH_BYTES, DEVICE, LIVELY, Loop, _asked_anew, allocated, engine, plain_peak  # noqa: F401

import autotune
from autotune.cli.main import run
from autotune.engines.isolated_engine import IsolatedEngine
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.measurement import Failure
from autotune.plan import Precision
from autotune.profiling.profile_cache import validate
from autotune.profiling.profiler import ProfilerOptions, profile

JOB = str(Path(device_jobs.__file__)) + ":job"
pytestmark = pytest.mark.slow


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("budget", ["45%", "85%"])
def test_exact_plan_is_within_its_budget(
    accelerator: ModuleType, budget: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["tune", JOB, "--method", "exact", "--memory-budget", budget, "--runs-dir", str(tmp_path), "--json"]
    assert run(asked) == 0
    found = said(capsys)["measured"]
    assert found["peak_bytes"] <= found["memory_budget_bytes"]


@pytest.mark.parametrize("method", ["optuna", "ppo-scratch", "ppo"])
def test_every_search_method_runs(
    accelerator: ModuleType, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["tune", JOB, "--method", method, "--memory-budget", "70%", "--steps", "60"]
    assert run([*asked, "--runs-dir", str(tmp_path), "--json"]) == 0
    found = said(capsys)["measured"]
    assert found["peak_bytes"] <= found["memory_budget_bytes"]
    before = allocated(accelerator)
    assert before < 2**20


def test_comparison_runs_and_names_its_device(
    accelerator: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["compare", JOB, "--arms", "baseline,exact,uniform-bf16", "--seeds", "2", "--memory-budget", "70%"]
    assert run([*asked, "--runs-dir", str(tmp_path), "--json"]) == 0
    document = said(capsys)
    (environment,) = tmp_path.glob("*/environment.json")
    assert json.loads(environment.read_text())["settings"]["kind"] == DEVICE
    arms = {arm["name"]: arm for arm in document["arms"]}
    assert all(run["within_budget"] for run in arms["exact"]["runs"])


def test_predictions_match_measurements_of_twelve_plans(accelerator: ModuleType) -> None:
    job = device_jobs.make()
    known = profile(job, device_name="fake", device=DEVICE, options=ProfilerOptions.lean(0))
    found = validate(job, known, 12)
    assert max(found.memory_error_p95, found.memory_underprediction_max) < 0.005


@pytest.mark.timeout(1200)
def test_out_of_memory_at_any_allocation_of_a_step_leaves_nothing_behind(
    accelerator: ModuleType, request: pytest.FixtureRequest
) -> None:
    job = device_jobs.make(model=lambda: device_jobs.Transformer(2))
    running = TorchEngine(job, options=EngineOptions(discard_steps=0, statistics_every=None, meter_memory=False))
    running.apply(running.space.leanest())
    running.run(2)
    before, calls = allocated(accelerator), accelerator.calls["allocations"]
    running.run(1)
    failures, count = 0, accelerator.calls["allocations"] - calls

    def held() -> int:
        return int(accelerator.stats()["allocated_bytes.all.current"])

    # Earlier objects are excluded from the garbage collection after each failure.
    gc.freeze()
    request.addfinalizer(gc.unfreeze)
    # Every third one, because the units of the model are alike.
    for number in range(1, count + 1, 3):
        accelerator.fail_at(number)
        window = running.run(1)
        accelerator.fail_at(0)
        failures += window.failure is Failure.OUT_OF_MEMORY
        assert window.failure in (None, Failure.OUT_OF_MEMORY)
        # The device thread may release a failed backward pass a moment later.
        wait_until(lambda: held() - before <= BATCH_BYTES, f"{number} leaves something")
    assert failures >= 30
    running.close()


@pytest.mark.parametrize("mode", ["exact", "rounding", "tolerant"])
def test_changing_budget_is_respected_in_every_mode(accelerator: ModuleType, mode: str) -> None:
    peak = plain_peak(accelerator)
    loop = Loop()
    loop.step()
    torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
    least = int(accelerator.stats()["allocated_bytes.all.current"])
    shares, told = [0.85, 0.5, 0.95, 0.6], []

    def budget() -> int:
        told.append(int(least + shares[(len(told) // 25) % len(shares)] * (peak - least)))
        return told[-1]

    tuner = autotune.attach(
        loop.model,
        loop.optimizer,
        policy="planner",
        mode=mode,
        memory_budget_bytes=budget,
        runs_dir=None,
        limits=LIVELY,
    )
    peaks = []
    for _, batch in zip(range(110), loop.batches, strict=False):
        torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
        for piece in tuner.micro_batches(batch):
            tuner.backward(loop.job.loss(loop.model, piece))
        tuner.step()
        peaks.append((accelerator.stats()["allocated_bytes.all.peak"], told[-1]))
    assert not tuner.status["trips"]
    assert not [(step, *pair) for step, pair in enumerate(peaks) if pair[0] > pair[1]]
    tuner.detach()


def test_attached_run_is_bit_identical_to_an_unattached_run(accelerator: ModuleType) -> None:
    plain, other = Loop(), None
    for _ in range(60):
        plain.step()
    kept = [parameter.detach().cpu().clone() for parameter in plain.model.parameters()]
    least = int(accelerator.stats()["allocated_bytes.all.current"])
    peak = int(accelerator.stats()["allocated_bytes.all.peak"])
    del plain
    other = Loop()
    tuner = autotune.attach(
        other.model,
        other.optimizer,
        policy="planner",
        memory_budget_bytes=int(least + 0.6 * (peak - least)),
        runs_dir=None,
        limits=LIVELY,
    )
    other.attached(tuner, 60, accelerator)
    tuner.detach()
    assert all(torch.equal(one, two.cpu()) for one, two in zip(kept, other.model.parameters(), strict=True))


def test_isolated_engine_trains_on_the_device(accelerator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake_accelerator.child_environment().items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(IsolatedEngine(JOB, options=EngineOptions(statistics_every=None))) as isolated:
        isolated.run(2)
        here = TorchEngine(device_jobs.make(), options=EngineOptions(statistics_every=None))
        here.run(2)
        assert isolated.run(2).peak_bytes == here.run(2).peak_bytes


def test_two_ranks_use_the_same_plan_and_stay_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (why := fake_accelerator.reason()) is not None:
        pytest.skip(why)

    def ranks(way: str) -> list[dict[str, Any]]:
        run_on_ranks("device_rank.py", tmp_path, way, 40)
        return [json.loads((tmp_path / f"{way}-{rank}.json").read_text()) for rank in range(2)]

    plain = ranks("plain")
    least, peak = plain[0]["least"], max(plain[0]["peaks"])
    budget = int(least + 0.6 * (peak - least))
    monkeypatch.setenv("BUDGET", str(budget))
    tuned = ranks("attached")
    for one, two in zip(plain, tuned, strict=True):
        assert (one["losses"], one["weights"]) == (two["losses"], two["weights"])
        assert two["attached"], two["why"]
        assert not two["trips"]
        assert max(two["peaks"]) <= budget
        assert two["predicted"] == pytest.approx(two["peaks"][-1], rel=0.01)
    assert tuned[0]["plans"][12:] == tuned[1]["plans"][12:]


def test_ranks_that_would_share_a_device_are_rejected(
    accelerator: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tune", JOB, "--engine", "deepspeed", "--ranks", "2"]) == 2
    assert "2 ranks would share 1 fake device" in capsys.readouterr().err


def test_fp16_scales_its_loss_on_the_device(accelerator: ModuleType) -> None:
    running = engine(meter_memory=False)
    if Precision.FP16 not in running.space.precisions:
        pytest.skip("the processor behind the fake device has no fast fp16")
    names = [unit.name for unit in running.space.units]
    running.apply(running.space.baseline().changed(precision=dict.fromkeys(names, Precision.FP16)))
    window = running.run(20)
    assert window.loss_scale is not None
    assert window.failure is None

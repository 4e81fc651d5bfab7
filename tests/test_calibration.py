"""Tests of this machine's measured rates, and of what is estimated from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_job
import torch
import torch.nn.functional as F
from torch import nn

from autotune import Job
from autotune.cli.main import run
from autotune.cost_model import machine_file
from autotune.cost_model.device_table import DeviceSpec
from autotune.cost_model.measured_rates import OTHER, PRODUCT, Curve, MeasuredRates, Work
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import InputError
from autotune.mechanics.precision import useful_precisions
from autotune.plan import Precision, Storage
from autotune.profiling import calibration
from autotune.profiling.calibration_check import check, errors
from autotune.profiling.estimator import estimate

SIZES = ["--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "256", "--seq", "128"]
ALIKE = {PRODUCT: "aten.mm", OTHER: "aten.add"}


def rates(*, call_s: float = 0.0, factor: float = 1.0, recompute_s: float = 0.0) -> MeasuredRates:
    """Return rates of two operators: products of 10 and 1,000 operations per byte, and sums of 100 and 10,000 bytes."""
    return MeasuredRates(
        curves={
            "aten.mm": {"float32": Curve((10.0, 1000.0), (1e9 * factor, 1e11 * factor))},
            "aten.add": {"float32": Curve((100.0, 10_000.0), (1e8 * factor, 1e10 * factor))},
        },
        alike=ALIKE,
        call_s=call_s,
        recompute_s=recompute_s,
    )


def work(operator: str, operations: float, moved_bytes: float, dtype: str = "float32") -> Work:
    return Work(operator, operations, moved_bytes, dtype)


@pytest.fixture(scope="module")
def machine() -> DeviceSpec:
    """Return this machine, measured by four of the networks, one of each kind."""
    chosen = [calibration.WORKLOADS[place] for place in (1, 4, -8, -2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "WORKLOADS", chosen)
        return calibration.calibrated(torch.device("cpu"))


@pytest.fixture
def saved(machine: DeviceSpec, tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine_file.to_json(machine, threads=2, torch_version="2")))
    return path


def test_rates_are_those_measured_and_lie_between_them_otherwise() -> None:
    curve = Curve((10.0, 1000.0), (1e9, 1e11))
    assert [curve.rate(size) for size in (1.0, 10.0, 1000.0, 1e6)] == pytest.approx([1e9, 1e9, 1e11, 1e11])
    assert curve.rate(100.0) == pytest.approx(1e10)


def test_products_take_their_operations_and_all_else_its_bytes() -> None:
    found = rates(call_s=1.0)
    # 100 operations per byte, halfway between the measured products.
    assert found.seconds(work("aten.mm", 1e10, 1e8), "matrix products") == pytest.approx(1e10 / 1e10 + 1.0)
    assert found.seconds(work("aten.add", 0.0, 100.0), "other") == pytest.approx(100 / 1e8 + 1.0)
    assert found.seconds(work("aten.view", 0.0, 0.0), "other") == 1.0


def test_operators_that_were_not_measured_count_as_like_ones() -> None:
    found = rates()
    known = found.seconds(work("aten.mm", 1e10, 1e9), "matrix products")
    assert found.seconds(work("aten.baddbmm", 1e10, 1e9), "matrix products") == known
    assert found.seconds(work("aten.mm", 1e10, 1e9, "bfloat16"), "matrix products") == known
    assert found.seconds(work("mine.scan", 0.0, 500.0), "mine") == found.seconds(work("aten.add", 0.0, 500.0), "other")


def test_attention_takes_the_rate_of_the_nearest_size_of_heads() -> None:
    curves = {f"aten.attention/{size}": {"float32": Curve((1.0,), (float(size),))} for size in (16, 64)}
    found = replace(rates(), curves={**rates().curves, **curves})
    for size, nearest in ((8, 16), (24, 16), (48, 64), (256, 64)):
        assert found.seconds(work(f"aten.attention/{size}", 64.0, 64.0), "attention") == 64 / nearest


def test_large_tensors_do_not_take_the_rate_of_small_ones() -> None:
    small = {"aten.stack": {"float32": Curve((100.0,), (1e6,))}}
    found = replace(rates(), curves={**rates().curves, **small})
    assert found.seconds(work("aten.stack", 0.0, 100.0), "other") == pytest.approx(100 / 1e6)
    assert found.seconds(work("aten.stack", 0.0, 10_000.0), "other") == pytest.approx(10_000 / 1e10)


def test_file_holds_all_that_was_measured(machine: DeviceSpec, saved: Path) -> None:
    found = machine_file.load(saved)
    assert replace(found, source=machine.source) == machine
    assert "2 thread(s)" in found.source


@pytest.mark.parametrize(
    "change",
    [
        {"calibration": 2},
        {"rates": []},
        {"rates": {"call_s": 0.0, "recompute_s": 0.0, "alike": {}, "curves": {}}},
        {"flops": {"fp64": 1.0}},
        {"flops": {}},
        {"bandwidth": "fast"},
        {"memory_bytes": float("inf")},
        {"threads": None},
        {"threads": 0},
        {"threads": True},
        {"calibration": True},
        {"calibration": 1.0},
        {"is_cpu": "yes"},
        {"block_bytes": 0},
        {"block_bytes": 10**80},
        {"memory_bytes": 1.5},
        {"memory_bytes": 0},
        {"context_bytes": 2**59},
        {"flops": {"fp32": True}},
        {"flops": {"fp32": 1e12, "inherit": 1e12}},
        {"device": "\x1b]0;title\x07"},
        {"device": "a" * 1000},
        {"device": {"name": 1}},
        {"seconds": 3.0},
    ],
)
def test_other_files_are_refused_in_one_sentence(saved: Path, change: dict[str, Any]) -> None:
    document = json.loads(saved.read_text())
    saved.write_text(json.dumps({**document, **change}))
    with pytest.raises(InputError, match=r"machine\.json") as refused:
        machine_file.load(saved)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "curve", [[[1.0], []], [[], []], [[2.0, 1.0], [1.0, 1.0]], [[1.0], [0.0]], [[1.0], [-1.0]], "x", [1.0, 2.0]]
)
def test_curves_must_ascend_with_positive_rates(saved: Path, curve: Any) -> None:
    refused_with_rates(saved, lambda rates: rates["curves"]["aten.mm"].update(float32=curve))


def refused_with_rates(saved: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(saved.read_text())
    change(document["rates"])
    saved.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"machine\.json"):
        machine_file.load(saved)


@pytest.mark.parametrize("head", ["", "x", "0", "-32", "1e400", "9" * 5000, "9" * 9, "\u0663"])
def test_heads_of_attention_have_a_size(saved: Path, head: str) -> None:
    curve = {"float32": [[1.0], [1e9]]}
    refused_with_rates(saved, lambda rates: rates["curves"].update({f"aten.attention/{head}": curve}))


@pytest.mark.parametrize(
    "change",
    [
        lambda rates: rates["curves"].update({"aten.mul": {}}),
        lambda rates: rates.update(call_s=1e308),
        lambda rates: rates.update(recompute_s=-1.0),
        lambda rates: rates["alike"].update(other="aten.unknown"),
        lambda rates: rates["alike"].pop("product"),
    ],
)
def test_rates_are_complete_and_finite(saved: Path, change: Callable[[dict[str, Any]], object]) -> None:
    refused_with_rates(saved, change)


def test_estimated_step_takes_half_the_time_on_a_machine_twice_as_fast(machine: DeviceSpec) -> None:
    slow, fast = (
        estimate(tiny_job.one_k(), replace(machine, measured=rates(call_s=0.0, factor=factor))) for factor in (1, 2)
    )
    plan = slow.space.baseline()
    assert seconds_per_step(slow, plan) == pytest.approx(2 * seconds_per_step(fast, plan))
    assert peak_bytes(slow, plan) == peak_bytes(fast, plan)


def test_each_recomputed_unit_takes_its_own_time_besides_its_operators(machine: DeviceSpec) -> None:
    seconds = []
    for recompute_s in (0.0, 1.0):
        profile = estimate(tiny_job.one_k(), replace(machine, measured=rates(recompute_s=recompute_s)))
        plan = profile.space.baseline().changed(storage={"blocks.1": Storage.RECOMPUTE})
        seconds.append(seconds_per_step(profile, plan))
    assert seconds[1] - seconds[0] == pytest.approx(1.0)


def test_steps_of_a_job_that_was_not_measured_are_estimated(machine: DeviceSpec) -> None:
    rows = check([tiny_job.few_k()], machine)
    formats = {str(one) for one in useful_precisions("cpu")[1:]}
    assert {row["plan"] for row in rows} >= {"baseline", "all recomputed", *formats}
    for row in rows:
        assert row["failure"] is None
        assert row["predicted_peak_bytes"] == pytest.approx(row["measured_peak_bytes"], rel=0.1)
    seconds = {row["plan"]: row["predicted_s"] for row in rows}
    assert seconds["all recomputed"] > seconds["baseline"] > 0


class Attention(nn.Module):
    """A block with dropout of attention weights, for which a CPU has no fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.mixed(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1 if self.training else 0.0)
        return x + attended.transpose(1, 2).flatten(2)


def test_attention_with_dropout_is_estimated_as_a_cpu_computes_it(machine: DeviceSpec) -> None:
    def batches(seed: int) -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(8, 128, 32)

    job = Job(
        name="attention",
        model=lambda: nn.Sequential(Attention(), Attention()),
        batches=batches,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        evaluate=lambda _model: 0.0,
        batch_size=8,
        accumulation_choices=(1,),
    )
    for row in check([job], machine):
        assert row["predicted_peak_bytes"] == pytest.approx(row["measured_peak_bytes"], rel=0.05)


def test_a_job_that_cannot_be_checked_does_not_lose_the_others(machine: DeviceSpec) -> None:
    def fails(_model: torch.nn.Module, _batch: Any) -> torch.Tensor:
        raise ValueError("no loss")

    rows = check([tiny_job.make(loss=fails), tiny_job.one_k()], machine)
    assert "no loss" in rows[0]["failure"]
    assert [row["failure"] for row in rows[1:]] == [None] * (len(rows) - 1)
    assert errors(rows).keys() == {"times", "peaks"}
    assert errors(rows[:1]) == {}


def test_errors_are_relative_to_what_was_measured() -> None:
    rows = [
        {
            "failure": None,
            "predicted_s": predicted,
            "measured_s": 2.0,
            "predicted_peak_bytes": 1,
            "measured_peak_bytes": 1,
        }
        for predicted in (1.0, 2.2, 3.0)
    ]
    assert errors(rows)["times"] == {"median": 0.5, "largest": 0.5}
    assert errors(rows)["peaks"] == {"median": 0.0, "largest": 0.0}


def test_rates_cover_each_format_and_kind_of_network(machine: DeviceSpec) -> None:
    assert machine.measured is not None
    assert machine.measured.recompute_s > 0
    assert machine.is_cpu
    for name in ("aten.mm", "aten.convolution_backward", "aten.gelu", "aten.native_layer_norm", "aten.addcdiv_"):
        assert machine.measured.curves[name]
    assert set(machine.measured.curves["aten.mm"]) >= {one.dtype for one in useful_precisions("cpu")}
    assert Precision.FP32 in machine.flops


def test_plan_of_a_calibrated_machine(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = f"{tiny_job.__file__}:one_k"
    assert run(["plan", job, "--device", str(saved), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["estimated"]
    assert document["predicted"]["seconds_per_step"] > 0
    assert run(["plan", job, "--device", str(saved)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Rates from autotune calibrate, with 2 thread(s)" in shown
    assert "driver's context" not in shown
    assert run(["plan", "--device", str(saved), "--devices", "8", *SIZES]) == 2
    assert "describes one device" in capsys.readouterr().err


def test_calibrate_writes_a_machine_and_checks_jobs(
    machine: DeviceSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "calibrated", lambda _device, on_progress: machine)
    path, job = tmp_path / "here.json", f"{tiny_job.__file__}:one_k"
    assert run(["calibrate", "--output", str(path), "--check", job]) == 0
    shown = capsys.readouterr().out
    assert "Errors of times" in shown
    assert "Errors of peaks" in shown
    assert machine_file.load(path).name == machine.name
    assert run(["calibrate", "--output", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["checked"] == []
    assert document["calibration"] == 1
    assert run(["calibrate", "--output", str(path), "--check", "no_such_job"]) == 2

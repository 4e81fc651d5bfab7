"""Tests of this machine's measured rates, and of what is estimated from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
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
from autotune.cost_model.measured_rates import OTHER, PRODUCT, MeasuredRates, Sample, Work
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import InputError, JobError
from autotune.mechanics.precision import useful_precisions
from autotune.plan import Precision, Storage
from autotune.profiling import calibration
from autotune.profiling.calibration_check import check, errors
from autotune.profiling.estimator import estimate
from autotune.profiling.operator_times import timed_calls

SIZES = ["--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "256", "--seq", "128"]
# Seconds of each kind of convolution.
KINDS = {"2d": 1.0, "grouped": 2.0, "3d": 3.0}
ALIKE = {PRODUCT: "aten.mm", OTHER: "aten.add"}


def rates(*, call_s: float = 0.0, factor: float = 1.0, recompute_s: float = 0.0) -> MeasuredRates:
    """Return times of a thin and a thick product, and of a small and a large sum."""
    calls = {
        "aten.mm": [(1e6, 1e6, 1e-3), (1e9, 1e6, 1e-2)],
        "aten.add": [(0.0, 1e2, 1e-6), (0.0, 1e4, 2e-6), (0.0, 1e6, 1e-4)],
    }
    return MeasuredRates(
        samples={
            name: {"float32": tuple(Sample(done, moved, seconds / factor) for done, moved, seconds in known)}
            for name, known in calls.items()
        },
        alike=ALIKE,
        call_s=call_s,
        recompute_s=recompute_s,
    )


def work(operator: str, operations: float, moved_bytes: float, dtype: str = "float32") -> Work:
    return Work(operator, operations, moved_bytes, dtype)


@pytest.fixture(scope="module")
def machine() -> DeviceSpec:
    """Return this machine, measured by four of the networks: small ones of different kinds."""
    kinds = (calibration._Perceptron, calibration._Transformer, calibration._Convolutions, calibration._Recurrent)
    chosen = [next(one for one in calibration.WORKLOADS if isinstance(one.make(), kind)) for kind in kinds]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "WORKLOADS", chosen)
        return calibration.calibrated(torch.device("cpu"))


@pytest.fixture
def saved(machine: DeviceSpec, tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine_file.to_json(machine, threads=2, torch_version="2")))
    return path


def test_measured_calls_take_their_time() -> None:
    found = rates(call_s=1.0)
    for operations, moved, seconds in ((1e6, 1e6, 1e-3), (1e9, 1e6, 1e-2)):
        assert found.seconds(work("aten.mm", operations, moved), "") == pytest.approx(seconds + 1.0, rel=0.02)
    for moved, seconds in ((1e2, 1e-6), (1e4, 2e-6), (1e6, 1e-4)):
        assert found.seconds(work("aten.add", 0.0, moved), "") - 1.0 == pytest.approx(seconds, rel=0.02)
    assert found.seconds(work("aten.view", 0.0, 0.0), "") == 1.0


def test_times_between_and_beyond_measured_calls_follow_what_is_computed_and_moved() -> None:
    found = rates()
    between = found.seconds(work("aten.mm", 1e8, 1e6), "")
    assert found.seconds(work("aten.mm", 1e6, 1e6), "") < between < found.seconds(work("aten.mm", 1e9, 1e6), "")
    # Ten thousand times as large: the rate of the largest; a thousand times smaller: the time of a call.
    assert found.seconds(work("aten.add", 0.0, 1e10), "") == pytest.approx(1.0, rel=0.6)
    assert 1e-7 < found.seconds(work("aten.add", 0.0, 1.0), "") < 2e-6


def test_operators_that_were_not_measured_count_as_like_ones() -> None:
    found = rates()
    known = found.seconds(work("aten.mm", 1e10, 1e9), "matrix products")
    assert found.seconds(work("aten.baddbmm", 1e10, 1e9), "matrix products") == known
    assert found.seconds(work("aten.mm", 1e10, 1e9, "bfloat16"), "matrix products") == known
    assert found.seconds(work("mine.scan", 0.0, 500.0), "mine") == found.seconds(work("aten.add", 0.0, 500.0), "other")


def test_attention_takes_the_times_of_the_nearest_size_of_heads() -> None:
    known = {f"aten.attention/{size}": {"float32": (Sample(1e6, 1e3, 1 / size),)} for size in (16, 64)}
    found = replace(rates(), samples={**rates().samples, **known})
    for size, nearest in ((8, 16), (24, 16), (48, 64), (256, 64)):
        assert found.seconds(work(f"aten.attention/{size}", 1e6, 1e3), "attention") == pytest.approx(1 / nearest)


def test_convolutions_take_the_times_of_their_kind() -> None:
    known = {f"aten.convolution/{kind}": {"float32": (Sample(1e6, 1e3, seconds),)} for kind, seconds in KINDS.items()}
    found = replace(rates(), samples={**rates().samples, **known})
    layers = {"2d": nn.Conv2d(4, 4, 3), "grouped": nn.Conv2d(4, 4, 3, groups=4), "3d": nn.Conv3d(4, 4, 3)}
    for kind, layer in layers.items():
        images = torch.randn(1, 4, *[4] * (layer.weight.dim() - 2))
        convolved = next(one for one in works_of(lambda layer=layer, images=images: layer(images)) if one.operations)
        assert found.seconds(replace(convolved, operations=1e6, moved_bytes=1e3), "") == pytest.approx(KINDS[kind])


def test_large_tensors_do_not_take_the_rate_of_small_ones() -> None:
    small = {"aten.stack": {"float32": (Sample(0.0, 100.0, 2e-6),)}}
    found = replace(rates(), samples={**rates().samples, **small})
    assert found.seconds(work("aten.stack", 0.0, 100.0), "other") == pytest.approx(2e-6)
    assert found.seconds(work("aten.stack", 0.0, 1e6), "other") < 1e6 / 100 * 2e-6 / 10


def test_recurrent_layer_counts_the_products_of_all_steps() -> None:
    layer, rows = nn.LSTM(8, 16), torch.randn(5, 3, 8)
    forward, backward = (
        one for one in works_of(lambda: layer(rows)[0].sum().backward()) if "rnn_layer" in one.operator
    )
    assert forward.operations == 2 * 5 * 3 * 4 * 16 * (8 + 16)
    assert backward.operations == 2 * forward.operations


def works_of(run: Callable[[], object]) -> list[Work]:
    """Return the work of the operators that a function calls."""
    return [call.work for call in timed_calls(torch.device("cpu"), run)]


def test_file_holds_all_that_was_measured(machine: DeviceSpec, saved: Path) -> None:
    found = machine_file.load(saved)
    assert replace(found, source=machine.source) == machine
    assert "2 thread(s)" in found.source


@pytest.mark.parametrize(
    "change",
    [
        {"calibration": 1},
        {"rates": []},
        {"rates": {"call_s": 0.0, "recompute_s": 0.0, "alike": {}, "samples": {}}},
        {"flops": {"fp64": 1.0}},
        {"flops": {}},
        {"bandwidth": "fast"},
        {"memory_bytes": float("inf")},
        {"threads": None},
        {"threads": 0},
        {"threads": True},
        {"calibration": True},
        {"calibration": 2.0},
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
    "known", [[], [[1.0, 1.0]], [[1.0, 1.0, 0.0]], [[1.0, 1.0, -1.0]], [[-1.0, 1.0, 1.0]], "x", [[1.0, True, 1.0]]]
)
def test_samples_have_positive_times(saved: Path, known: Any) -> None:
    refused_with_rates(saved, lambda rates: rates["samples"]["aten.mm"].update(float32=known))


def refused_with_rates(saved: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(saved.read_text())
    change(document["rates"])
    saved.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"machine\.json"):
        machine_file.load(saved)


@pytest.mark.parametrize(
    "head", ["", "x", "0", "-32", "1e400", "9" * 5000, "9" * 9, "000000001" + "9" * 5000, "\u0663"]
)
def test_heads_of_attention_have_a_size(saved: Path, head: str) -> None:
    known = {"float32": [[1.0, 1.0, 1.0]]}
    refused_with_rates(saved, lambda rates: rates["samples"].update({f"aten.attention/{head}": known}))


@pytest.mark.parametrize(
    "change",
    [
        lambda rates: rates["samples"].update({"aten.mul": {}}),
        lambda rates: rates["samples"].update({"aten.add": {"float32": [[0.0, 0.0, 1.0]]}}),
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


def recurrent(width: int, *, bidirectional: bool) -> Job:
    def batches(seed: int) -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(16, 24, width)

    return Job(
        name="recurrent",
        model=lambda: nn.Sequential(*[nn.LSTM(width, width, batch_first=True, bidirectional=bidirectional)]),
        batches=batches,
        loss=lambda model, batch: model(batch)[0].square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        evaluate=lambda _model: 0.0,
        batch_size=16,
        accumulation_choices=(1,),
    )


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("width", [64, 160])
def test_memory_that_recurrent_layers_keep_on_a_cpu_is_estimated(
    machine: DeviceSpec, width: int, bidirectional: bool
) -> None:
    """Torch's fake layer keeps nothing for its backward pass; the estimate was half of the true peak."""
    # Some CPUs have no kernel for 16-bit LSTMs.
    rows = [
        row for row in check([recurrent(width, bidirectional=bidirectional)], machine) if row["measured_peak_bytes"]
    ]
    assert rows
    for row in rows:
        # oneDNN keeps up to a seventh more on some processors.
        assert row["predicted_peak_bytes"] == pytest.approx(row["measured_peak_bytes"], rel=0.2)


class Sparse(nn.Module):
    """A table whose gradient is sparse, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(5_000, 16, sparse=True), nn.Linear(16, 16)

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(keys))


def sparse(optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> Job:
    def batches(seed: int) -> Iterator[torch.Tensor]:
        while True:
            yield torch.arange(16).view(2, 8)

    return Job(
        name="sparse",
        model=lambda: nn.Sequential(Sparse(), nn.Linear(16, 1)),
        batches=batches,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=optimizer,
        evaluate=lambda _model: 0.0,
        batch_size=2,
        accumulation_choices=(1,),
    )


def test_sparse_gradients_are_estimated_by_their_parts(machine: DeviceSpec) -> None:
    for row in check([sparse(lambda parameters: torch.optim.SGD(parameters, 0.1))], machine):
        assert row["failure"] is None
        assert row["predicted_peak_bytes"] == pytest.approx(row["measured_peak_bytes"], rel=0.05)


def test_optimizer_that_cannot_make_an_update_is_refused_in_one_sentence(machine: DeviceSpec) -> None:
    with pytest.raises(JobError, match=r"optimizer\.step raised TypeError"):
        estimate(sparse(lambda parameters: torch.optim.LBFGS(parameters)), machine)


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
    for name in ("aten.mm", "aten.convolution_backward/2d", "aten.gelu", "aten.native_layer_norm", "aten.addcdiv_"):
        assert machine.measured.samples[name]
    assert set(machine.measured.samples["aten.mm"]) >= {one.dtype for one in useful_precisions("cpu")}
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
    assert document["calibration"] == 2
    assert run(["calibrate", "--output", str(path), "--check", "no_such_job"]) == 2

"""Tests of operators' times: what is counted is what a real step computes, and errors are split by kind and bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_job
import torch

from autotune.cli.main import run
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.mechanics.flops import step_flops
from autotune.plan import Precision
from autotune.profiling.operator_kinds import OTHER, UPDATE, kind_of
from autotune.profiling.operator_times import COMPUTE, MEMORY, Rates, operator_times

# One operation and one byte take a second each, so predicted seconds are operations or bytes.
UNIT = Rates(operations={Precision.FP32: 1.0}, bandwidth=1.0)


@pytest.fixture
def engine() -> TorchEngine:
    engine = TorchEngine(tiny_job.job(), options=EngineOptions(statistics_every=None, meter_memory=False))
    engine.run(1)
    return engine


def test_predicted_products_are_the_operations_of_the_real_step(engine: TorchEngine) -> None:
    cells = operator_times(engine, UNIT, steps=1)
    products = [cell for cell in cells if (cell.kind, cell.bound) == ("matrix products", COMPUTE)]
    batch = next(tiny_job.batches(0))
    assert sum(cell.predicted_s for cell in products) == step_flops(engine.model, tiny_job.mean_loss, batch)
    assert all(cell.measured_s > 0 for cell in cells)


def test_update_is_a_kind_of_its_own_and_reads_and_writes_every_weight(engine: TorchEngine) -> None:
    (update,) = [cell for cell in operator_times(engine, UNIT) if cell.kind == UPDATE]
    weights = sum(weight.numel() * weight.element_size() for weight in engine.model.parameters())
    assert update.bound == MEMORY
    assert update.predicted_s > 2 * weights


def test_recomputation_repeats_the_forward_products(engine: TorchEngine) -> None:
    space = engine.space

    def products() -> float:
        cells = operator_times(engine, UNIT, steps=1)
        return sum(cell.calls for cell in cells if cell.kind == "matrix products")

    saved = products()
    engine.apply(space.plan(accumulation_steps=1, precision=Precision.FP32, recomputed=space.recomputable))
    engine.run(1)
    # Each block has two products in its forward pass.
    assert products() == saved + 2 * len(space.recomputable)


def test_the_bound_follows_from_the_balance_of_the_machine(engine: TorchEngine) -> None:
    fast_memory = Rates(operations={Precision.FP32: 1.0}, bandwidth=1e9)
    fast_products = Rates(operations={Precision.FP32: 1e12}, bandwidth=1.0)
    bounds = [
        {cell.bound for cell in operator_times(engine, rates, steps=1) if cell.kind == "matrix products"}
        for rates in (fast_memory, fast_products)
    ]
    assert bounds == [{COMPUTE}, {MEMORY}]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten.addmm", "matrix products"),
        ("aten.convolution_backward", "convolutions"),
        ("aten._scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten.native_layer_norm_backward", "normalisation and softmax"),
        ("aten.embedding_dense_backward", "embedding and indexing"),
        ("aten._to_copy", "copies and conversions"),
        ("aten.mul", OTHER),
        ("aten.linalg_vector_norm", OTHER),
    ],
)
def test_kinds_of_operators(name: str, kind: str) -> None:
    packet = getattr(torch.ops.aten, name.removeprefix("aten."))
    assert str(packet) == name
    assert kind_of(name) == kind


def test_benchmark_splits_errors_of_real_runs_by_kind_and_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.mechanics.flops._SIDES", (128,))
    monkeypatch.setattr("autotune.profiling.operator_times._COPIED_BYTES", 2**20)
    job = f"{Path(tiny_job.__file__)}:few_k"
    assert run(["bench", "operations", "--jobs", job, "--runs", "4", "--runs-dir", str(tmp_path)]) == 0
    document = json.loads(next(tmp_path.glob("benchmarks/*/operations.json")).read_text())
    assert (document["asked"], len(document["runs"]), document["failed"]) == (4, 4, 0)
    for part in ("kinds", "bounds"):
        assert sum(one["time_frac"] for one in document[part].values()) == pytest.approx(1)
    assert {"matrix products", UPDATE} <= set(document["kinds"])
    one = document["runs"][0]
    assert sum(cell["measured_s"] for cell in one["operators"] if cell["kind"] == "matrix products") > 0
    errors = [abs(seen["predicted_s"] / seen["seconds_per_step"] - 1) for seen in document["runs"]]
    assert min(errors) <= document["step"]["all"]["error_median"] <= max(errors)
    assert sum(document["step"][bound]["runs"] for bound in document["bounds"]) >= 4

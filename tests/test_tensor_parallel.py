"""Tests of ranks that share layers: updates equal those of one process, and what cannot be divided is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_laws import (
    assert_adapts_as_torch,
    assert_equals_torch,
    assert_mixes_precisions,
    assert_storage_is_exact,
    assert_troubles_are_shared,
    run_ranks,
)
from ranks import fork_ranks
from small_jobs import gpt_job

from autotune.cli.main import run
from autotune.errors import JobError

TESTS = Path(__file__).parent
REFUSALS = {
    "unplanned": "the job has no plan of tensor parallelism",
    "unknown": "the style of blocks.*.up is 'columns' (allowed: colwise, rowwise",
    "nameless": "layers.*.up names no layer of the model",
    "uneven": "embedding has 13 entries, which tp=2 does not divide",
    "fused": "the model cannot be divided like this: its loss",
    "dropping": "the model cannot be divided like this",
    "normed": "the model cannot be divided like this: the gradient of blocks.0.scale is another one divided than whole",
    "apart": "embedding.weight and head.weight are one parameter, and are not divided alike",
    "statistics": "over_batch normalizes over a batch, which ranks that share samples would count several times",
    "gated": "the gradient of blocks.0.scale is another one divided than whole",
    "remembering": "buffer blocks.1.seen has other values divided than whole",
    "judged": "its loss in evaluation mode is ",
    "penalised": "its loss is ",
    "rooted": "tp_plan of the model is 'colwise' (allowed: styles by name of layers)",
    "weighed": "the model cannot be divided like this: ",
    "undividing": "the plan of tensor parallelism divides no layer",
    "raising_plan": "tp_plan of the model raises ValueError: no plan here",
    "infinite": "division cannot be tried: the loss of the first micro-batch is inf",
    "several": "the optimizer's foreach updates several parameters at once, of which some are divided",
}


def assert_laws(found: list[dict[str, Any]], steps: int) -> None:
    assert_equals_torch(found, steps, apart=3e-7)
    assert_storage_is_exact(found)
    assert_troubles_are_shared(found)
    assert_mixes_precisions(found)
    assert_adapts_as_torch(found, apart=3e-7)


LAWS = "equals_torch,storage_is_exact,troubles,mixed_precision,adaptive_equals_torch"


def test_ranks_that_share_layers_make_the_updates_of_one_process_under_random_plans(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, "equals_torch,storage_is_exact", "tp=2", 8)
    assert_equals_torch(found, 8, apart=3e-7)
    assert_storage_is_exact(found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mesh", "ranks", "steps"), [("tp=2", 2, 20), ("shard=2,tp=2", 4, 12), ("dp=2,tp=2", 4, 12)])
def test_ranks_that_share_layers_fulfil_all_laws_of_ranks(mesh: str, ranks: int, steps: int, tmp_path: Path) -> None:
    assert_laws(run_ranks(tmp_path, LAWS, mesh, steps, ranks=ranks), steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weights_are_those_of_one_process_after_200_steps(tmp_path: Path) -> None:
    assert_equals_torch(run_ranks(tmp_path, "equals_torch", "tp=2", 200), 200, apart=3e-7)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mesh", "ranks"), [("tp=2", 2), ("shard=2,tp=2", 4)])
def test_a_run_moves_between_meshes_with_and_without_shared_layers(mesh: str, ranks: int, tmp_path: Path) -> None:
    steps = 64 if ranks == 2 else 32
    for found in run_ranks(tmp_path, "equals_torch_on_all_meshes", mesh, steps, ranks=ranks):
        one = found["equals_torch_on_all_meshes"]
        assert one["apart"] <= 3e-7
        assert one["meshes"] >= (2 if ranks == 2 else 4)
        assert one["failures"] == 0


@pytest.mark.parametrize(
    "names", ["tied,qwen,tempered", pytest.param("llama,frozen,partly,descending,narrow,cast", marks=pytest.mark.slow)]
)
def test_what_cannot_be_divided_is_refused_and_odd_models_are_trained_exactly(names: str, tmp_path: Path) -> None:
    fork_ranks("divided_rank.py", tmp_path, "tp=2", names)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for name, words in REFUSALS.items():
            assert words in found["refusals"][name], (name, found["refusals"][name])
            assert "\n" not in found["refusals"][name]
            assert len(found["refusals"][name]) < 600
        assert "ranks that share layers have different losses, or gradients" in found["late"]
        exact = found["exactness"]
        for name in names.split(","):
            assert exact[f"{name} begins"] == 0
            ours, plain = found["variances"][name]
            assert ours == pytest.approx(plain, rel=5e-2 if name == "cast" else 1e-4)
            assert exact[name] <= (1e-2 if name == "cast" else 3e-7), (name, exact[name])
            assert exact[f"{name} apart"] == 0
            assert exact[f"{name} divided"] >= 4


@pytest.mark.parametrize("plan", [{"blocks.0": 1}, {1: "colwise"}, "blocks", ["blocks.0"]])
def test_job_whose_plan_of_tensor_parallelism_is_none_is_refused(plan: Any) -> None:
    with pytest.raises(JobError, match=r"tensor_parallel is .* styles by name of layers, or None"):
        gpt_job(tensor_parallel=plan)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_that_share_layers_are_tuned_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = ["--engine", "fsdp2", "--mesh", "tp=2", "--runs-dir", str(tmp_path), "--report-to", "none", "--json"]
    job = f"{TESTS / 'rank_jobs.py'}:shared"
    assert run(["tune", job, "--method", "exact", "--memory-budget", "80%", *ranks]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["launch"]["mesh"] == "tp=2"
    measured = document["measured"]
    assert measured["peak_bytes"] <= measured["memory_budget_bytes"]
    assert document["predicted"]["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.03)
    # What layers exchange is seen.
    assert measured["parts"]["communication_s"] > 0

"""Tests of the benchmark against published runs: rows are read, and estimates are close where they claim to be."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from autotune.bench.bench_published import bench_published, kendall_tau, lines
from autotune.bench.published_fit import fit_constants
from autotune.bench.published_peers import best_mfu, six_nd_seconds
from autotune.bench.published_rows import read_published
from autotune.cli.main import run
from autotune.cost_model.cluster.constants import Constants, fitted, meanings
from autotune.errors import InputError
from autotune.records.run_directory import benchmark_folder

ROOT = Path(__file__).parent.parent
FSDP = (
    "section,model,params,seq_len,gpus,gpu,micro_batch,grad_accum,global_batch,tokens_per_s_per_gpu,mfu_percent,"
    "precision,mp_mode,sharding,activation_checkpointing,activation_cpu_offload\n"
)
GOOD = "H100,7b,,2048,8,h100_80gb,4,2,64,10000,40,amp_bf16,DEFAULT,FULL_SHARD,False,False\n"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return bench_published(left_out=False)


def test_the_packages_rows_are_all_read() -> None:
    found = read_published()
    assert found.skipped == ()
    assert {
        kind: sum(row.kind == kind for row in found.rows) for kind in ("llm_foundry", "bigscience", "torchtitan")
    } == {
        "llm_foundry": 84,
        "bigscience": 33,
        "torchtitan": 6,
    }
    for row in found.rows:
        if row.kind == "bigscience":
            assert row.model.parameters == pytest.approx(float(row.model_name[4:-1]) * 1e9, rel=0.03)
            assert row.model.layers % row.layout.pp == 0


def test_estimates_are_close_to_the_runs_that_they_were_fitted_to(document: dict[str, Any]) -> None:
    assert document["peak_error_median"] <= 0.07
    assert document["peak_error_p90"] <= 0.15
    assert document["throughput_error_median"] <= 0.12
    assert document["throughput_error_p90"] <= 0.25
    assert document["wrongly_refused"] <= 0.02 * document["rows_count"]
    assert document["order"]["throughput"]["kendall_tau_mean"] >= 0.6
    assert document["order"]["peak"]["kendall_tau_min"] >= 0.6


def test_estimates_are_closer_than_those_of_other_rules(document: dict[str, Any]) -> None:
    own = document["peers"]["autotune plan"]
    for name, one in document["peers"].items():
        for key in ("throughput_error_median", "throughput_error_p90", "peak_error_median", "peak_error_p90"):
            if name != "autotune plan" and one[key] is not None:
                assert own[key] < 0.5 * one[key], (name, key)


def test_a_row_tells_what_was_predicted_and_measured(document: dict[str, Any]) -> None:
    assert len(document["rows"]) == document["rows_count"] == 123
    row = next(row for row in document["rows"] if row["source"] == "torchtitan")
    assert row["measured"]["tokens_per_s_per_device"] == pytest.approx(6667)
    assert row["measured"]["peak_bytes"] == pytest.approx(77.0 * 2**30)
    ratio = row["predicted"]["tokens_per_s_per_device"] / row["measured"]["tokens_per_s_per_device"]
    assert row["throughput_error"] == pytest.approx(ratio - 1)
    assert row["fits"] is True
    assert sum(one["rows"] for one in document["by"]["source"].values()) == 123


def test_the_shipped_constants_are_the_fit_to_the_shipped_rows() -> None:
    spec = importlib.util.spec_from_file_location("fit", ROOT / ".github" / "fit_cluster_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shipped = json.loads(module.FILE.read_text())
    again = module.document()
    assert again["constants"] == pytest.approx(shipped["constants"], rel=2e-3)
    assert again["fitted_to"] == shipped["fitted_to"]


def test_without_rows_the_constants_are_their_priors() -> None:
    assert fit_constants([]) == Constants()


def test_constants_that_the_rows_say_nothing_about_stay_at_their_priors() -> None:
    rows = [row for row in read_published().rows if row.kind == "llm_foundry"][::6]
    found = fit_constants(rows)
    for name in ("float8_gain", "fused_traffic", "logit_bytes", "context_bytes"):
        assert getattr(found, name) == pytest.approx(meanings()[name].prior, rel=1e-3), name
    assert found.gemm_share != pytest.approx(meanings()["gemm_share"].prior, rel=1e-3)


def test_a_left_out_source_is_predicted_by_constants_fitted_without_it(tmp_path: Path) -> None:
    (tmp_path / "titan.csv").write_text((ROOT / "autotune/bench/published/torchtitan.csv").read_text())
    found = bench_published(tmp_path)
    assert found["left_out"]["source"]["groups"]["torchtitan"]["rows"] == 6
    assert found["left_out"]["source"]["throughput_error_median"] != found["throughput_error_median"]
    assert found["left_out"]["source"]["peak_error_p90"] <= 0.15
    assert "each source left out of the fit" in "\n".join(lines(found))


def test_rows_with_gaps_unknown_devices_or_odd_columns_are_skipped_with_one_line_each(tmp_path: Path) -> None:
    bad = [
        GOOD.replace("h100_80gb", "abacus"),
        GOOD.replace(",10000,", ",,"),
        GOOD.replace("7b", "7x"),
        GOOD.replace(",10000,", ",fast,"),
        GOOD.replace(",8,h100", ",eight,h100"),
    ]
    (tmp_path / "other_name.csv").write_text("\ufeff" + FSDP + GOOD + "".join(bad) + "\n")
    (tmp_path / "more.csv").write_text(FSDP.replace("section", "extra,section") + "x," + GOOD)
    (tmp_path / "alien.csv").write_text("a,b\n1,2\n")
    found = read_published(tmp_path)
    assert len(found.rows) == 2
    assert {row.source for row in found.rows} == {"other_name", "more"}
    assert len(found.skipped) == len(bad) + 1
    assert all("\n" not in one for one in found.skipped)
    document = bench_published(tmp_path, left_out=False)
    assert document["rows_count"] == 2
    assert document["peak_error_median"] is None
    assert len(document["skipped"]) == len(bad) + 1


PIPELINES = "gpu,gpus,size,hidden,layers,heads,vocab,seq_len,zero_stage,dp,tp,pp,micro_batch,global_batch,"
PIPELINES += "peak_memory_gb,seconds_per_step\n"
PIPELINE = "a100_80gb,384,200B,14400,,,,2048,1,12,8,4,1,2040,47,189.06\n"
MESHES = "model,gpu,gpus,dp_shard,tp,pp,cp,seq_len,local_batch,global_batch,activation_checkpointing,compile,float8,"
MESHES += "async_tp,schedule,tokens_per_s_per_gpu,peak_memory_gib\n"
MESH = "llama3.1-405b,h100_96gb_500w,512,8,8,8,1,8192,32,256,full,1,1,1,1F1B,100,82.5\n"

ODD: dict[str, tuple[str, str, tuple[str, str], str]] = {
    "text as a stage": (PIPELINES, PIPELINE, (",1,12,", ",two,12,"), "zero_stage is 'two' (allowed: 0, 1, 2, 3)"),
    "size of two points": (PIPELINES, PIPELINE, ("200B", "9.9.9B"), "size is '9.9.9B' (allowed: billions"),
    "endless width": (PIPELINES, PIPELINE, ("14400", "1" + 14 * "0"), "hidden is '100000000000000' (allowed: a whole"),
    "more stages than layers": (PIPELINES, PIPELINE, (",14400,,", ",14400,3,"), "pp is 4 (allowed: at most 3 layers"),
    "other number of devices": (PIPELINES, PIPELINE, (",384,", ",385,"), "gpus is 385 (allowed: 384, as its mesh has)"),
    "heads that tp does not divide": (PIPELINES, PIPELINE, (",14400,,,", ",14400,,90,"), "tp is 8 (allowed: a divisor"),
    "batch that does not divide": (PIPELINES, PIPELINE, ("2040", "2041"), "global_batch is 2041 (allowed: 2040"),
    "no time": (PIPELINES, PIPELINE, ("189.06", "1e-300"), "seconds_per_step is '1e-300'"),
    "unknown checkpointing": (MESHES, MESH, (",full,", ",some,"), "activation_checkpointing is 'some' (allowed: none"),
    "unknown flag": (MESHES, MESH, (",1,1,1,1F1B", ",1,2,1,1F1B"), "float8 is '2' (allowed: 1, 1.0, true"),
    "unknown schedule": (MESHES, MESH, ("1F1B", "2F2B"), "schedule is '2f2b' (allowed: 1f1b"),
    "other batch": (MESHES, MESH, (",256,", ",257,"), "global_batch is 257 (allowed: 256"),
    "very many devices": (FSDP, GOOD, (",8,h100", ",800000000000000,h100"), "gpus is '800000000000000' (allowed: a"),
    "unknown reduction": (FSDP, GOOD, ("DEFAULT", "MIXED"), "mp_mode is 'mixed' (allowed: pure, default"),
    "unknown sharding": (
        FSDP,
        GOOD,
        ("FULL_SHARD", "HALF_SHARD"),
        "sharding is 'half_shard'; did you mean 'full_shard'",
    ),
    "contradictory batch": (FSDP, GOOD, (",64,10000", ",65,10000"), "global_batch is 65 (allowed: 64"),
    "no products of 8 bits": (MESHES, MESH, ("h100_96gb_500w", "a100"), "products are of 8 bits, which NVIDIA A100"),
    "unknown device": (FSDP, GOOD, ("h100_80gb", "abacus"), "gpu is 'abacus' (allowed: gb200"),
    "more cells than columns": (FSDP, GOOD, (",10000,", ",10000,7,"), "has more cells than columns"),
}


@pytest.mark.parametrize("case", ODD)
def test_rows_that_make_no_sense_are_skipped_with_what_would(case: str, tmp_path: Path) -> None:
    head, row, (old, new), message = ODD[case]
    assert old in row
    (tmp_path / "a.csv").write_text(head + row + row.replace(old, new))
    found = read_published(tmp_path)
    assert len(found.rows) == 1
    (line,) = found.skipped
    assert line.startswith(f"a.csv, line 3: {message}")


def test_the_vocabulary_of_a_row_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(PIPELINES + PIPELINE + PIPELINE.replace(",14400,,,,", ",14400,,,50304,"))
    (tmp_path / "b.csv").write_text(FSDP.replace("section", "vocab,section") + "50432," + GOOD)
    bloom, other, mpt = read_published(tmp_path).rows
    assert (bloom.model.vocab, other.model.vocab, mpt.model.vocab) == (250_880, 50_304, 50_432)
    assert other.model.layers >= bloom.model.layers


def test_steps_of_several_local_batches_and_given_virtual_stages_are_read(tmp_path: Path) -> None:
    row = MESH.replace(",256,full", ",512,full").replace("\n", ",8\n")
    (tmp_path / "a.csv").write_text(MESHES.replace("\n", ",virtual_stages\n") + row)
    (found,) = read_published(tmp_path).rows
    assert found.layout.global_batch == 512
    assert (found.layout.virtual_stages, found.layout.micro_batch, found.layout.micro_batches) == (8, 1, 64)


@pytest.mark.parametrize("cell", ["9" * 200_000, '"' + "9" * 200_000])
def test_a_damaged_file_is_one_line(cell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text(FSDP + GOOD + GOOD.replace("10000", cell))
    assert run(["bench", "published", "--data", str(tmp_path), "--runs-dir", str(tmp_path / "runs")]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("autotune: ")]
    assert len(told) == 1
    assert "a.csv, after line 2: is damaged (field larger than field limit" in told[0]


def test_the_link_between_nodes_is_read_from_a_sections_title(tmp_path: Path) -> None:
    slow = GOOD.replace("H100,7b", "A100 80GB with 800 Gbps node-node interconnect (RoCE),7b").replace("h100", "a100")
    (tmp_path / "a.csv").write_text(FSDP + slow)
    (row,) = read_published(tmp_path).rows
    assert row.machine.node_link == pytest.approx(800e9 / 8)


def test_folders_without_rows_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (None, "", FSDP, "a,b\n1,2\n"):
        if text is not None:
            (tmp_path / "a.csv").write_text(text)
        with pytest.raises(InputError, match=r"no CSV files|no usable row"):
            read_published(tmp_path)
    assert run(["bench", "published", "--data", str(tmp_path / "missing"), "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "no CSV files" in capsys.readouterr().err


def test_the_command_writes_its_document_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "a.csv").write_text(FSDP + GOOD)
    arguments = ["--data", str(folder), "--no-left-out", "--runs-dir", str(tmp_path / "runs"), "--json"]
    assert run(["bench", "published", *arguments]) == 0
    printed = json.loads(capsys.readouterr().out)
    written = benchmark_folder(tmp_path / "runs") / "published-mine.json"
    assert json.loads(written.read_text())["rows"] == printed["rows"]
    assert written.with_suffix(".png").stat().st_size > 1000
    assert {"throughput_error_median", "throughput_error_p90", "peak_error_median", "wrongly_refused"} <= set(printed)


def test_the_simple_rule_at_its_best_share_is_exact_for_a_run_at_that_share() -> None:
    rows = read_published().rows[:1]
    assert six_nd_seconds(rows[0], best_mfu(rows)) == pytest.approx(rows[0].seconds)


def test_kendall_tau_counts_ordered_pairs() -> None:
    assert kendall_tau([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert kendall_tau([(1, 30), (2, 20), (3, 10)]) == pytest.approx(-1)
    assert kendall_tau([(1, 10), (2, 30), (3, 20)]) == pytest.approx(1 / 3)
    assert kendall_tau([(1, 1), (2, 1)]) is None
    assert fitted() != Constants()

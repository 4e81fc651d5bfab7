"""The GPU benchmark as a command: on this machine's processor, with real steps of small jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_job import make

from autotune.campaign import bench_gpu as bench
from autotune.campaign.runs import benchmark_folder
from autotune.catalog import load_job
from autotune.cli.main import run
from autotune.errors import InputError

JOB = Path(__file__).parent / "tiny_job.py"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_every_arm_stands_beside_every_budget_and_predictions_beside_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--jobs", str(JOB), "--rounds", "2", "--runs-dir", str(tmp_path), "--json"]
    assert run(["bench", "gpu", *options]) == 0
    document = json.loads((benchmark_folder(tmp_path) / "gpu-command-on-cpu.json").read_text())
    assert json.loads(capsys.readouterr().out) == document
    assert document["left_out"] == []
    (job,) = document["jobs"]
    assert [one["share"] for one in job["budgets"]] == [1.0, 0.6, 0.4, 0.3]
    peak = job["baseline"]["peak_bytes"]
    for one in job["budgets"]:
        assert one["bytes"] == int(one["share"] * peak)
        assert {"baseline", "paper", "uniform-bf16", "sqrt"} <= set(one["arms"])
        for arm in one["arms"].values():
            plan = job["plans"][arm["plan"]]
            assert arm["fits"] == (plan["failure"] is None and plan["peak_bytes"] <= one["bytes"])
        for name in ("exact", "ppo"):
            assert name not in one["arms"] or one["arms"][name]["fits"]
    assert job["budgets"][0]["arms"]["baseline"] == {"plan": 0, "fits": True, "speedup": 1.0}
    for plan in job["plans"]:
        assert plan["predicted_peak_bytes"] == pytest.approx(plan["peak_bytes"], rel=0.01)
        assert plan["predicted_seconds_per_step"] > 0
    assert job["attached"]["observe"]["identical"]
    assert job["attached"]["act"]["identical"]
    assert document["environment"]["packages"]["torch"] == torch.__version__


def test_what_has_no_time_left_is_named_and_not_run() -> None:
    job = load_job(str(JOB))
    document = bench.bench_gpu([job], bench.GpuBenchSettings(device="cpu", seconds=-1.0))
    assert (document["jobs"], document["left_out"]) == ([], ["tiny: no time was left"])
    assert "no time was left" in bench.verdict(document)


def test_a_job_that_the_device_cannot_run_is_named_and_the_next_one_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(_model: object, _batch: object) -> torch.Tensor:
        raise RuntimeError("no kernel image is available for execution on the device\nCompile with ...")

    monkeypatch.setattr(bench, "bench_overhead_attached", lambda *_, **__: lacking(None, None))
    settings = bench.GpuBenchSettings(device="cpu", rounds=2)
    document = bench.bench_gpu([make(name="lacking", loss=lacking), load_job(str(JOB))], settings)
    (left_out,) = document["left_out"]
    assert left_out.startswith("lacking: ")
    assert "no kernel image is available" in left_out
    (job,) = document["jobs"]
    assert job["plans"]
    assert job["attached"] == {"failure": "no kernel image is available for execution on the device"}


@without_gpu
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "gpu", "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "there is no CUDA device here" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_fewer_rounds_than_choosing_and_reporting_need_are_refused() -> None:
    with pytest.raises(InputError, match="rounds is 1"):
        bench.GpuBenchSettings(device="cpu", rounds=1)


def test_the_models_have_the_sizes_that_they_are_called_after() -> None:
    sizes = {}
    for name in ("gpt2_wikitext2:random", "gpt2_wikitext2:billion", "resnet50_cifar10:random"):
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in load_job(name).model().parameters())
    assert sizes["gpt2_wikitext2:random"] == 124_439_808
    assert 1.29e9 < sizes["gpt2_wikitext2:billion"] < 1.33e9
    assert 23.4e6 < sizes["resnet50_cifar10:random"] < 25.6e6

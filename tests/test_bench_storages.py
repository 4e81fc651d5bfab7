"""Tests of the storages benchmark: real steps of a small job, each storage in all units."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_job
import torch
from torch import nn

from autotune.bench.bench_storages import bench_storages, lines
from autotune.choices import STORAGES_VARIABLE
from autotune.cli.main import run
from autotune.errors import EngineError, InputError
from autotune.records.run_directory import benchmark_folder

JOB = str(Path(__file__).parent / "tiny_job.py")


def test_each_storage_is_measured_beside_saving_in_its_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORAGES_VARIABLE, "selective")
    assert run(["bench", "storages", "--job", JOB, "--rounds", "2", "--runs-dir", str(tmp_path)]) == 0
    document = json.loads((benchmark_folder(tmp_path) / "storages.json").read_text())
    rows = {(row["precision"], row["storage"]): row for row in document["rows"]}
    assert list(rows) == [(p, s) for p in ("fp32", "bf16") for s in ("save", "selective", "recompute")]
    for (precision, storage), row in rows.items():
        saving = rows[precision, "save"]
        assert row["failure"] is None
        assert row["over_saving"]["ratio_median"] > 0
        assert row["peak_over_saving"] == row["peak_bytes"] / saving["peak_bytes"]
        assert (row["peak_over_saving"] < 1) == (storage != "save")
    assert rows["fp32", "save"]["over_saving"]["ratio_median"] == 1
    assert "fp32, selective: " in capsys.readouterr().out


class Fp32Block(tiny_job.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise ValueError("no 16 bits here")
        return super().forward(x)


class Fp32Network(tiny_job.Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fp32Block() for _ in range(3))


def test_plan_that_fails_has_its_reason_in_its_row() -> None:
    document = bench_storages(tiny_job.make(model=Fp32Network, storages=["selective"]), rounds=2)
    failures = {row["precision"]: row["failure"] for row in document["rows"]}
    assert failures == {"fp32": None, "bf16": "crashed: ValueError: no 16 bits here"}
    assert all((row["over_saving"] is None) == (row["precision"] == "bf16") for row in document["rows"])
    assert "bf16, selective: crashed: ValueError: no 16 bits here" in lines(document)


def test_a_single_round_is_rejected() -> None:
    with pytest.raises(InputError, match="at least 2"):
        bench_storages(tiny_job.make(), rounds=1)


def test_benchmark_ends_in_one_sentence_if_all_plans_fail() -> None:
    with pytest.raises(EngineError, match=r"no plan can be measured: a step that saves all ends with .*no such luck"):
        bench_storages(tiny_job.make(model=Broken), rounds=2)


class Broken(tiny_job.Network):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise ValueError("no such luck")
        return super().forward(tokens)

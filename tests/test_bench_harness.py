"""Tests of what all benchmarks share: document headers, alternating turns and common options."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from autotune.bench.harness import alternating, document_of, interval_text, write_document
from autotune.cli import bench
from autotune.cli.main import run
from autotune.records.run_directory import benchmark_folder
from autotune.stats import mean_with_interval


def test_turns_alternate_in_direction() -> None:
    assert [alternating("abc", turn) for turn in range(3)] == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


def test_document_is_written_with_its_environment(tmp_path: Path) -> None:
    document = document_of("solver", {"instances": 3})
    assert document.keys() == {"version", "benchmark", "device", "threads", "torch", "instances"}
    path, written = write_document("name", document, tmp_path)
    assert path == benchmark_folder(tmp_path) / "name.json"
    assert json.loads(path.read_text()) == written == {**document, "environment": written["environment"]}


def test_interval_is_shown_after_its_mean() -> None:
    assert interval_text(mean_with_interval([0.5])) == "0.500 [0.500, 0.500]"


def test_every_benchmark_takes_a_runs_folder_and_prints_json() -> None:
    for name, command in typer.main.get_command(bench.app).commands.items():  # type: ignore[attr-defined]
        names = {parameter.name for parameter in command.params}
        assert "runs_dir" in names
        assert "as_json" in names or name == "all"


def test_benchmark_prints_its_result_and_where_it_was_written(tmp_path: Path, capsys) -> None:
    arguments = ["bench", "overhead", "--job", str(Path(__file__).parent / "tiny_job.py"), "--pairs", "2"]
    assert run([*arguments, "--runs-dir", str(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert (document["benchmark"], document["pairs"]) == ("overhead", 2)
    assert str(benchmark_folder(tmp_path) / "overhead-tiny.json") in shown.err.replace("\n", "")

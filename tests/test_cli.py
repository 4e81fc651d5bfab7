"""The command line's surface, and how it refuses: one line, exit code 2, nothing written."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.cli.main import run

JOB = Path(__file__).parent / "tiny_job.py"
VERBS = [
    "bench",
    "compare",
    "demo",
    "doctor",
    "explain",
    "export",
    "plan",
    "profile",
    "replay",
    "report",
    "reproduce",
    "resume",
    "schedule",
    "train",
    "tune",
]


def plan_file(folder: Path, **changes: object) -> str:
    document = {"version": 1, "accumulation_steps": 1, "precision": {}, "storage": {}, **changes}
    path = folder / "plan.json"
    path.write_text(json.dumps(document))
    return str(path)


def series_file(folder: Path) -> str:
    path = folder / "series.csv"
    path.write_text("2025-03-01T00:00Z,100\n2025-03-01T01:00Z,90\n")
    return str(path)


def test_the_surface_is_the_documented_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out.split("Commands:")[1].split("\n")
    assert sorted(line.split()[0] for line in listed if line.startswith("  ") and line[2] != " ") == VERBS


@pytest.mark.parametrize(
    "verb",
    [
        ["demo"],
        ["tune"],
        ["train"],
        ["compare"],
        ["explain"],
        ["doctor"],
        ["plan"],
        ["reproduce"],
        ["export"],
        ["schedule"],
        ["bench", "overhead"],
        ["bench", "solver"],
        ["bench", "simulator"],
    ],
)
def test_every_verb_has_json_and_help(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*verb, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


BAD: dict[str, Callable[[Path], tuple[list[str], str]]] = {
    "unknown job": lambda f: (["tune", "nope"], "charlm"),
    "missing file": lambda f: (["tune", "nope.py:job"], "existing .py file"),
    "missing module": lambda f: (["tune", "no_such_module:job"], "no_such_module"),
    "attribute that is no job": lambda f: (["tune", f"{JOB}:nothing"], "a Job"),
    "budget that is no size": lambda f: (["tune", str(JOB), "--memory-budget", "banana"], "20GiB"),
    "budget of zero": lambda f: (["tune", str(JOB), "--memory-budget", "0%"], "share"),
    "budget without a unit": lambda f: (["tune", str(JOB), "--memory-budget", "40"], "20GiB"),
    "budget below every plan": lambda f: (["tune", str(JOB), "--memory-budget", "1KiB"], "at least"),
    "unknown method": lambda f: (["tune", str(JOB), "--method", "magic"], "random, optuna, optuna-prices, ppo-scratch"),
    "too few steps": lambda f: (["tune", str(JOB), "--steps", "1"], "at least"),
    "no trials": lambda f: (["tune", str(JOB), "--trials", "0"], "at least 1"),
    "nothing to compare": lambda f: (["compare", str(JOB), "--arms", "baseline"], "uniform-bf16"),
    "arm twice": lambda f: (["compare", str(JOB), "--arms", "paper,paper"], "different"),
    "unknown arm": lambda f: (["compare", str(JOB), "--arms", "baseline,magic"], "uniform-bf16"),
    "one seed": lambda f: (["compare", str(JOB), "--arms", "paper", "--seeds", "1"], "at least 2"),
    "unknown unit in a plan": lambda f: (
        ["compare", str(JOB), "--arms", plan_file(f, precision={"nowhere": "bf16"})],
        "'nowhere'",
    ),
    "unknown precision in a plan": lambda f: (
        ["compare", str(JOB), "--arms", plan_file(f, precision={"head": "fp8"})],
        "inherit, fp32, bf16, fp16",
    ),
    "unknown storage in a plan": lambda f: (
        ["compare", str(JOB), "--arms", plan_file(f, storage={"blocks.0": "tape"})],
        "save, recompute",
    ),
    "storage of a unit that has none": lambda f: (
        ["compare", str(JOB), "--arms", plan_file(f, storage={"head": "recompute"})],
        "blocks.0",
    ),
    "unknown key in a plan": lambda f: (["compare", str(JOB), "--arms", plan_file(f, speed=9)], "'speed'"),
    "unknown version of a plan": lambda f: (["compare", str(JOB), "--arms", plan_file(f, version=7)], "allowed: 1"),
    "k that is not a choice": lambda f: (
        ["compare", str(JOB), "--arms", plan_file(f, accumulation_steps=3)],
        "1, 2, 4",
    ),
    "k of zero": lambda f: (["compare", str(JOB), "--arms", plan_file(f, accumulation_steps=0)], ">= 1"),
    "plan that is no JSON": lambda f: (["explain", "--job", str(JOB), str(JOB.with_suffix(".json"))], "JSON"),
    "k larger than the batch": lambda f: (["tune", f"{JOB}:k_larger_than_batch"], "at most batch_size"),
    "loss that is no scalar": lambda f: (["tune", f"{JOB}:loss_not_scalar"], "scalar tensor"),
    "loss that raises": lambda f: (["tune", f"{JOB}:loss_raises"], "no such luck"),
    "no batches": lambda f: (["tune", f"{JOB}:no_batches"], "at least one batch"),
    "batches without samples": lambda f: (["tune", f"{JOB}:empty_batches"], "samples"),
    "count that is no number": lambda f: (["tune", f"{JOB}:wrong_count"], "whole number"),
    "runs folder that is a file": lambda f: (["tune", str(JOB), "--runs-dir", str(JOB)], "writable folder"),
    "explaining nothing": lambda f: (["explain", "nothing", "--job", str(JOB)], "a run"),
    "explaining without a job": lambda f: (["explain", "paper"], "--job"),
    "explaining a folder that is no run": lambda f: (["explain", str(JOB.parent)], "config.json"),
    "weights that are two": lambda f: (["tune", str(JOB), "--weights", "1,0"], "three numbers w1,w2,w3"),
    "weights that are 0": lambda f: (["tune", str(JOB), "--weights", "0,0,0"], "not all 0"),
    "weight of energy that nothing reads": lambda f: (
        ["tune", str(JOB), "--method", "random", "--weights", "1,0,1"],
        "--watts",
    ),
    "energy alone for a planner": lambda f: (
        ["tune", str(JOB), "--method", "exact", "--weights", "0,0,1", "--watts", "9"],
        "w1 or w2 above 0, or --method random",
    ),
    "watts below 0": lambda f: (["tune", str(JOB), "--watts", "-9"], "--watts: is -9.0"),
    "intensity in kg": lambda f: (["compare", str(JOB), "--carbon-intensity", "0.3"], "looks like kg/kWh"),
    "intensity of last year": lambda f: (["compare", str(JOB), "--carbon-intensity", series_file(f)], "nothing of"),
    "length that is none": lambda f: (
        ["schedule", "--length", "long", "--carbon-intensity", series_file(f)],
        "6h, 90min or 1d12h",
    ),
    "series that is over": lambda f: (
        ["schedule", "--length", "1h", "--carbon-intensity", series_file(f)],
        "ends after 2025-03-01T02:00:00",
    ),
    "export for nothing": lambda f: (
        ["export", plan_file(f), "--job", str(JOB), "--to", "onnx"],
        "deepspeed, accelerate, transformers, python, json",
    ),
    "export of another job's plan": lambda f: (
        ["export", plan_file(f, precision={"tail": "bf16"}), "--job", str(JOB), "--to", "transformers"],
        "unknown unit 'tail'",
    ),
    "unknown verb": lambda f: (["frobnicate"], "frobnicate"),
    "unknown option": lambda f: (["tune", str(JOB), "--frobnicate"], "frobnicate"),
    "number that is none": lambda f: (["tune", str(JOB), "--seed", "x"], "seed"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_line_exit_2_and_nothing_written(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, work = tmp_path / "plans", tmp_path / "work"
    plans.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    # A machine that can read its energy would not refuse to weigh it.
    monkeypatch.setattr("autotune.mechanics.energy_meter.POWERCAP", plans)
    arguments, expected = BAD[case](plans)
    assert run(arguments) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().split("\n")
    message = [line for line in lines if line.startswith("autotune: ")]
    assert len(message) == 1, captured.err
    assert expected in message[0]
    assert "Traceback" not in captured.err
    assert list(work.iterdir()) == []


def test_json_is_one_document_on_stdout_and_everything_else_on_stderr(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autotune.cli.main", "tune", str(JOB), "--method", "random", "--json"]
    answer = subprocess.run(
        [*command, "--steps", "48", "--runs-dir", str(tmp_path)], capture_output=True, text=True, check=True
    )
    document = json.loads(answer.stdout)
    assert set(document) == {"plan", "predicted", "measured", "tuning_s", "tuning_steps", "run"}
    assert 0 < document["tuning_steps"] <= 48
    assert json.loads(Path(document["run"], "plan.json").read_text()) == document["plan"]
    assert "Traceback" not in answer.stderr


def test_what_a_job_or_c_code_prints_does_not_reach_the_documents_stream(tmp_path: Path) -> None:
    loud = tmp_path / "loud_job.py"
    loud.write_text(JOB.read_text() + '\nimport os\nprint("a job prints")\nos.write(1, b"C code prints\\n")\n')
    command = [sys.executable, "-m", "autotune.cli.main", "explain", "sqrt", "--job", str(loud), "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(json.loads(answer.stdout)) >= {"plan", "rows"}
    assert "a job prints" in answer.stderr
    assert "C code prints" in answer.stderr


def test_doctor_says_what_the_device_does_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "fp32" in document["precisions"]
    assert {"charlm", "charlm_ragged", "digits"} <= set(document["jobs"])


def test_explain_gives_a_reason_for_every_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "paper", "--job", str(JOB), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["unit"] for row in document["rows"]] == ["accumulation_steps", *document["plan"]["precision"]]
    assert all(row["reason"] for row in document["rows"])


def test_the_working_directory_is_where_modules_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "my_jobs.py").write_text(JOB.read_text())
    command = [str(Path(sys.executable).parent / "autotune"), "explain", "sqrt", "--job", "my_jobs:job", "--json"]
    if not Path(command[0]).exists():
        command[:1] = [sys.executable, "-m", "autotune.cli.main"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {}, check=False)
    assert answer.returncode == 0, answer.stderr

"""Tests of the command line: commands, options, and errors of one line with exit code 2."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_env import SPACE

import autotune
from autotune import Precision
from autotune.agents.rules import RULES
from autotune.cli.main import run
from autotune.report.explanation import explain_rule

JOB = Path(__file__).parent / "tiny_job.py"
VERBS = [
    "bench",
    "calibrate",
    "compare",
    "demo",
    "doctor",
    "elastic",
    "explain",
    "export",
    "knobs",
    "plan",
    "profile",
    "ramp",
    "replay",
    "report",
    "reproduce",
    "resume",
    "schedule",
    "train",
    "tune",
    "watch",
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


def test_commands_and_options_are_the_documented_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out.split("Commands:")[1].split("\n")
    assert sorted(line.split()[0] for line in listed if line.startswith("  ") and line[2] != " ") == VERBS


@pytest.mark.parametrize(
    "verb",
    [
        ["demo"],
        ["tune"],
        ["knobs"],
        ["ramp"],
        ["train"],
        ["compare"],
        ["explain"],
        ["doctor"],
        ["watch"],
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
    "attribute that is no job": lambda f: (["tune", f"{JOB}:nothing"], "'nothing' does not exist (allowed: make, job,"),
    "budget that is no size": lambda f: (["tune", str(JOB), "--memory-budget", "banana"], "20GiB"),
    "budget of zero": lambda f: (["tune", str(JOB), "--memory-budget", "0%"], "--memory-budget: memory budget is 0%"),
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
        ["compare", str(JOB), "--arms", plan_file(f, precision={"head": "fp4"})],
        "inherit, fp32, bf16, fp16, fp8",
    ),
    "unknown storage in a plan": lambda f: (
        ["compare", str(JOB), "--arms", plan_file(f, storage={"blocks.0": "tape"})],
        "save, gathered, compiled, selective, compiled50, compress8, compress4, compiled20, rebuild, compiled10, ",
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
    "plan that is not there": lambda f: (["explain", "--job", str(JOB), f"{f}/no.json"], "cannot be read"),
    "k larger than the batch": lambda f: (["tune", f"{JOB}:k_larger_than_batch"], "at most batch_size"),
    "loss that is no scalar": lambda f: (["tune", f"{JOB}:loss_not_scalar"], "scalar tensor"),
    "loss that raises": lambda f: (["tune", f"{JOB}:loss_raises"], "no such luck"),
    "no batches": lambda f: (["tune", f"{JOB}:no_batches"], "at least one batch"),
    "nothing to profile with": lambda f: (["profile", f"{JOB}:no_batches"], "at least one batch"),
    "planning within no size": lambda f: (
        ["plan", f"{JOB}:no_batches", "--device", "h100", "--memory-budget", "9ZB"],
        "--memory-budget: ",
    ),
    "nothing to plan with": lambda f: (["plan", f"{JOB}:no_batches", "--device", "h100"], "at least one batch"),
    "batches that raise": lambda f: (["profile", f"{JOB}:batches_raise"], "batches raised ValueError: no such luck"),
    "batches without samples": lambda f: (["tune", f"{JOB}:empty_batches"], "samples"),
    "count that is no number": lambda f: (["tune", f"{JOB}:wrong_count"], "whole number"),
    "runs folder that is a file": lambda f: (["tune", str(JOB), "--runs-dir", str(JOB)], "writable folder"),
    "runs folder where nothing can be made": lambda f: (
        ["profile", str(JOB), "--runs-dir", "/proc/runs"],
        "--runs-dir /proc/runs: cannot be written",
    ),
    "explaining nothing": lambda f: (["explain", "nothing", "--job", str(JOB)], "'nothing' does not exist"),
    "explaining a job": lambda f: (["explain", str(JOB)], "is no run, plan or rule"),
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
    "gradient norm of 0": lambda f: (["tune", str(JOB), "--gradient-norm", "0"], "--gradient-norm: is 0.0 (allowed: a"),
    "gradient norm that is no number": lambda f: (["compare", str(JOB), "--gradient-norm", "nan"], "a number above 0"),
    "arm with an underscore": lambda f: (["compare", str(JOB), "--arms", "k_optimal"], "did you mean 'k-optimal'?"),
    "watts below 0": lambda f: (["tune", str(JOB), "--watts", "-9"], "--watts: is -9.0"),
    "intensity in kg": lambda f: (["compare", str(JOB), "--carbon-intensity", "0.3"], "looks like kg/kWh"),
    "intensity of last year": lambda f: (["compare", str(JOB), "--carbon-intensity", series_file(f)], "does not cover"),
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
        "deepspeed, accelerate, transformers, torchtitan, python, json",
    ),
    "export of another job's plan": lambda f: (
        ["export", plan_file(f, precision={"tail": "bf16"}), "--job", str(JOB), "--to", "transformers"],
        "unknown unit 'tail'",
    ),
    "budget beyond every device": lambda f: (["tune", str(JOB), "--memory-budget", "9" * 30 + "GiB"], "1024TiB"),
    "budget of more digits than a number has": lambda f: (
        ["tune", str(JOB), "--memory-budget", "9" * 400 + "GiB"],
        "1024TiB",
    ),
    "share beyond sense": lambda f: (["tune", str(JOB), "--memory-budget", "1000000%"], "10000%"),
    "budget in full-width digits": lambda f: (
        ["tune", str(JOB), "--memory-budget", "\N{FULLWIDTH DIGIT TWO}GiB"],
        "20GiB",
    ),
    "seeds without end": lambda f: (["compare", str(JOB), "--seeds", str(10**30)], "at most 1000"),
    "dips of a distance without end": lambda f: (
        ["compare", str(JOB), "--memory-budget", "9GiB", "--dips", f"{10**30}:70%"],
        "1000000",
    ),
    "seed that no generator takes": lambda f: (["tune", str(JOB), "--seed", str(2**64)], "2147483647"),
    "steps without end": lambda f: (["tune", str(JOB), "--steps", str(10**30)], "1000000"),
    "trials without end": lambda f: (["tune", str(JOB), "--trials", str(10**30)], "100000"),
    "windows without end": lambda f: (["train", str(JOB), "--windows", str(10**30)], "1000000"),
    "processes without end": lambda f: (["train", "--processes", str(10**30)], "256"),
    "ranks without end": lambda f: (["tune", str(JOB), "--engine", "deepspeed", "--ranks", str(10**30)], "256"),
    "cores without end": lambda f: (["tune", str(JOB), "--cluster", "local:1", "--worker-cores", "99999"], "1024"),
    "workers without end": lambda f: (["tune", str(JOB), "--cluster", "local:" + "9" * 30], "1024"),
    "workers in a digit that is no number": lambda f: (
        ["tune", str(JOB), "--cluster", "local:\N{SUPERSCRIPT TWO}"],
        "local:N",
    ),
    "cluster with a password": lambda f: (["tune", str(JOB), "--cluster", "ray://me:secret@127.0.0.1:1"], "HOST:PORT"),
    "watts of a power station": lambda f: (["tune", str(JOB), "--watts", "1e308"], "1000000"),
    "watts that are no number": lambda f: (["tune", str(JOB), "--watts", "nan"], "--watts"),
    "seconds that are no number": lambda f: (["profile", str(JOB), "--seconds", "nan"], "--seconds"),
    "length beyond every calendar": lambda f: (
        ["schedule", "--length", "1000000000h", "--carbon-intensity", series_file(f)],
        "up to 3660d",
    ),
    "time before every calendar": lambda f: (
        ["schedule", "--length", "1h", "--carbon-intensity", series_file(f), "--earliest", "0001-01-01T00:00:00+14:00"],
        "years from 1970 to 2199",
    ),
    "NUL": lambda f: (["resume", "a\0b"], "argument 2: is 'a\\x00b'"),
    "half of a surrogate pair": lambda f: (["resume", "\ud800"], "UTF-8 text"),
    "name that is too long": lambda f: (["resume", "n" * 300], "File name too long"),
    "name of a runs folder that is too long": lambda f: (
        ["tune", str(JOB), "--runs-dir", "n" * 300],
        "writable folder",
    ),
    "escape sequence": lambda f: (["resume", "\x1b[31mred"], "\\x1b[31mred: is not a run"),
    "several lines": lambda f: (["resume", "a\nautotune: all is well"], "a autotune: all is well: is not a run"),
    "device that torch does not know": lambda f: (
        ["bench", "gpu", "--device", "abacus"],
        "device is 'abacus' (allowed: cpu",
    ),
    "unknown verb": lambda f: (["frobnicate"], "'frobnicate'. (allowed: demo, profile, plan, calibrate, tune,"),
    "unknown benchmark": lambda f: (["bench", "nope"], "'nope'. (allowed: overhead, pipelines, solver,"),
    "unknown option": lambda f: (["tune", str(JOB), "--frobnicate"], "frobnicate"),
    "number that is none": lambda f: (["tune", str(JOB), "--seed", "x"], "seed"),
}


def made(folder: Path, kind: str) -> str:
    """Make a special file, and return its path."""
    path = folder / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(folder):
            server.bind(kind)
    elif kind == "dangling link":
        path.symlink_to(folder / "nowhere" / "below")
    elif kind == "loop of links":
        path.symlink_to(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("")
    return str(path)


RUN = ["report", str(JOB.parent)]
SERIES = ["schedule", "--length", "1h"]
READ = [
    ["resume", "{path}"],
    ["report", "{path}"],
    ["replay", "{path}"],
    ["watch", "{path}"],
    ["explain", "{path}", "--job", str(JOB)],
    ["export", "{path}", "--job", str(JOB)],
    [*RUN, "--profile", "{path}"],
    [*RUN, "--carbon-intensity", "{path}"],
    [*SERIES, "--carbon-intensity", "{path}"],
    ["train", "--recipe", "{path}"],
    ["train", "--resume", "{path}"],
    ["train", str(JOB), "--from", "{path}"],
    ["tune", str(JOB), "--engine", "deepspeed", "--ds-config", "{path}"],
    ["reproduce", "table1", "--data", "{path}"],
    ["bench", "policy", "--policy", "{path}"],
    ["bench", "policy", "--train-run", "{path}"],
]
WRITTEN_FOLDERS = [
    ["tune", str(JOB), "--runs-dir", "{path}"],
    ["train", "--runs-dir", "{path}"],
    ["bench", "solver", "--runs-dir", "{path}"],
    [*RUN, "--figures", "{path}"],
    [*RUN, "--csv", "{path}"],
    [*RUN, "--parquet", "{path}"],
]
WRITTEN_FILES = [
    [*RUN, "--csv", "tables", "--out", "{path}"],
    ["plan", str(JOB), "--device", "h200", "--output", "{path}"],
]
SPECIAL = ["pipe", "socket", "dangling link", "loop of links"]
REFUSED = [
    *((line, kind) for line in READ for kind in ("pipe", "socket", "loop of links")),
    *((line, kind) for line in WRITTEN_FOLDERS for kind in (*SPECIAL, "file")),
    *((line, kind) for line in WRITTEN_FILES for kind in (*SPECIAL, "folder")),
    *(
        (["export", "{plan}", "--job", str(JOB), "--to", "json", "--out", "{path}"], kind)
        for kind in (*SPECIAL, "file")
    ),
]


@pytest.mark.some(30)
@pytest.mark.parametrize(("line", "kind"), REFUSED, ids=lambda part: part if isinstance(part, str) else " ".join(part))
def test_path_that_is_neither_file_nor_folder_is_rejected_in_one_line(
    line: list[str],
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    path = made(tmp_path, kind)
    filled = [word.format(path=path, plan=plan_file(tmp_path)) for word in line]
    was = os.lstat(path)
    assert run(filled) == 2
    captured = capsys.readouterr()
    (message,) = [row for row in captured.err.split("\n") if row.startswith("autotune: ")]
    assert path in message
    assert (os.lstat(path).st_ino, os.lstat(path).st_mode) == (was.st_ino, was.st_mode)
    assert list(work.iterdir()) == []
    assert {entry.name for entry in tmp_path.iterdir()} == {kind, "plan.json", "work"}


@pytest.mark.parametrize("case", BAD)
def test_invalid_input_gives_one_line_exit_code_2_and_no_files(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, work = tmp_path / "plans", tmp_path / "work"
    plans.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    # A machine that can measure energy would accept a weight for it.
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


@pytest.mark.slow
def test_json_prints_one_document_on_stdout_and_the_rest_on_stderr(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autotune.cli.main", "tune", str(JOB), "--method", "random", "--json"]
    answer = subprocess.run(
        [*command, "--steps", "48", "--runs-dir", str(tmp_path)], capture_output=True, text=True, check=True
    )
    document = json.loads(answer.stdout)
    assert set(document) == {"plan", "predicted", "measured", "tuning_s", "tuning_steps", "run"}
    assert 0 < document["tuning_steps"] <= 48
    assert json.loads(Path(document["run"], "plan.json").read_text()) == document["plan"]
    assert "Traceback" not in answer.stderr


@pytest.mark.slow
def test_output_of_jobs_and_c_code_does_not_reach_the_json_stream(tmp_path: Path) -> None:
    loud = tmp_path / "loud_job.py"
    loud.write_text(JOB.read_text() + '\nimport os\nprint("a job prints")\nos.write(1, b"C code prints\\n")\n')
    command = [sys.executable, "-m", "autotune.cli.main", "explain", "sqrt", "--job", str(loud), "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(json.loads(answer.stdout)) >= {"plan", "rows"}
    assert "a job prints" in answer.stderr
    assert "C code prints" in answer.stderr


def test_doctor_describes_the_strengths_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "fp32" in document["precisions"]
    assert {"charlm", "charlm_ragged", "digits"} <= set(document["jobs"])


def test_explain_gives_a_reason_for_every_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "paper", "--job", str(JOB), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["unit"] for row in document["rows"]] == ["accumulation_steps", *document["plan"]["precision"]]
    assert all(row["reason"] for row in document["rows"])


@pytest.mark.parametrize("name", ["uniform-bf16", "recompute-all", "paper"])
def test_a_rules_reason_follows_its_plan_where_no_16_bit_precision_is_offered(name: str) -> None:
    space = replace(SPACE, precisions=(Precision.FP32,))
    rows = explain_rule(RULES[name].plan(space), space, RULES[name])
    assert all(row.reason.startswith("fp32, since no 16-bit precision") for row in rows[1:])


def test_explain_names_the_units_that_a_plan_file_leaves_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = plan_file(tmp_path, precision={"head": "fp32"}, storage={"blocks.0": "recompute"})
    assert run(["explain", path, "--job", str(JOB), "--json"]) == 0
    (told,) = caplog.messages
    assert told.startswith(f"{path}: the plan does not name ")
    assert "'blocks.1'" in told
    assert "'blocks.0'" not in told


@pytest.mark.slow
def test_modules_are_found_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "my_jobs.py").write_text(JOB.read_text())
    command = [str(Path(sys.executable).parent / "autotune"), "explain", "sqrt", "--job", "my_jobs:job", "--json"]
    if not Path(command[0]).exists():
        command[:1] = [sys.executable, "-m", "autotune.cli.main"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {}, check=False)
    assert answer.returncode == 0, answer.stderr


def test_python_m_runs_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "autotune", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"autotune {autotune.__version__}"

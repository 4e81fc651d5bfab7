"""Tests of documents that contradict each other, of duplicate names and of values that are not numbers."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_job
from markupsafe import Markup
from torch import nn

import autotune
from autotune import InputError, RunDirectoryError
from autotune.agents.study_store import checked
from autotune.cli.main import run as run_command
from autotune.io.documents import LEAST_RATIO
from autotune.io.files import parse_json
from autotune.mechanics.devices import device_name
from autotune.records.journal import _sum as journal_sum
from autotune.report.svg import Figure
from autotune.report.writing import write_figures
from autotune.stats import ratio_of_log

SPECIMENS = Path(__file__).parent / "fuzz" / "specimens"
JOB = str(Path(tiny_job.__file__)) + ":job"


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    """Return a recorded comparison."""
    shutil.copytree(SPECIMENS / "compare", tmp_path / "run")
    return tmp_path / "run"


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_resume_rejects_arms_that_differ_from_the_recorded_request(compared: Path) -> None:
    (compared / "comparison.json").unlink()
    change(compared / "config.json", arms=["baseline", str(compared.parent / "plan.json")])
    with pytest.raises(RunDirectoryError, match=r"asked\.arms differs from arms"):
        autotune.resume(compared, job=JOB)


def test_plan_that_links_outside_the_run_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret, run, out = tmp_path / "plan.json", tmp_path / "run", tmp_path / "out"
    secret.write_text(autotune.Plan(accumulation_steps=1, precision={}, storage={}).to_json().__repr__())
    run.mkdir()
    (run / "plan.json").symlink_to(secret)
    assert run_command(["export", str(run), "--job", "digits", "--to", "json", "--out", str(out)]) == 2
    assert "is a link" in capsys.readouterr().err
    assert not list(out.glob("*"))


@pytest.mark.parametrize(
    "arms",
    [
        ["baseline", "a/plan.json", "b/plan.json"],
        ["baseline", "a/plan.json", "./a/plan.json"],
        ["a/baseline.json"],
        ["baseline", "baseline"],
    ],
)
def test_arms_with_the_same_name_are_rejected_before_any_run(
    arms: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, name in itertools.product("ab", ("plan", "baseline")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.json").write_text(json.dumps({"version": 1, "accumulation_steps": 1}))
    with pytest.raises(InputError, match=r"both called|different names"):
        autotune.compare(tiny_job.make(), arms, seeds=2, steps=48, runs_dir=tmp_path / "runs")
    assert not list((tmp_path / "runs").glob("*-compare-*"))


def at_first(value: float) -> autotune.Job:
    """Return a job whose metric is not a number before training."""
    seen: Iterator[int] = itertools.count()

    def evaluate(model: nn.Module) -> float:
        return value if next(seen) == 0 else tiny_job.evaluate(model)

    return tiny_job.make(evaluate=evaluate)


def test_metric_that_is_not_a_number_at_first_is_left_out(tmp_path: Path) -> None:
    found = autotune.compare(
        at_first(float("inf")), ["baseline", "recompute-all"], seeds=2, steps=48, lean=True, runs_dir=tmp_path
    )
    assert all(run["reached"] for arm in found["arms"] for run in arm["runs"])


def test_metric_that_is_never_a_number_is_refused_by_the_pilot(tmp_path: Path) -> None:
    job = tiny_job.make(evaluate=lambda model: float("nan"), max_steps=6)
    with pytest.raises(InputError, match="the baseline ends with non_finite"):
        autotune.compare(job, ["baseline", "recompute-all"], seeds=2, steps=48, lean=True, runs_dir=tmp_path)
    assert not list(tmp_path.rglob("comparison.json"))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:S3CRET",
        "postgresql://u:S3CRET/db",
        "postgres://u:S3CRET@h:badport/db",
        "postgresql://u:S3CRET@[::1/db",
    ],
)
def test_unparsable_address_is_one_line_without_its_secret(url: str) -> None:
    with pytest.raises(InputError) as raised:
        checked(url, where="--storage")
    assert "S3CRET" not in str(raised.value)


def test_mlflow_address_in_a_foreign_format_does_not_block_a_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "databricks://profile:prefix")
    with pytest.raises(InputError, match="does not answer"):
        checked("postgresql://u@127.0.0.1:1/db", where="--storage")


@pytest.mark.parametrize(
    ("change_runs", "said"),
    [({"time_to_target_s": None, "reached": True}, "reached is true"), ({}, "")],
)
def test_run_with_an_arrival_but_no_arrival_time_is_rejected(
    compared: Path, change_runs: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((compared / "comparison.json").read_text())
    for arm in document["arms"]:
        arm["runs"] = [{**one, **change_runs} for one in arm["runs"]]
    (compared / "comparison.json").write_text(json.dumps(document))
    code = run_command(["report", str(compared), "--out", str(compared.parent / "page.html")])
    assert code == (2 if said else 0)
    assert said in capsys.readouterr().err


def test_resuming_the_working_directory_writes_nothing_into_the_run(
    compared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (compared / "comparison.json").unlink()
    monkeypatch.chdir(compared)
    before = set(compared.iterdir())
    with pytest.raises(InputError):
        # It is rejected because of another device or a missing job, and nothing is written into the run.
        autotune.resume(".")
    assert set(compared.iterdir()) == before


def test_comparison_of_two_very_different_pairs_is_readable() -> None:
    assert ratio_of_log(-800.0) == LEAST_RATIO
    assert ratio_of_log(800.0) == 1 / LEAST_RATIO
    assert ratio_of_log(0.0) == 1.0


def test_number_whose_reciprocal_overflows_is_read_as_zero() -> None:
    assert parse_json('{"a": 3e-323, "b": -1e-310, "c": 1e-30}', where="x") == {"a": 0.0, "b": 0.0, "c": 1e-30}


def test_comparison_with_zero_run_times_is_rejected(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((compared / "comparison.json").read_text())
    for arm in document["arms"]:
        arm["runs"] = [{**one, "time_to_target_s": 0.0} for one in arm["runs"]]
    (compared / "comparison.json").write_text(json.dumps(document))
    assert run_command(["report", str(compared), "--out", str(compared.parent / "page.html")]) == 2
    assert "are inconsistent" in capsys.readouterr().err


def test_page_with_one_arm_is_complete(compared: Path) -> None:
    document = json.loads((compared / "comparison.json").read_text())
    document |= {"arms": document["arms"][:1], "against_baseline": [], "gate": None}
    (compared / "comparison.json").write_text(json.dumps(document))
    assert run_command(["report", str(compared), "--out", str(compared.parent / "page.html")]) == 0


def test_job_with_an_overlong_name_is_rejected() -> None:
    with pytest.raises(autotune.JobError, match="name is"):
        tiny_job.make(name="n" * 1001)


def begun(run: Path, **asked: object) -> Path:
    """Turn a recorded comparison into one that was begun on this machine and has not run anything yet."""
    for path in run.iterdir():
        if path.name not in ("config.json", "environment.json"):
            path.unlink()
    change(run / "environment.json", device=device_name())
    change(run / "config.json", asked={**json.loads((run / "config.json").read_text())["asked"], **asked})
    return run


@pytest.mark.parametrize("asked", [{"dips": "9:0.5"}, {"carbon_intensity": "-4"}, {"weights": "x"}, {"seed": 2**31}])
def test_impossible_request_is_rejected_before_anything_is_written(compared: Path, asked: dict[str, object]) -> None:
    run = begun(compared, **asked)
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(InputError, match=re.escape(str(run))):
        autotune.resume(run, job=JOB)
    assert sorted(path.name for path in run.iterdir() if path.name[0] != ".") == before


@pytest.mark.slow
def test_invalid_plan_in_a_journal_writes_no_result(compared: Path) -> None:
    journal = (compared / "journal.jsonl").read_text()
    begun(compared)
    rows = [json.loads(line) for line in journal.splitlines()]
    for row in rows:
        if row["what"].get("run") == "random":
            row["result"]["plans"][0]["plan"]["accumulation_steps"] = 3.5
        row["crc32"] = journal_sum({key: row[key] for key in ("what", "result", "seconds")})
    (compared / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=r"journal\.jsonl, line \d+, result: accumulation_steps is 3\.5"):
        autotune.resume(compared, job=JOB)
    assert not (compared / "comparison.json").exists()


def test_trial_without_optional_values_is_displayed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(SPECIMENS / "tune", run)
    rows = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    for row in rows:
        for name in ("energy_j", "peak_bytes", "gradient"):
            row["measurement"].pop(name)
    (run / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for command in (["report", str(run)], ["explain", str(run), "--job", JOB]):
        assert run_command([*command, "--json"]) == 0, command


def test_figures_with_equal_or_long_names_are_all_kept(tmp_path: Path) -> None:
    drawn = [
        Figure(title=title, described="", key=(), draw=lambda width: (Markup(""), 10))
        for title in ("A b", "a B", "é" * 300)
    ]
    paths = write_figures(drawn, tmp_path)
    assert [path.name for path in paths] == ["a-b.svg", "a-b-2.svg", f"{'é' * 60}.svg"]
    assert all(path.is_file() for path in paths)

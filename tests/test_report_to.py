"""Tests of the experiment trackers other than MLflow: their own files have what was logged."""

import json
from pathlib import Path

import pytest
import tiny_job

import autotune
from autotune import Settings, extras
from autotune.cli.main import run as run_command
from autotune.errors import AutotuneError
from autotune.records.tracking import CURSOR, SPOOL, Tracker, send_pending


def log_something(tracker: Tracker, folder: Path) -> None:
    tracker.params({"a": 1})
    key = tracker.begin("trial 0")
    tracker.params({"plan": "k=2"}, run=key)
    for step, at_s in enumerate((1e9, 1e9 + 7)):
        tracker.metrics({"cost": 0.5 - step / 4}, step=step, run=key, at_s=at_s)
    tracker.tags({"failure": "timeout"}, run=key)
    tracker.end(key, failed=True)
    (folder / "plan.json").write_text("{}")
    tracker.artifact(folder / "plan.json")


def logged(runs: Path, report_to: str) -> Path:
    folder = runs / "r"
    folder.mkdir()
    tracker = Tracker(runs, folder, "parent", report_to)
    log_something(tracker, folder)
    tracker.close()
    rows = (folder / SPOOL).read_text().splitlines()
    assert json.loads((folder / CURSOR).read_text())["sent"] == len(rows)
    assert send_pending(runs) == 0
    return folder


def test_none_sends_nothing_now_or_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = logged(tmp_path, "none")
    monkeypatch.setenv("AUTOTUNE_REPORT_TO", "mlflow")
    assert send_pending(tmp_path) == 0
    assert {path.name for path in tmp_path.rglob("*")} == {"r", SPOOL, CURSOR, "plan.json"}
    assert folder.is_dir()


def test_tensorboard_has_metrics_with_their_times_and_hyperparameters(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged(tmp_path, "tensorboard")
    trial = EventAccumulator(str(tmp_path / "tensorboard" / "r" / "trial-0"))
    trial.Reload()
    assert [(one.step, one.value, one.wall_time) for one in trial.Scalars("cost")] == [
        (0, 0.5, 1e9),
        (1, 0.25, 1e9 + 7),
    ]
    assert {"failure/text_summary", "status/text_summary", "plan/text_summary"} <= set(trial.Tags()["tensors"])
    session = trial.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"plan" in session
    assert b"k=2" in session
    assert list((tmp_path / "tensorboard" / "r").glob("events*"))


@pytest.mark.parametrize("run", ["../../outside", "/tmp/outside", "link"])
def test_files_for_tensorboard_stay_in_their_folder(run: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "runs" / "r", tmp_path / "elsewhere"
    folder.mkdir(parents=True)
    outside.mkdir()
    (tmp_path / "runs" / "tensorboard").mkdir()
    (tmp_path / "runs" / "tensorboard" / "link").symlink_to(outside)
    row = {"kind": "metrics", "run": "0", "step": 0, "values": {"x": 1.0}}
    (folder / SPOOL).write_text(json.dumps(row) + "\n")
    (folder / CURSOR).write_text(json.dumps({"sent": 0, "ids": {"0": run}, "report_to": "tensorboard"}))
    assert send_pending(tmp_path / "runs") == 1
    assert not list(outside.iterdir())
    assert not list(tmp_path.rglob("*tfevents*"))


def test_wandb_has_runs_of_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged(tmp_path, "wandb")
    written = [path.read_bytes() for path in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))]
    (trial,) = (one for one in written if b"trial 0" in one)
    (parent,) = (one for one in written if b"trial 0" not in one)
    assert b"cost" in trial
    assert b"k=2" in trial
    assert b"timeout" in trial
    assert b"plan.json" in parent


def test_wandb_without_a_key_asks_nothing_and_keeps_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "r").mkdir()
    Tracker(tmp_path, tmp_path / "r", "parent", "wandb").close()
    assert "WANDB_MODE is 'online' without a key" in caplog.text
    # Another tracker's records are sent all the same.
    (tmp_path / "s").mkdir()
    spool, cursor = (tmp_path / "r" / name for name in (SPOOL, CURSOR))
    (tmp_path / "s" / SPOOL).write_bytes(spool.read_bytes())
    (tmp_path / "s" / CURSOR).write_text(cursor.read_text().replace("wandb", "tensorboard"))
    assert send_pending(tmp_path) == len(spool.read_text().splitlines())
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_RUN_ID", "theirs")
    send_pending(tmp_path)
    ids = json.loads(cursor.read_text())["ids"]
    assert len(ids) == 1
    assert "theirs" not in ids.values()


def test_numbers_that_json_lacks_become_tags(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    tracker = Tracker(tmp_path, tmp_path / "r", "parent", "none")
    tracker.metrics({"cost": 1.0, "loss": float("nan")})
    tracker.close()
    rows = [json.loads(row) for row in (tmp_path / "r" / SPOOL).read_text().splitlines()]
    assert [row["values"] for row in rows if row["kind"] in ("metrics", "tags")] == [{"cost": 1.0}, {"loss": "nan"}]


@pytest.mark.parametrize("report_to", ["tensorboard", "none"])
def test_tuning_reports_to_the_tracker_that_was_named(report_to: str, tmp_path: Path) -> None:
    document = autotune.tune(tiny_job.job(), "random", steps=48, report_to=report_to, runs_dir=tmp_path)
    assert not (tmp_path / "mlflow.db").exists()
    trials = Path(document["run"], "trials.jsonl").read_text().splitlines()
    found = list((tmp_path / "tensorboard").glob("*/*-trial-*/"))
    assert len(found) == (len(trials) if report_to == "tensorboard" else 0)


@pytest.mark.parametrize("given", ["mlfow", "", 3])
def test_unknown_tracker_is_rejected_before_anything_is_written(given: object, tmp_path: Path) -> None:
    with pytest.raises(AutotuneError, match="report"):
        autotune.tune(tiny_job.job(), "random", report_to=given, runs_dir=tmp_path)
    with pytest.raises(AutotuneError, match="report_to"):
        Settings(report_to=given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words", [["train"], ["train", "digits"], ["reproduce", "table1", "--scale", "cpu"], ["doctor"]]
)
def test_unknown_tracker_in_the_environment_is_rejected_before_anything_is_written(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOTUNE_REPORT_TO", "mlfow")
    assert run_command([*words, "--runs-dir", str(tmp_path)]) == 2
    assert "AUTOTUNE_REPORT_TO: is 'mlfow' (allowed: mlflow, tensorboard, wandb, none)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_tracker_that_is_not_installed_is_rejected_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "wandb")
    with pytest.raises(AutotuneError, match=r"--report-to.*wandb is not installed.*pip install"):
        autotune.tune(tiny_job.job(), "random", report_to="wandb", runs_dir=tmp_path)
    monkeypatch.setenv("AUTOTUNE_REPORT_TO", "wandb")
    with pytest.raises(AutotuneError, match=r"AUTOTUNE_REPORT_TO.*wandb is not installed"):
        autotune.compare(tiny_job.job(), ["sqrt"], runs_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_doctor_tells_that_the_default_tracker_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AUTOTUNE_REPORT_TO", raising=False)
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "mlflow")
    assert run_command(["doctor", "--json", "--runs-dir", str(tmp_path)]) == 0
    assert "mlflow is not installed" in json.loads(capsys.readouterr().out)["tracking"]

"""Tests of sending an attached run's log to MLflow from a separate process, which leaves the run bit-identical."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_live import RESTLESS, Trace, Wanders, assert_identical, deep_gpt, gpt_loss, token_batches, train
from test_tracking import runs_in

import autotune
from autotune import AttachError, Settings
from autotune.live import attach as attach_module
from autotune.live import following_process
from autotune.live.integrations.attaching_callback import Attaches
from autotune.records.log_following import Counts, LogReader, Sender, metrics_of
from autotune.records.log_following import follow as follow_log
from autotune.records.tracking import SPOOL, Tracker

FOLLOWED = Settings(report_to="mlflow")


class OfAFramework(Attaches):
    """An attachment as the callbacks make it, without a framework."""

    framework = "no framework"

    def begin(self, *, is_first: bool) -> Any:
        model = deep_gpt()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return self._attach(model, optimizer, total_steps=3, accumulation_steps=1, is_first=is_first)


def test_only_the_first_of_several_processes_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[Path] = []
    monkeypatch.setattr(attach_module, "follow", lambda folder, report_to: followed.append(folder))
    for is_first in (True, False):
        OfAFramework("exact", runs_dir=tmp_path, settings=FOLLOWED).begin(is_first=is_first).detach()
    assert len(followed) == len(list(tmp_path.iterdir())) == 1
    OfAFramework("exact", runs_dir=tmp_path).begin(is_first=True).detach()
    assert len(followed) == 1


def test_tracker_without_a_log_folder_is_rejected() -> None:
    with pytest.raises(AttachError, match="runs_dir is None"):
        train(deep_gpt, token_batches, gpt_loss, 1, settings=FOLLOWED)


def test_sender_process_that_cannot_start_causes_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    assert not following_process.follow(tmp_path, "mlflow")
    assert "is not sent to mlflow" in caplog.text


def train_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Train with a followed log, and wait for its last record."""
    attach = autotune.attach
    monkeypatch.setattr(autotune, "attach", lambda *a, **k: attach(*a, **{**k, "runs_dir": folder}))
    attaching = {"policy": Wanders(), "memory_budget_bytes": 10**9, "limits": RESTLESS, "settings": FOLLOWED}
    followed = train(deep_gpt, token_batches, gpt_loss, 20, **attaching)
    for one in threading.enumerate():
        if one.name == "autotune-follower":
            one.join(120)
    return followed


@pytest.mark.slow
def test_followed_run_is_bit_identical_and_keeps_records_that_a_dead_server_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    environment = dict(os.environ)
    plain = train(deep_gpt, token_batches, gpt_loss, 20)
    followed = train_followed(tmp_path, monkeypatch)
    assert_identical(plain, followed)
    assert dict(os.environ) == environment
    folder = followed.tuner.folder
    rows = [json.loads(row) for row in (folder / SPOOL).read_text().splitlines()]
    assert rows[-1]["kind"] == "end"
    assert rows[-1]["values"] == {"status": "FINISHED"}
    switches = sum('"switched"' in row for row in (folder / "decisions.jsonl").read_text().splitlines())
    assert [row["values"]["switches"] for row in rows if "switches" in row["values"]][-1] == switches > 0
    assert "does not answer" in (folder / following_process.OUTPUT).read_text()


@pytest.mark.slow
def test_log_arrives_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'tracked.db'}")
    folder = train_followed(tmp_path / "runs", monkeypatch).tuner.folder
    events = [json.loads(row) for row in (folder / "decisions.jsonl").read_text().splitlines()]
    decided = [event for event in events if event["event"] == "decision"]
    (run,) = runs_in(f"sqlite:///{tmp_path / 'tracked.db'}")
    assert run.info.status == "FINISHED", (folder / following_process.OUTPUT).read_text()
    assert run.data.params["units"] == "6"
    assert run.data.tags["detached_because"] == "detach() was called"
    assert run.data.metrics["switches"] == sum(event["event"] == "switched" for event in events) > 0
    assert run.data.metrics["pressure"] == decided[-1]["predicted"]["peak_bytes"] / 10**9


def test_log_of_a_killed_run_is_sent_and_marked_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    (tmp_path / "decisions.jsonl").write_text('{"event": "attached", "step": 0, "model": "net"}\n')
    # The sender is not our child: the process that wrote the log is gone.
    follow_log(tmp_path, -1, "mlflow", poll_s=0.0)
    rows = [json.loads(row) for row in (tmp_path / SPOOL).read_text().splitlines()]
    assert [row["values"].get("model") for row in rows if row["kind"] == "params"] == ["net"]
    assert rows[-1]["values"] == {"status": "FAILED"}


def test_growing_log_is_read_without_torn_or_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = LogReader(path)
    assert reader.read() == []
    path.write_text('{"event": "attached", "step": 0}\n{"event": "dec')
    assert [event["event"] for event in reader.read()] == ["attached"]
    with path.open("a") as file:
        file.write('ision", "step": 1}\nnonsense\n{"event": 3}\n{"event": "late", "step": 2}\n')
    assert [event["event"] for event in reader.read()] == ["decision", "late"]
    assert reader.read() == []


def test_latest_decisions_are_sent_and_all_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    decision = {
        "event": "decision",
        "rules": {"space": "ok", "gain": "too small"},
        "predicted": {"seconds": 0.1, "peak_bytes": 50},
        "measured": None,
        "memory_budget_bytes": 100,
    }
    events = [{**decision, "step": step} for step in range(500)]
    tracker = Tracker(tmp_path, tmp_path, "run")
    sender = Sender(tracker)
    sender.send(events)
    rows = [json.loads(row) for row in (tmp_path / SPOOL).read_text().splitlines()]
    sent = [row for row in rows if row["kind"] == "metrics"]
    assert len(sent) == 20
    assert sent[-1]["values"]["refused"] == 500
    assert metrics_of(events[0], Counts())["pressure"] == 0.5

"""Tests of MLflow tracking: logged values arrive, and an unreachable server causes only a warning."""

import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import tiny_job
from leftovers import wait_until

import autotune
from autotune.records.to_mlflow import EXPERIMENT, tracking_uri
from autotune.records.tracking import CURSOR, SPOOL, Tracker, send_pending


def runs_in(uri: str) -> list:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    return [] if experiment is None else client.search_runs([experiment.experiment_id])


def log_something(tracker: Tracker, folder: Path) -> None:
    tracker.params({"a": 1})
    key = tracker.begin("trial 0")
    tracker.metrics({"cost": 0.5, "missing": None}, step=3, run=key)
    tracker.tags({"failure": "timeout"}, run=key)
    tracker.end(key, failed=True)
    (folder / "plan.json").write_text("{}")
    tracker.artifact(folder / "plan.json")


def test_command_is_a_parent_run_with_nested_runs_and_artifacts(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    tracker = Tracker(tmp_path, folder, "parent")
    log_something(tracker, folder)
    tracker.close()
    found = {run.info.run_name: run for run in runs_in(tracking_uri(tmp_path))}
    parent, trial = found["parent"], found["trial 0"]
    assert trial.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert trial.data.metrics == {"cost": 0.5}
    assert trial.data.tags["failure"] == "timeout"
    assert (parent.info.status, trial.info.status) == ("FINISHED", "FAILED")
    assert parent.data.params == {"a": "1"}
    assert list((tmp_path / "artifacts").rglob("plan.json"))


def test_tuning_logs_each_trial_with_plan_and_policy(tmp_path: Path) -> None:
    document = autotune.tune(tiny_job.job(), "ppo-scratch", steps=48, runs_dir=tmp_path)
    found = runs_in(tracking_uri(tmp_path))
    trials = [run for run in found if "trial" in run.info.run_name]
    rows = Path(document["run"], "trials.jsonl").read_text().splitlines()
    assert len(trials) == len(rows)
    assert all("seconds_per_step" in run.data.metrics or "failure" in run.data.tags for run in trials)
    names = {path.name for path in (tmp_path / "artifacts").rglob("*")}
    assert {"plan.json", "manifest.json", "policy.safetensors"} <= names
    (parent,) = (run for run in found if "mlflow.parentRunId" not in run.data.tags)
    assert (parent.data.params["method"], parent.data.params["steps"]) == ("ppo-scratch", "48")
    assert parent.data.metrics["cost"] == document["measured"]["cost"]
    assert parent.data.tags["plan"] == str(autotune.Plan.from_json(document["plan"]))


def test_compared_runs_have_the_times_at_which_they_trained(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    job = tiny_job.make(target=None, max_steps=12, evaluate_every=4)
    document = autotune.compare(job, ["sqrt"], seeds=2, runs_dir=tmp_path)
    client = MlflowClient(tracking_uri=tracking_uri(tmp_path))
    assert client.get_experiment_by_name(EXPERIMENT).tags["mlflow.experimentKind"] == "custom_model_development"
    found = {run.info.run_name: run for run in runs_in(tracking_uri(tmp_path))}
    for arm in document["arms"]:
        for run in arm["runs"]:
            logged = found[f"{arm['name']} seed {run['seed']}"]
            assert [logged.info.start_time, logged.info.end_time] == [int(at_s * 1e3) for at_s in run["ran_s"]]
            assert logged.data.params["plan"] == str(autotune.Plan.from_json(arm["plan"]))
            seen = client.get_metric_history(logged.info.run_id, "metric")
            times = [int((run["ran_s"][0] + seconds) * 1e3) for seconds, _, _ in run["curve"]]
            assert [metric.timestamp for metric in sorted(seen, key=lambda one: one.step)] == times
    (parent,) = (run for run in found.values() if "mlflow.parentRunId" not in run.data.tags)
    assert parent.data.params["job"] == job.name
    assert parent.data.metrics["memory_ratio.sqrt"] == document["against_baseline"][0]["memory_ratio"]


class _Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(500)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def dead_server(kind: str) -> Iterator[str]:
    if kind == "absent":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    elif kind == "hanging":
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(16)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    else:
        server = HTTPServer(("127.0.0.1", 0), _Refusing)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["absent", "hanging", "answering 500"])
def test_unreachable_server_causes_one_warning_and_everything_is_sent_later(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    with dead_server(kind) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        tracker = Tracker(tmp_path, folder, "parent")
        # Logging only appends to a file; waiting for the server each time would exceed the timeout.
        for _ in range(200):
            tracker.metrics({"x": 1.0})
        log_something(tracker, folder)
        with caplog.at_level(logging.WARNING):
            tracker.close()
    assert len([line for line in caplog.messages if "does not answer" in line]) == 1
    count = len((folder / SPOOL).read_text().splitlines())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'later.db'}")
    assert send_pending(tmp_path) == count
    assert {run.info.run_name for run in runs_in(tracking_uri(tmp_path))} == {"parent", "trial 0"}
    assert json.loads((folder / CURSOR).read_text())["sent"] == count
    assert send_pending(tmp_path) == 0


def test_runs_left_open_by_a_kill_are_ended_on_resume_without_duplicates(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    code = f"""
import os
from pathlib import Path
from autotune.records.tracking import Tracker
tracker = Tracker(Path({str(tmp_path)!r}), Path({str(folder)!r}), "first")
key = tracker.begin("seed 0")
tracker.metrics({{"won": 1.0}}, step=1, run=key)
tracker.settle(60.0)
with open({str(folder / SPOOL)!r}, "a") as file:
    file.write('{{"kind": "met')
    file.flush()
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    send_pending(tmp_path)
    tracker = Tracker(tmp_path, folder, "second")
    log_something(tracker, folder)
    tracker.close()
    assert send_pending(tmp_path) == 0
    found = sorted((run.info.run_name, run.info.status) for run in runs_in(tracking_uri(tmp_path)))
    assert found == [("first", "KILLED"), ("second", "FINISHED"), ("seed 0", "KILLED"), ("trial 0", "FAILED")]


BEGINS = """
import os, sys
from pathlib import Path
from autotune.records.to_mlflow import ToMLflow
from autotune.records.tracking import Tracker

runs, fatal = Path(sys.argv[1]), sys.argv[2]
begin = ToMLflow.begin

def last(self, name, *about):
    run = begin(self, name, *about)
    if name == fatal:
        # Before its id is saved.
        os._exit(9)
    return run

ToMLflow.begin = last if fatal else begin
tracker = Tracker(runs, runs / "r", "first" if fatal else "second")
tracker.begin("seed 0" if fatal else "seed 1")
tracker.close()
"""


@pytest.mark.parametrize("fatal", ["seed 0", pytest.param("first", marks=pytest.mark.slow)])
def test_run_begun_just_before_a_kill_is_not_begun_again(fatal: str, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    command = [sys.executable, "-c", BEGINS, str(tmp_path)]
    assert subprocess.run([*command, fatal], check=False).returncode == 9
    subprocess.run([*command, ""], check=True)
    found = sorted(run.info.run_name for run in runs_in(tracking_uri(tmp_path)))
    assert found == ["first", "second", "seed 0", "seed 1"]


MAKES = """
import sys
from pathlib import Path
from autotune.records.tracking import Tracker

runs = Path(sys.argv[1])
(runs / sys.argv[2]).mkdir()
Tracker(runs, runs / sys.argv[2], sys.argv[2]).close()
"""


@pytest.mark.slow
def test_partially_created_database_is_created_again_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKES, str(tmp_path)]
    with subprocess.Popen([*command, "killed"]) as making:
        wait_until(lambda: (tmp_path / ".mlflow.db.making").exists(), "no database is made")
        making.kill()
    assert not (tmp_path / "mlflow.db").exists()
    # Two at once, too.
    both = [subprocess.Popen([*command, name]) for name in ("one", "two")]
    assert [process.wait() for process in both] == [0, 0]
    # On a slow machine, the commands end before all is sent.
    send_pending(tmp_path)
    names = {run.info.run_name for run in runs_in(tracking_uri(tmp_path))}
    assert names == {"killed", "one", "two"}
    assert not list(tmp_path.glob(".mlflow*"))


def test_command_continues_without_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dead_server("absent") as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        document = autotune.tune(tiny_job.job(), "random", steps=48, runs_dir=tmp_path)
    assert Path(document["run"], "plan.json").is_file()


def test_full_disk_drops_records_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    tracker = Tracker(tmp_path, folder, "parent")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autotune.records.tracking.append_json_line", full)
    with caplog.at_level(logging.WARNING):
        tracker.metrics({"x": 1.0})
        tracker.close()
    assert any("No space left" in line for line in caplog.messages)


def test_run_rejected_by_the_server_does_not_block_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

    create = MlflowClient.create_run

    def refusing(client: MlflowClient, experiment: str, **about: object) -> object:
        if about["run_name"] == "refused":
            raise MlflowException("name", INVALID_PARAMETER_VALUE)
        return create(client, experiment, **about)

    monkeypatch.setattr(MlflowClient, "create_run", refusing)
    for name in ("refused", "taken"):
        (tmp_path / name).mkdir()
        begin = {"kind": "begin", "run": "0", "step": 0, "values": {"name": name, "parent": None}}
        params = {"kind": "params", "run": "0", "step": 0, "values": {"a": "1"}}
        (tmp_path / name / SPOOL).write_text("".join(json.dumps(row) + "\n" for row in (begin, params)))
    send_pending(tmp_path)
    (run,) = runs_in(tracking_uri(tmp_path))
    assert (run.info.run_name, run.data.params) == ("taken", {"a": "1"})
    assert send_pending(tmp_path) == 0

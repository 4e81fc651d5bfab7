"""Tests of studies and logs in a real PostgreSQL: no result is lost or duplicated, and standard tools can read them."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import optuna
import postgres
import pytest
import sqlalchemy
from kills import JOB, kill_campaigns
from test_env import SPACE
from test_resume import tell

from autotune.agents.optuna_search import OptunaSearch, _StudySearch
from autotune.agents.study_store import StudyStore, checked
from autotune.cli.main import run
from autotune.errors import InputError
from autotune.io.addresses import without_secrets
from autotune.records.run_directory import RunDirectory

reachable = pytest.mark.skipif(
    not postgres.available() or importlib.util.find_spec("psycopg") is None, reason="there is no PostgreSQL here"
)


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    with postgres.server() as found:
        yield found


@pytest.fixture(scope="module")
def url(server: postgres.Server) -> str:
    return server.url


def studies(url: str) -> dict[str, list[optuna.trial.FrozenTrial]]:
    storage = optuna.storages.RDBStorage(url)
    try:
        return {study.study_name: storage.get_all_trials(study._study_id) for study in storage.get_all_studies()}
    finally:
        storage.remove_session()
        storage.engine.dispose()


@pytest.mark.slow
@reachable
def test_study_in_postgresql_proposes_the_same_as_in_sqlite(url: str, tmp_path: Path) -> None:
    def go(place: Path | StudyStore) -> list[object]:
        search = OptunaSearch(SPACE, place, 5, [SPACE.baseline()])
        plans = []
        for _ in range(12):
            plans.append(search.ask())
            tell(search, plans[-1])
        search.close()
        return plans

    assert go(StudyStore.shared(checked(url), "here")) == go(tmp_path)
    assert len(studies(checked(url))["here tune"]) == 12


@pytest.mark.slow
@reachable
def test_tuning_keeps_its_study_and_its_log_in_postgresql(server: postgres.Server, tmp_path: Path) -> None:
    url, log = server.url, checked(server.database("mlflow"))
    here = tmp_path / "here"
    here.mkdir()
    command = [sys.executable, "-m", "autotune.cli.main", "tune", str(JOB), "--method", "optuna", "--steps", "70"]
    environment = {**os.environ, "PYTHONPATH": str(JOB.parent.parent), "MLFLOW_TRACKING_URI": log}
    done = subprocess.run(
        [*command, "--storage", url, "--runs-dir", str(tmp_path), "--json"],
        env=environment,
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(here.iterdir())
    assert list((tmp_path / "artifacts").rglob("tuned.json"))
    folder = RunDirectory.open(Path(json.loads(done.stdout)["run"]))
    assert folder.read("config.json")["asked"]["storage"] == url
    assert not (folder.path / "optuna.db").exists()
    told = studies(checked(url))[f"{folder.path.name} tune"]
    measured = [trial for trial in folder.lines("trials.jsonl") if not trial["final"]]
    # The result of a repeated proposal is recorded again, but the plan is not measured again.
    plans = [trial.user_attrs["plan"] for trial in told if trial.state.name == "COMPLETE"]
    assert len(plans) >= len(measured) > 5
    assert all(trial["plan"] in plans for trial in measured)
    engine = sqlalchemy.create_engine(log)
    with engine.connect() as connection:
        names = [name for (name,) in connection.execute(sqlalchemy.text("select name from runs"))]
    engine.dispose()
    assert any(name.startswith("tune tiny optuna") for name in names)
    assert not (tmp_path / "mlflow.db").exists()


@reachable
@pytest.mark.slow
def test_kill_9_at_random_instants_loses_nothing_in_postgresql(url: str, tmp_path: Path) -> None:
    acknowledged: dict[Path, int] = {}

    def look(folder: Path, done: bool) -> None:
        told = studies(checked(url)).get(f"{folder.name} tune", [])
        states = [trial.state.name for trial in told]
        assert states.count("COMPLETE") >= acknowledged.get(folder, 0)
        acknowledged[folder] = states.count("COMPLETE")
        if done:
            measured = [trial for trial in RunDirectory.open(folder).lines("trials.jsonl") if not trial["final"]]
            assert "RUNNING" not in states
            assert states.count("COMPLETE") >= len(measured)

    kill_campaigns(["tune", "--method", "optuna", "--steps", "120", "--storage", url], tmp_path, 6, 4, look)


@reachable
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("optuna_dashboard") is None, reason="optuna-dashboard is not installed")
def test_optuna_dashboard_opens_our_studies(url: str) -> None:
    search = OptunaSearch(SPACE, StudyStore.shared(checked(url), "shown"), 5)
    tell(search, search.ask())
    search.close()
    program = Path(sys.executable).parent / "optuna-dashboard"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([str(program), checked(url), "--port", str(port), "--host", "127.0.0.1"])
    try:
        for _ in range(60):
            time.sleep(0.5)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/studies", timeout=5) as answer:
                    names = [study["study_name"] for study in json.load(answer)["study_summaries"]]
                    break
            except OSError:
                continue
        assert "shown tune" in names
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("mysql://somewhere/x", "--storage: is 'mysql://somewhere/x' (allowed: postgresql://user@host:port/database)"),
        ("postgresql://", "is 'postgresql://'"),
        ("postgresql://me:secret@127.0.0.1:1/x", "postgresql://me@127.0.0.1:1/x does not answer"),
    ],
)
def test_unusable_storage_is_rejected_in_one_line(
    storage: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "does not answer" in said and importlib.util.find_spec("psycopg") is None:
        said = "the driver is missing"
    options = ["--method", "optuna", "--storage", storage, "--runs-dir", str(tmp_path / "runs")]
    assert run(["tune", str(JOB), *options]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "secret" not in told
    assert told.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_database_that_belongs_to_mlflow_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql+psycopg2://you:secret@host:5432/x")
    options = ["--method", "optuna", "--storage", "postgresql://me@host:5432/x", "--runs-dir", str(tmp_path / "runs")]
    assert run(["tune", str(JOB), *options]) == 2
    assert "MLflow's database" in capsys.readouterr().err


def test_password_is_never_written() -> None:
    assert without_secrets("postgresql://me:se:cr@t@host:5/x") == "postgresql://me@host:5/x"
    assert without_secrets("postgresql://host/x") == "postgresql://host/x"
    with pytest.raises(InputError) as caught:
        checked("redis://me:secret@host")
    assert "secret" not in str(caught.value)


def test_different_searches_in_one_run_have_separate_studies(tmp_path: Path) -> None:
    for name, told in (("tune", 1), ("prices", 2)):
        search = _StudySearch(SPACE, tmp_path, name, 1)
        for _ in range(told):
            search.study.tell(search.study.ask(), 1.0)
        search.close()
    found = studies(f"sqlite:///{tmp_path / 'optuna.db'}")
    assert {name: len(trials) for name, trials in found.items()} == {"tune": 1, "prices": 2}

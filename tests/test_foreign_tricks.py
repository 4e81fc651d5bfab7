"""Tests of attacks by a run folder that no single document shows: journals, links, nesting and omitted values."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune import InputError, RunDirectoryError
from autotune.agents.optuna_search import RecipeStudy
from autotune.agents.recipe_space import Range
from autotune.agents.study_store import STORAGE_FILE
from autotune.cli.main import run as run_command
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import solve
from autotune.errors import BudgetError, ProfileError
from autotune.io.addresses import scrubbed, without_secrets
from autotune.io.run_folder import WriterLock
from autotune.profiling.profile_index import _is_source
from autotune.records.results import trials_of
from autotune.records.run_directory import RunDirectory
from autotune.records.to_mlflow import DATABASE, EXPERIMENT, tracking_uri
from autotune.records.tracking import Tracker, send_pending
from autotune.records.tracking_spool import CURSOR, SPOOL
from autotune.report.sheets import _as_csv
from autotune.simulator.random_jobs import Shape, draw_profile

PLAN: dict[str, Any] = {"version": 1, "accumulation_steps": 1, "precision": {}, "storage": {}}
# More nested folders than Python's recursion limit.
DEEP = 1100


def rigged(database: Path, victim: Path) -> None:
    """Make a database with the journal of a multi-database transaction that names a file as super-journal."""
    with sqlite3.connect(database) as made:
        made.execute("create table t (x)")
    made.close()
    name, magic, page = os.fsencode(victim), bytes.fromhex("d9d505f920a163d7"), 4096
    head = magic + struct.pack(">IIIII", 0, 0, database.stat().st_size // page, 512, page)
    tail = struct.pack(">I", 2**30 // page + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    database.with_name(f"{database.name}-journal").write_bytes(head.ljust(512, b"\0") + tail)


def test_hot_journal_attack_works_on_plain_sqlite(tmp_path: Path) -> None:
    victim = tmp_path / "precious"
    victim.write_text("x")
    rigged(tmp_path / "some.db", victim)
    with sqlite3.connect(tmp_path / "some.db") as opened:
        opened.execute("select * from sqlite_master").fetchall()
    opened.close()
    assert not victim.exists()


def test_journal_of_a_study_deletes_no_outside_file(tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "precious"
    run.mkdir()
    victim.write_text("x")
    rigged(run / STORAGE_FILE, victim)
    with pytest.raises(RunDirectoryError, match="names another file"):
        RecipeStudy({"a": Range(low=0.1, high=1.0)}, run, 0, {"a": 0.5})
    assert victim.read_text() == "x"


def test_journal_of_a_tracking_database_deletes_no_outside_file(tmp_path: Path) -> None:
    run, victim = tmp_path / "runs" / "run", tmp_path / "precious"
    run.mkdir(parents=True)
    victim.write_text("x")
    rigged(run.parent / DATABASE, victim)
    Tracker(run.parent, run, "parent").close()
    assert victim.read_text() == "x"


@pytest.mark.parametrize("name", [DATABASE, f".{DATABASE}.lock"])
def test_links_in_place_of_a_tracking_database_are_not_followed(tmp_path: Path, name: str) -> None:
    run, victim = tmp_path / "runs" / "run", tmp_path / "precious"
    run.mkdir(parents=True)
    victim.write_bytes(b"")
    if name != DATABASE:
        victim.write_text("x")
    before = victim.read_bytes()
    (run.parent / name).symlink_to(victim)
    Tracker(run.parent, run, "parent").close()
    assert victim.read_bytes() == before


@pytest.mark.parametrize("place", ["http://127.0.0.1:9/grab", pytest.param("elsewhere", marks=pytest.mark.slow)])
def test_artifacts_stay_in_the_run_folder_whatever_its_database_contains(tmp_path: Path, place: str) -> None:
    from mlflow import MlflowClient

    run, elsewhere = tmp_path / "runs" / "run", tmp_path / "elsewhere"
    run.mkdir(parents=True)
    location = place if "//" in place else elsewhere.as_uri()
    MlflowClient(tracking_uri=tracking_uri(run.parent)).create_experiment(EXPERIMENT, artifact_location=location)
    tracker = Tracker(run.parent, run, "parent")
    (run / "plan.json").write_text("{}")
    tracker.artifact(run / "plan.json")
    tracker.close()
    assert not elsewhere.exists()
    # Skipped records do not block others.
    assert json.loads((run / CURSOR).read_text())["sent"] == 3


def test_artifacts_never_overwrite_a_link(tmp_path: Path) -> None:
    run, victim = tmp_path / "runs" / "run", tmp_path / "precious"
    run.mkdir(parents=True)
    victim.write_text("x")
    (run / "plan.json").write_text("{}")
    tracker = Tracker(run.parent, run, "parent")
    tracker.artifact(run / "plan.json")
    tracker.close()
    (copy,) = (run.parent / "artifacts").rglob("plan.json")
    copy.unlink()
    copy.symlink_to(victim)
    again = Tracker(run.parent, run, "parent")
    again.artifact(run / "plan.json", "run-1")
    again.close()
    assert victim.read_text() == "x"


def test_record_rejected_by_the_server_blocks_no_other_run(tmp_path: Path) -> None:
    begin = {"kind": "begin", "run": "run-1", "step": 0, "values": {"name": "n", "parent": None}}
    twice = [{"kind": "params", "run": "run-1", "step": 0, "values": {"x": value}} for value in "12"]
    for name, rows in (("1-refused", [begin, *twice]), ("2-gone", [begin, twice[0]]), ("3-fine", [begin])):
        (tmp_path / name).mkdir()
        (tmp_path / name / SPOOL).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    # A server's identifier of a run that it no longer has, or never had.
    (tmp_path / "2-gone" / CURSOR).write_text(json.dumps({"sent": 1, "ids": {"run-1": "0" * 32}}))
    assert send_pending(tmp_path) == 5
    assert send_pending(tmp_path) == 0


def test_deeply_nested_folders_are_searched(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    (run / SPOOL).write_text("")
    here = os.open(run, os.O_RDONLY)
    for _ in range(DEEP):
        os.mkdir("a", dir_fd=here)
        below = os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.symlink("/", "out", dir_fd=here)
    os.close(here)
    try:
        with pytest.raises(RunDirectoryError, match="is a link"):
            RunDirectory.open(run)
        assert send_pending(tmp_path) == 0
    finally:
        # Python itself cannot remove folders nested this deep.
        subprocess.run(["rm", "-r", str(run / "a")], check=True)


def test_folder_named_like_a_temporary_file_blocks_no_write(tmp_path: Path) -> None:
    (tmp_path / ".autotune-x.tmp").mkdir()
    (tmp_path / ".autotune-y.tmp").write_text("left by a kill")
    WriterLock(tmp_path).close()
    assert not (tmp_path / ".autotune-y.tmp").exists()


@pytest.mark.parametrize(
    ("address", "secret"),
    [
        ("postgresql://u:1234#rest@host/db", "1234"),
        ("http://user:12345#word@host", "12345"),
        ("http://hidden-token#rest@host", "hidden-token"),
        ("postgresql://host/db?password=first#second", "second"),
        ("postgresql://host/db?password=first&second", "second"),
    ],
)
def test_secret_containing_a_hash_sign_is_fully_hidden(address: str, secret: str) -> None:
    assert secret not in without_secrets(address)
    assert secret not in scrubbed(f"no such server: {address}", address)


def test_secret_containing_a_hash_sign_is_removed_from_library_messages() -> None:
    assert "first" not in scrubbed("bad password 'first#second'", "postgresql://host/db?password=first#second")
    assert "second" not in scrubbed("bad password 'first#second'", "postgresql://host/db?password=first#second")
    assert "token" not in scrubbed("no user 'token#rest'", "http://token#rest@host")


def test_profile_index_leads_to_no_outside_file(tmp_path: Path) -> None:
    assert _is_source(tmp_path / "job.py", [tmp_path])
    assert not _is_source(tmp_path / ".." / "other" / "job.py", [tmp_path])


@pytest.mark.parametrize("row", [{}, {"method": "x", "plan": PLAN, "measurement": {}}])
def test_forged_trials_are_rejected_before_they_explain_a_plan(
    tmp_path: Path, row: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trials.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=r"trials\.jsonl line 1"):
        trials_of(RunDirectory(tmp_path))
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    assert run_command(["explain", str(tmp_path / "plan.json"), "--job", "digits"]) == 2
    assert "trials.jsonl line 1" in capsys.readouterr().err


CONFIG = {"version": 1, "verb": "attach", "job": "m", "mode": "a", "stage": "b", "batching": "c", "policy": "d"}
ATTACHED: dict[str, Any] = {"event": "attached", "step": 0, "version": 1, "model": "m", "units": ["a"], "locks": {}}
PROFILED: dict[str, Any] = {"event": "profiled", "step": 0, "units": 1, "static_bytes": 1, "batch_bytes": 1}
DETACHED: dict[str, Any] = {"event": "detached", "step": 9, "reason": "x"}


@pytest.mark.parametrize(
    ("first", "profiled", "last"),
    [
        ({"environment": None}, {}, {}),
        ({"baseline": None}, {}, {}),
        ({"recomputable": None}, {}, {}),
        ({"policy": None, "mode": None, "stage": None}, {}, {}),
        ({}, {"locks": None}, {}),
        ({}, {}, {"locks": None}),
        ({"baseline": {"storage": 5}}, {}, {}),
    ],
)
def test_accepted_decision_log_can_be_reported_and_watched(
    tmp_path: Path, first: dict[str, Any], profiled: dict[str, Any], last: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    events = (ATTACHED | first, PROFILED | profiled, DETACHED | last)
    (tmp_path / "decisions.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    damaged = first.get("baseline") is not None
    for command in ("report", "watch"):
        assert run_command([command, str(tmp_path)]) == (2 if damaged else 0)


def test_table_has_columns_for_partial_values_and_no_formulas() -> None:
    text = _as_csv([{"arm": "=HYPERLINK(1)", "x": -1.5}, {"arm": "@sum", "grams": None}])
    assert text.splitlines() == ["arm,x,grams", "'=HYPERLINK(1),-1.5,", "'@sum,,"]


def profile() -> dict[str, Any]:
    """Return the JSON document of a profile."""
    made = draw_profile(np.random.default_rng(0), Shape()).to_json()
    found: dict[str, Any] = json.loads(json.dumps(made))
    return found


def test_profile_with_inconsistent_choices_per_unit_is_rejected() -> None:
    document = profile()
    for table in document["tables"]:
        segment = next(one for one in table["segments"] if one["unit"])
        name, cost = next(iter(segment["costs"].items()))
        table["segments"].append({**segment, "costs": dict(segment["costs"])})
        segment["costs"] = {name: cost}
    with pytest.raises(ProfileError, match="different choices"):
        Profile.from_json(document)


def test_small_profile_that_would_exhaust_solver_memory_is_rejected() -> None:
    document = profile()
    for table in document["tables"]:
        table["segments"] += [next(one for one in table["segments"] if one["unit"] is None)] * 2000
        last = len(table["segments"]) - 1
        table["boundaries"] += [{"born": 0, "last_use": last, "size_bytes": 1, "held": False, "keepers": {}}] * 2000
    with pytest.raises(ProfileError, match="more than the limit"):
        Profile.from_json(document)


@pytest.mark.parametrize("size", [2**40, 2**55, 2**59])
@pytest.mark.parametrize("budget", [None, 2**30, 2**61])
def test_profile_with_sizes_of_no_machine_gives_a_plan_that_fits_or_one_line(size: int, budget: int | None) -> None:
    document = profile()
    for table in document["tables"]:
        for segment in table["segments"]:
            for cost in segment["costs"].values():
                cost["saved_bytes"] = size
    found = Profile.from_json(document)
    with contextlib.nullcontext() if budget is None else contextlib.suppress(BudgetError):
        solution = solve(found, budget)
        assert solution.peak_bytes == peak_bytes(found, solution.plan)
        assert budget is None or solution.peak_bytes <= budget


def test_predicted_time_too_small_to_divide_by_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicted = {"seconds": 5e-324, "peak_bytes": 0.0, "gain": None}
    decision = {"event": "decision", "step": 1, "observation": None, "proposal": PLAN, "rules": {}, "applied": True}
    seen = {"seconds_per_step": 1e12, "peak_bytes": 1.0}
    ran = {"seconds": 1e12, "predicted": 5e-324}
    events = (ATTACHED, *[{**decision, "predicted": predicted, "measured": seen, "ran": ran}] * 3, DETACHED)
    (tmp_path / "decisions.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for command in ("report", "replay", "watch"):
        assert run_command([command, str(tmp_path), "--json"]) == 2
        assert "ran.predicted is 0.0" in capsys.readouterr().err

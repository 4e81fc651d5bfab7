"""Tests of commands killed at any instant: nothing acknowledged is lost or repeated, and nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from kills import PROGRAM, Kill, kill_campaigns, killed
from test_train import LONG, recipe_file

from autotune.live.decision_log import LOG_NAME, read_log
from autotune.records.journal import JOURNAL
from autotune.records.run_directory import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
COMMANDS = ("tune", "isolated", "compare", "train", "attached")


def kills_of(command: str) -> int:
    """Return the number of kills of a command: its share of all kills."""
    wanted = int(os.environ.get("KILLS", "8"))
    return wanted // len(COMMANDS) + (COMMANDS.index(command) < wanted % len(COMMANDS))


def see_that_it_is_sent_once(folder: Path) -> None:
    """Check that the log of a finished run is complete, and that no run in it was begun twice."""
    spooled = [json.loads(row) for row in (folder / "tracking.jsonl").read_text().splitlines()]
    assert json.loads((folder / "tracking-sent.json").read_text())["sent"] == len(spooled)
    engine = sqlalchemy.create_engine(f"sqlite:///{folder.parent / 'mlflow.db'}")
    with engine.connect() as connection:
        names = [name for (name,) in connection.execute(sqlalchemy.text("select name from runs"))]
    engine.dispose()
    begun = [row["values"]["name"] for row in spooled if row["kind"] == "begin"]
    assert all(names.count(name) == begun.count(name) for name in begun if "trial" in name)
    assert not list(folder.parent.glob(".mlflow*"))


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ("tune", ["tune", "--method", "random", "--steps", "400"]),
        ("isolated", ["tune", "--method", "optuna", "--steps", "200", "--isolate"]),
        ("compare", ["compare", "--arms", "random,uniform-bf16", "--seeds", "6", "--steps", "60"]),
    ],
)
def test_killed_campaign_is_resumed_and_leaves_nothing_behind(
    command: str, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = kills_of(command)
    monkeypatch.setenv("KILLS", str(wanted))
    acknowledged: dict[Path, list[Any]] = {}

    def look(folder: Path, done: bool) -> None:
        run = RunDirectory.open(folder)
        now = run.lines(JOURNAL) if (folder / JOURNAL).is_file() else []
        before = acknowledged.get(folder, [])
        assert now[: len(before)] == before
        acknowledged[folder] = now
        if done:
            if command == "compare":
                made = [(row["what"]["run"], row["what"]["seed"]) for row in now if "seed" in row["what"]]
                assert len(set(made)) == len(made) >= 18
            else:
                numbers = [trial["number"] for trial in run.lines("trials.jsonl")]
                assert numbers == list(range(len(numbers)))
            see_that_it_is_sent_once(folder)

    kill_campaigns(asked, tmp_path, wanted, COMMANDS.index(command), look, last_s=20.0)


def test_killed_training_is_resumed_and_leaves_nothing_behind(tmp_path: Path) -> None:
    runs, generator, kills = tmp_path / "runs", random.Random(8), 0
    runs.mkdir()
    begin = [*PROGRAM, "train", "--recipe", str(recipe_file(tmp_path, LONG)), "--runs-dir", str(runs)]
    command, acknowledged = begin, dict[str, list[Any]]()
    while kills < kills_of("train"):
        code, struck = killed([*command, "--processes", "2"], tmp_path / "tmp", Kill.drawn(generator, 2.0, 25.0))
        kills += struck
        command = see_that_rollouts_stay(runs, acknowledged) or begin
        if code == 0:
            command = begin
    code, _ = killed([*command, "--processes", "2"], tmp_path / "tmp", None)
    assert code == 0
    see_that_rollouts_stay(runs, acknowledged)


def see_that_rollouts_stay(runs: Path, acknowledged: dict[str, list[Any]]) -> list[str]:
    """Check that no rollout is lost or duplicated, and return the command that resumes the latest training."""
    command: list[str] = []
    for folder in sorted(runs.glob("*-train-*")):
        for path in folder.glob("seed-*.jsonl"):
            now = [json.loads(row)["decisions"] for row in path.read_text().splitlines() if row.endswith("}")]
            before = acknowledged.get(str(path), [])
            assert now[: len(before)] == before
            assert sorted(set(now)) == now
            acknowledged[str(path)] = now
        if (folder / "trained.json").is_file():
            assert all(len(acknowledged[str(folder / f"seed-{seed}.jsonl")]) == 40 for seed in (4, 9))
            see_that_it_is_sent_once(folder)
        elif (folder / "config.json").is_file():
            command = [*PROGRAM, "train", "--resume", str(folder)]
    return command


ATTACHED = """
import sys, time
import autotune, torch
from test_live import RESTLESS, deep_gpt, gpt_loss, token_batches

model = deep_gpt()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
tuner = autotune.attach(
    model, optimizer, "exact", limits=RESTLESS, memory_budget_bytes=10**9, runs_dir=sys.argv[1],
    settings=autotune.Settings(report_to="mlflow"),
)
for batch in token_batches(1000):
    for micro in tuner.micro_batches(batch):
        tuner.backward(gpt_loss(model, micro))
    tuner.step()
    time.sleep(0.05)
"""


def test_killed_attached_run_keeps_its_log_intact(tmp_path: Path) -> None:
    generator = random.Random(9)
    for number in range(kills_of("attached")):
        runs = tmp_path / str(number)
        kill = Kill.drawn(generator, 5.0, 25.0)
        # Only Python itself turns signals into exceptions.
        codes = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}
        _, struck = killed([sys.executable, "-c", ATTACHED, str(runs)], tmp_path / "tmp", kill, codes)
        assert struck
        for folder in runs.glob(f"*/{LOG_NAME}"):
            events = read_log(folder)
            steps = [event["step"] for event in events]
            assert steps == sorted(steps)
            if kill.whom != "all" and any(event["event"] == "decision" for event in events):
                see_that_it_is_sent_once(folder.parent)

"""Tests of ``autotune watch``, which shows a growing log in a process separate from the run."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_live import RESTLESS, Wanders, deep_gpt, gpt_loss, token_batches, train

import autotune
from autotune import Storage
from autotune.cli.main import run as run_command
from autotune.cli.terminal_panel import line, panel, strip
from autotune.errors import InputError
from autotune.live.decision_log import LOG_NAME
from autotune.plan import Plan
from autotune.report import standing
from autotune.report.standing import Snapshot, Watched

OLD = Path(__file__).parent / "fuzz" / "specimens" / "attach"
UNITS = ("embedding", *(f"blocks.{number}" for number in range(6)), "head")
BLOCKS = UNITS[1:-1]
SNAPSHOT = Snapshot(
    name="net",
    stage="act",
    units=UNITS,
    recomputable=frozenset(BLOCKS),
    total_steps=5000,
    plan=Plan(storage=dict.fromkeys(BLOCKS[:4], Storage.RECOMPUTE)),
    steps=1200,
    acting=True,
    switches=14,
    placed=310,
    memory_budget_bytes=20 * 2**30,
    predicted_peak_bytes=15 * 2**30,
    measured_peak_bytes=14 * 2**30,
    predicted_s=0.4,
    measured_s=0.41,
    overhead_frac=0.004,
)
CONFIG = {"version": 1, "verb": "attach", "job": "m", "mode": "a", "stage": "b", "batching": "c", "policy": "d"}
ATTACHED: dict[str, Any] = {"event": "attached", "step": 0, "version": 1, "model": "m", "units": ["a"], "locks": {}}
TRIPPED: dict[str, Any] = {"event": "tripped", "step": 7, "reason": "two slow windows"}
DETACHED: dict[str, Any] = {"event": "detached", "step": 9, "reason": "it was time"}
DECISION: dict[str, Any] = {
    "event": "decision",
    "step": 5,
    "observation": None,
    "proposal": None,
    "rules": {},
    "applied": False,
    "predicted": {"seconds": 0.1, "peak_bytes": 50, "gain": None},
    "memory_budget_bytes": 100,
}


def snapshot(**changes: Any) -> Snapshot:
    return dataclasses.replace(SNAPSHOT, **changes)


def shown(renderable: Any, width: int = 100) -> str:
    console = Console(record=True, width=width, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(renderable)
    return console.export_text()


def written(folder: Path, *events: dict[str, Any]) -> Path:
    """Write a run folder with a log of the given events."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / LOG_NAME).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return folder


class Run:
    """A tiny attached model that trains a few steps at a time."""

    def __init__(self, runs: Path) -> None:
        self.model = deep_gpt()
        optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.batches = token_batches(1000)
        budget = iter(range(600_000, 10**9, 1000))
        self.tuner = autotune.attach(
            self.model,
            optimizer,
            Wanders(),
            memory_budget_bytes=lambda: next(budget),
            limits=RESTLESS,
            runs_dir=runs,
        )
        assert self.tuner.folder is not None
        self.folder = self.tuner.folder

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for micro in self.tuner.micro_batches(next(self.batches)):
                self.tuner.backward(gpt_loss(self.model, micro))
            self.tuner.step()

    def decisions(self) -> int:
        return sum(event["event"] == "decision" for event in self.tuner.events)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Let child processes be interrupted, which a shell's jobs in the background, and their children, are not."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path / "runs")
    yield found
    found.tuner.detach()


def start(folder: Path, *options: str, **streams: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color"}
    # If tests run in several processes, these variables set a size that overrides the terminal's.
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "autotune.cli.main", "watch", str(folder), *options]
    return subprocess.Popen(command, env=environment, **streams)


class Terminal:
    """A terminal of a given size that records its output."""

    def __init__(self, columns: int = 100, rows: int = 30) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.written = b""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self.master, 65536):
                self.written += data
        except OSError:
            return

    def wait_for(self, text: str) -> str:
        wait_until(lambda: text in self.text, lambda: self.text)
        return self.text

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.written.decode("utf-8", errors="replace"))


def wait_until(holds: Callable[[], bool], told: Callable[[], str]) -> None:
    ends = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < ends, told()
        time.sleep(0.01)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    found = Terminal()
    yield found
    os.close(found.slave)
    found.reader.join(5)
    os.close(found.master)


# What is drawn.


def test_panel_shows_plan_pressure_noise_scale_times_overhead_and_trips() -> None:
    seen = snapshot(noise_scale=1024.4, trips=1, last_trip=(300, "two slow windows"), over_budget_steps=3)
    text = shown(panel(seen, 42.4))
    for part in (
        "step 1,200 of 5,000, last line 42 s ago",
        "▫▫▫▫▪▪",
        "4 of 6 recomputed, k = 1",
        "75% of 20.0 GiB: 15.0 GiB predicted",
        "14.0 GiB when last measured",
        "410.0 ms measured, 400.0 ms predicted (+2.5%)",
        "scale 1,024 samples",
        "14, and 310 placements; overhead 0.4%; 3 steps over",
        "1, at step 300: two slow windows",
    ):
        assert part in text, text
    assert "with weights" not in text


def test_panel_and_line_tell_what_is_expected_of_dips(tmp_path: Path) -> None:
    outlook = {"seen": 3, "windows": 2, "chance": 0.384, "left_bytes": 42 * 2**20}
    told = "3 so far, the last 2 decisions ago; 38% that one begins before the next decision, which leaves 42.0 MiB"
    watched = Watched(written(tmp_path / "run", ATTACHED, {**DECISION, "dips": outlook}))
    watched.look()
    assert watched.snapshot is not None
    assert told in shown(panel(watched.snapshot), width=140)
    assert told in line(watched.snapshot)
    assert watched.snapshot.to_json()["dips"] == outlook
    assert "dips" not in shown(panel(SNAPSHOT))


def test_unknown_values_are_shown_as_unknown() -> None:
    first = Snapshot(name="net", stage="act", units=UNITS, recomputable=frozenset(), total_steps=None, plan=Plan())
    text = shown(panel(first))
    assert "profiling" in text
    assert "None" not in text
    assert text.count("not known yet") == 3


def test_panel_is_as_wide_as_its_terminal() -> None:
    long = snapshot(name="net " * 99, trips=2, last_trip=(3, "why " * 99))
    for width in (40, 80, 200):
        lines = shown(panel(long, 7200.0), width).splitlines()
        assert {len(text) for text in lines} == {width}
        assert len(lines) == 9
    assert "\n" not in line(long)


def test_strip_has_a_cell_per_unit_and_never_more_than_fit() -> None:
    assert strip(SNAPSHOT).plain == "·▫▫▫▫▪▪·"
    assert strip(SNAPSHOT, plain=True).plain == ".oooo##."
    many = tuple(f"blocks.{number}" for number in range(202))
    plan = Plan(storage=dict.fromkeys(many[:99], Storage.RECOMPUTE))
    cells = strip(snapshot(units=many, recomputable=frozenset(many), plan=plan)).plain
    assert cells == "▫" * 16 + "◧" + "▪" * 17


def test_log_text_is_escaped_for_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;gone\x07\x1b[2J\u202e[red]\n"
    events = (ATTACHED | {"model": evil}, TRIPPED | {"reason": evil}, DETACHED | {"reason": evil})
    folder = written(tmp_path / "run", *events)
    watched = Watched(folder)
    watched.look()
    assert watched.snapshot is not None
    assert run_command(["watch", str(folder)]) == 0
    for text in (shown(panel(watched.snapshot)), line(watched.snapshot), capsys.readouterr().out):
        assert not set(text) & {"\x1b", "\x07", "\u202e"}
        assert "\\x1b" in text
        assert "[red]" in text


# What is read.


def test_snapshot_from_the_log_equals_the_tuner_status(run: Run) -> None:
    watched = Watched(run.folder)
    compared = 0
    for _ in range(40):
        before = run.decisions()
        run.train(1)
        watched.look()
        found, status = watched.snapshot, run.tuner.status
        assert found is not None
        assert (found.switches, found.trips) == (status["switches"], len(status["trips"]))
        if run.decisions() > before:
            decided = next(event for event in reversed(run.tuner.events) if event["event"] == "decision")
            assert Plan.from_json(decided["plan"]) == status["plan"]
            for name in (
                "steps",
                "acting",
                "placed",
                "over_budget_steps",
                "memory_budget_bytes",
                "measured_peak_bytes",
            ):
                assert getattr(found, name) == status[name], name
            compared += 1
    assert compared > 20
    run.tuner.detach()
    watched.look()
    found, status = watched.snapshot, run.tuner.status
    assert found is not None
    assert found.ended == "detach() was called"
    for name in ("plan", "predicted_peak_bytes", "predicted_s", "measured_s", "pressure", "overhead_frac"):
        assert getattr(found, name) == status[name], name


def test_written_lines_are_read_once_and_a_torn_line_is_deferred(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", ATTACHED, DECISION)
    watched = Watched(folder)
    (found,) = watched.look()
    assert (found.steps, found.state, found.pressure) == (5, "acting", 0.5)
    log = folder / LOG_NAME
    log.write_bytes(b"x" * log.stat().st_size)
    torn = json.dumps(TRIPPED)
    with log.open("a") as file:
        file.write(torn[:9])
    assert watched.look() == []
    with log.open("a") as file:
        file.write(torn[9:] + "\n" + json.dumps(DETACHED)[:5])
    (found,) = watched.look()
    assert (found.state, found.last_trip) == ("paused by a trip", (7, "two slow windows"))


def test_only_the_last_decisions_of_a_long_log_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "run", ATTACHED, *(DECISION | {"step": step} for step in range(999)), TRIPPED)
    monkeypatch.setattr(standing, "_RECENT_BYTES", 5000)
    watched = Watched(folder)
    assert 10 < len(watched.look()) < 50
    assert watched.snapshot is not None
    assert watched.snapshot.trips == 1


def test_log_of_an_earlier_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["watch", str(OLD), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["ended"], found["switches"]) == ("detached", "detach() was called", 20)
    *earlier, _ = [json.loads(row) for row in (OLD / LOG_NAME).read_text().splitlines()]
    assert not any("acting" in event for event in earlier)


def test_failed_tuner_is_shown_with_the_values_of_its_last_decision(tmp_path: Path) -> None:
    watched = Watched(written(tmp_path / "run", ATTACHED, DECISION | {"placed": 3}, DETACHED))
    watched.look()
    assert watched.snapshot is not None
    assert (watched.snapshot.ended, watched.snapshot.placed, watched.snapshot.steps) == ("it was time", 3, 9)


# The command.


def test_terminal_shows_a_training_run_and_how_it_ended(run: Run, terminal: Terminal) -> None:
    run.train(2)
    watcher = start(run.folder, stdout=terminal.slave, stdin=terminal.slave)
    assert "profiling" in terminal.wait_for("step 0")
    run.train(20)
    assert "acting" in terminal.wait_for("step 22")
    run.train(5)
    terminal.wait_for("step 27")
    run.tuner.detach()
    assert watcher.wait(120) == 0
    text = terminal.wait_for("autotune: detach() was called after 27 steps")
    assert f"autotune report {run.folder}" in re.sub(r"\s+", " ", text).replace("\r", "")
    assert b"\x1b[?25h" in terminal.written


def test_small_terminal_shows_one_line(tmp_path: Path) -> None:
    small = Terminal(60, 8)
    watcher = start(written(tmp_path / "run", ATTACHED, DECISION), "--once", stdout=small.slave)
    assert watcher.wait(120) == 0
    small.wait_for("autotune acting, step 5")
    assert "╭" not in small.text


def test_output_that_is_not_a_terminal_gets_a_line_per_decision(run: Run) -> None:
    run.train(20)
    watcher = start(run.folder, stdout=subprocess.PIPE)
    assert watcher.stdout is not None
    first = watcher.stdout.readline().decode()
    assert first.startswith("autotune acting, step 20, last line ")
    before = run.decisions()
    run.train(7)
    decisions = run.decisions() - before
    run.tuner.detach()
    *lines, last = watcher.stdout.read().decode().splitlines()
    assert watcher.wait(120) == 0
    assert len(lines) == decisions == 7
    assert [re.findall(r"step (\d+)", text)[0] for text in lines] == [str(step) for step in range(21, 28)]
    assert last.startswith("autotune: detach() was called after 27 steps")
    watcher.stdout.close()


@pytest.mark.parametrize("is_screen", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("interrupts")
def test_killed_run_is_watched_until_an_interrupt(tmp_path: Path, terminal: Terminal, *, is_screen: bool) -> None:
    folder = written(tmp_path / "run", ATTACHED, DECISION)
    hour_ago = time.time() - 3600
    os.utime(folder / LOG_NAME, (hour_ago, hour_ago))
    out = tmp_path / "out"
    with out.open("wb") as file:
        watcher = start(folder, stdout=terminal.slave if is_screen else file)
        wait_until(lambda: "last line 60 min ago" in (terminal.text if is_screen else out.read_text()), lambda: "")
        assert watcher.poll() is None
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(120) == 0


def test_watch_waits_for_a_missing_log(tmp_path: Path, terminal: Terminal) -> None:
    folder = written(tmp_path / "run")
    (folder / LOG_NAME).unlink()
    watcher = start(folder, stdout=terminal.slave)
    terminal.wait_for("has no line yet")
    written(folder, ATTACHED, DETACHED)
    terminal.wait_for("autotune: it was time after 9 steps: 0 switches, no trip")
    assert watcher.wait(120) == 0


def test_json_prints_one_document_and_once_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "run", ATTACHED, DECISION, TRIPPED)
    assert run_command(["watch", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"] == Plan().to_json()
    assert found["last_trip"] == {"step": 7, "reason": "two slow windows"}
    assert (found["state"], found["ended"], found["pressure"]) == ("paused by a trip", None, 0.5)
    assert found["seconds_since_last_line"] >= 0
    assert run_command(["watch", str(folder), "--once"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "no line yet"),
        ([DECISION], "line 1: event is 'decision'"),
        ([ATTACHED, ATTACHED], "line 2: event is 'attached'"),
        ([ATTACHED | {"version": 2}], "version 1"),
        ([ATTACHED, {"event": "other", "step": 1}], "line 2: event is 'other'"),
        ([ATTACHED, DECISION | {"plan": {"storage": 5}}], "line 2"),
        ([ATTACHED, DECISION | {"unknown": 5}], "unknown"),
    ],
)
def test_line_not_written_by_a_tuner_is_rejected(
    tmp_path: Path, events: list[dict[str, Any]], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["watch", str(written(tmp_path / "run", *events)), "--json"]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert said in error


def test_truncated_or_replaced_log_is_rejected(tmp_path: Path) -> None:
    watched = Watched(written(tmp_path / "run", ATTACHED, DECISION))
    watched.look()
    written(tmp_path / "run", ATTACHED)
    with pytest.raises(InputError, match="not the same file"):
        watched.look()
    (tmp_path / "run" / LOG_NAME).unlink()
    os.mkfifo(tmp_path / "run" / LOG_NAME)
    with pytest.raises(InputError, match="is a pipe"):
        watched.look()


def test_folder_that_is_not_an_attached_run_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(OLD.parent / "tune", tmp_path / "tune")
    for folder, said in (
        (tmp_path / "nowhere", "not a run directory"),
        (tmp_path, "not a run directory"),
        (other, "'tune'"),
    ):
        assert run_command(["watch", str(folder)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


# The run's own process.


def test_attaching_and_training_imports_neither_rich_nor_mlflow(tmp_path: Path) -> None:
    code = """
import sys, torch, autotune
from small_models import TinyGPT
from test_live import gpt_loss, token_batches
assert "rich" not in sys.modules
model = TinyGPT()
with autotune.attach(model, torch.optim.SGD(model.parameters(), 0.1), memory_budget_bytes=10**6) as tuner:
    for batch in token_batches(30):
        for micro in tuner.micro_batches(batch):
            tuner.backward(gpt_loss(model, micro))
        tuner.step()
    assert tuner.attached, tuner.detached_because
print([name for name in ("rich", "mlflow") if name in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert answer.stdout.strip() == "[]", answer.stderr


def test_watching_imports_no_torch() -> None:
    code = "import sys, autotune.cli.terminal_panel; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


def test_shown_times_are_those_of_the_plans_that_ran() -> None:
    limits = dataclasses.replace(RESTLESS, decide_every=10)
    tuned = train(deep_gpt, token_batches, gpt_loss, 80, policy="exact", memory_budget_bytes=10**6, limits=limits)
    late = [event for event in tuned.events if event["event"] == "decision"][-4:]  # type: ignore[attr-defined]
    assert all(event["ran"]["seconds"] > 0 and event["ran"]["predicted"] > 0 for event in late)
    status = tuned.status  # type: ignore[attr-defined]
    assert {"seconds": status["measured_s"], "predicted": status["predicted_s"]} == late[-1]["ran"]

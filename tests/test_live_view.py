"""The live view shows what is so, changes no bit of the run, and may fail without anybody noticing."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_live import RESTLESS, Trace, Wanders, assert_identical, deep_gpt, gpt_loss, token_batches, train
from test_tracking import runs_in

import autotune
from autotune import AttachError, Storage
from autotune.campaign.following import Counts, LogReader, Sender, metrics_of
from autotune.campaign.following import follow as follow_log
from autotune.campaign.tracking import SPOOL, Tracker
from autotune.live import attach as attach_module
from autotune.live import follower
from autotune.live.integrations.attaches import Attaches
from autotune.live.screen import Screen, render, screen_of
from autotune.live.view import Snapshot, farewell, line, panel, strip
from autotune.plan import Plan

UNITS = ("embedding", *(f"blocks.{number}" for number in range(6)), "head")
BLOCKS = UNITS[1:-1]
STATUS: dict[str, Any] = {
    "stage": "act",
    "acting": True,
    "steps": 1200,
    "total_steps": 5000,
    "plan": Plan(storage=dict.fromkeys(BLOCKS[:4], Storage.RECOMPUTE)),
    "switches": 14,
    "placed": 310,
    "over_budget_steps": 0,
    "trips": [],
    "memory_budget_bytes": 20 * 2**30,
    "predicted_peak_bytes": 15 * 2**30,
    "measured_peak_bytes": 14 * 2**30,
    "predicted_s": 0.4,
    "measured_s": 0.41,
    "noise_scale": None,
    "overhead_frac": 0.004,
}


def snapshot(**changes: Any) -> Snapshot:
    return Snapshot.of("net", UNITS, BLOCKS, {**STATUS, **changes})


def shown(renderable: Any, width: int = 100) -> str:
    console = Console(record=True, width=width, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(renderable)
    return console.export_text()


def test_the_panel_holds_plan_pressure_noise_scale_times_overhead_and_trips() -> None:
    text = shown(panel(snapshot(noise_scale=1024.4, trips=[(300, "two slow windows")], over_budget_steps=3)))
    for part in (
        "step 1,200 of 5,000",
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


def test_what_is_not_known_is_said_not_to_be() -> None:
    unknown = dict.fromkeys(("predicted_peak_bytes", "measured_peak_bytes", "predicted_s", "measured_s"))
    text = shown(panel(snapshot(**unknown, total_steps=None, acting=False, memory_budget_bytes=None)))
    assert "profiling" in text
    assert "None" not in text
    assert "nan" not in text
    assert text.count("not known yet") == 2


def test_a_panel_is_as_wide_as_its_terminal_and_a_line_is_one_line() -> None:
    for width in (30, 80, 200):
        lines = render(snapshot(trips=[(3, "why " * 99)]), width, whole=True)
        plain = [re.sub(r"\x1b\[[0-9;]*m", "", text) for text in lines]
        assert {len(text) for text in plain} == {width - 1}
        assert len(lines) == 9
        assert len(render(snapshot(trips=[(3, "why " * 99)]), width, whole=False)) == 1
    assert "trips: none" in shown(line(snapshot()), 200)


def test_a_strip_has_a_cell_per_unit_and_never_more_than_fit() -> None:
    assert strip(snapshot()).plain == "·▫▫▫▫▪▪·"
    assert strip(snapshot(), plain=True).plain == ".oooo##."
    many = tuple(f"blocks.{number}" for number in range(202))
    plan = Plan(storage=dict.fromkeys(many[:99], Storage.RECOMPUTE))
    cells = strip(Snapshot.of("net", many, many, {**STATUS, "plan": plan})).plain
    assert cells == "▫" * 16 + "◧" + "▪" * 17


def test_a_last_line_says_how_the_run_ended() -> None:
    assert farewell({**STATUS, "trips": [(1, "x")]}, "detach() was called", "runs/a") == (
        "autotune: detach() was called after 1,200 steps: 14 switches, 1 trip, overhead 0.4%; autotune report runs/a"
    )


class Terminal:
    """Be a terminal, and remember what was written to it."""

    def __init__(self, columns: int = 90, rows: int = 30) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(columns, rows)
        self.written = b""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        try:
            while data := os.read(self.master, 65536):
                self.written += data
        except OSError:
            return

    def wait_for(self, text: str, seconds: float = 20.0) -> str:
        ends = time.monotonic() + seconds
        while text not in self.text and time.monotonic() < ends:
            time.sleep(0.01)
        assert text in self.text, self.text
        return self.text

    @property
    def text(self) -> str:
        return self.written.decode("utf-8", errors="replace")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    found = Terminal()
    yield found
    os.close(found.slave)
    found.reader.join(5)
    os.close(found.master)


def test_the_terminal_keeps_its_last_lines_for_the_panel_and_gets_them_back(terminal: Terminal) -> None:
    screen = screen_of(terminal.slave)
    assert screen is not None
    screen.show(snapshot(), 0.0)
    terminal.wait_for("1,200 of 5,000")
    assert "\x1b[1;21r" in terminal.text
    assert "\x1b[22;1H" in terminal.text
    terminal.resize(90, 12)
    while screen._busy:
        time.sleep(0.001)
    screen.show(snapshot(steps=1300), 0.0)
    assert "\x1b[1;11r" in terminal.wait_for("step 1,300")
    screen.close("that is all")
    after = terminal.wait_for("that is all").rpartition("1,300")[2]
    assert "\x1b[r" in after
    assert screen.problem is None
    screen.close()


def test_what_is_no_terminal_is_not_drawn_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("w") as file:
        assert screen_of(file.fileno()) is None
    assert screen_of(9999) is None
    one = Terminal()
    monkeypatch.setenv("TERM", "dumb")
    assert screen_of(one.slave) is None


def test_a_terminal_that_goes_away_ends_the_drawing_alone() -> None:
    master, slave = pty.openpty()
    screen = Screen(slave)
    os.close(slave)
    os.close(master)
    screen.show(snapshot(), 0.0)
    while screen._busy:
        time.sleep(0.001)
    assert screen.problem is not None
    screen.show(snapshot(), 0.0)
    screen.close("that is all")


def test_a_terminal_that_takes_nothing_does_not_hold_up_the_run() -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
    screen = Screen(slave)
    for number in range(2000):
        # Nobody reads the other end: soon a write waits for ever, and would with it whoever waits for the write.
        screen.show(snapshot(steps=number), 0.0)
        screen._busy = screen._busy and number % 50 != 0
    screen.close("that is all")
    os.close(master)
    os.close(slave)


def attach_to(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_module, "screen_of", lambda: screen_of(terminal.slave))
    monkeypatch.setattr("autotune.live.screen.REFRESH_S", 0.0)


def test_training_that_is_shown_at_every_step_is_bit_identical(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(deep_gpt, token_batches, gpt_loss, 40)
    attach_to(terminal, monkeypatch)
    attached = train(
        deep_gpt, token_batches, gpt_loss, 40, policy=Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, show=True
    )
    assert attached.status["switches"] >= 20  # type: ignore[attr-defined]
    assert_identical(plain, attached)
    assert "detach() was called after 40 steps" in terminal.wait_for("after 40 steps")
    assert len(re.findall(r"step \d+", terminal.text)) > 5


@pytest.mark.parametrize("broken", ["autotune.live.screen.panel", "autotune.live.view.Snapshot.of"])
def test_a_view_that_raises_ends_neither_the_run_nor_its_tuner(
    broken: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = []

    def raises(*_arguments: object, **_more: object) -> None:
        raised.append(1)
        raise RuntimeError("the view is broken")

    plain = train(deep_gpt, token_batches, gpt_loss, 20)
    attach_to(terminal, monkeypatch)
    monkeypatch.setattr(broken, raises)
    attached = train(
        deep_gpt, token_batches, gpt_loss, 20, policy=Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, show=True
    )
    assert raised
    assert attached.status["attached"]  # type: ignore[attr-defined]
    assert attached.status["switches"] >= 5  # type: ignore[attr-defined]
    assert_identical(plain, attached)


def test_a_loop_that_ends_without_detaching_leaves_a_terminal_that_scrolls(tmp_path: Path) -> None:
    code = """
import torch, autotune
from small_models import TinyGPT
from test_live import gpt_loss, token_batches
model = TinyGPT()
tuner = autotune.attach(model, torch.optim.SGD(model.parameters(), 0.1), "exact", runs_dir=None, show=True)
for batch in token_batches(3):
    for micro in tuner.micro_batches(batch):
        tuner.backward(gpt_loss(model, micro))
    tuner.step()
raise SystemExit(3)
"""
    one = Terminal()
    environment = {
        **os.environ,
        "TERM": "xterm",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    answer = subprocess.run([sys.executable, "-c", code], stderr=one.slave, env=environment, check=False, cwd=tmp_path)
    assert answer.returncode == 3, one.text
    one.wait_for("\x1b[r")
    assert "profiling" in one.text


class OfAFramework(Attaches):
    """Attach as the callbacks do, without a framework."""

    framework = "no framework"

    def begin(self, *, is_first: bool) -> Any:
        model = deep_gpt()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return self._attach(model, optimizer, total_steps=3, accumulation_steps=1, is_first=is_first)


def test_of_several_processes_the_first_alone_shows_and_sends(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach_to(terminal, monkeypatch)
    followed: list[Path] = []
    monkeypatch.setattr(attach_module, "follow", followed.append)
    for is_first in (True, False):
        tuner = OfAFramework("exact", runs_dir=tmp_path, show=True, mlflow=True).begin(is_first=is_first)
        assert (tuner._screen is not None) is is_first
        tuner.detach()
    assert len(followed) == len(list(tmp_path.iterdir())) == 1
    quiet = OfAFramework("exact", runs_dir=tmp_path).begin(is_first=True)
    assert quiet._screen is None
    quiet.detach()
    assert len(followed) == 1


def test_mlflow_without_a_folder_for_the_log_is_refused() -> None:
    with pytest.raises(AttachError, match="runs_dir is None"):
        train(deep_gpt, token_batches, gpt_loss, 1, mlflow=True)


def test_a_process_that_cannot_be_started_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    assert not follower.follow(tmp_path)
    assert "MLflow is not followed" in caplog.text


def train_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Train with a log that is followed, and wait until its last record is there."""
    attach = autotune.attach
    monkeypatch.setattr(autotune, "attach", lambda *a, **k: attach(*a, **{**k, "runs_dir": folder}))
    settings = {"policy": Wanders(), "memory_budget_bytes": 10**9, "limits": RESTLESS}
    followed = train(deep_gpt, token_batches, gpt_loss, 20, mlflow=True, **settings)
    for one in threading.enumerate():
        if one.name == "autotune-follower":
            one.join(120)
    return followed


@pytest.mark.slow
def test_a_followed_run_is_bit_identical_and_all_that_a_dead_server_refused_is_kept(
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
    assert "does not answer" in (folder / follower.OUTPUT).read_text()


@pytest.mark.slow
def test_the_log_arrives_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'tracked.db'}")
    folder = train_followed(tmp_path / "runs", monkeypatch).tuner.folder
    events = [json.loads(row) for row in (folder / "decisions.jsonl").read_text().splitlines()]
    decided = [event for event in events if event["event"] == "decision"]
    (run,) = runs_in(f"sqlite:///{tmp_path / 'tracked.db'}")
    assert run.info.status == "FINISHED", (folder / follower.OUTPUT).read_text()
    assert run.data.params["units"] == "8"
    assert run.data.tags["detached_because"] == "detach() was called"
    assert run.data.metrics["switches"] == sum(event["event"] == "switched" for event in events) > 0
    assert run.data.metrics["pressure"] == decided[-1]["predicted"]["peak_bytes"] / 10**9


def test_the_log_of_a_run_that_was_killed_is_sent_and_its_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    (tmp_path / "decisions.jsonl").write_text('{"event": "attached", "step": 0, "model": "net"}\n')
    # No child of ours: the process that wrote the log is gone.
    follow_log(tmp_path, process=-1, poll_s=0.0)
    rows = [json.loads(row) for row in (tmp_path / SPOOL).read_text().splitlines()]
    assert [row["values"].get("model") for row in rows if row["kind"] == "params"] == ["net"]
    assert rows[-1]["values"] == {"status": "FAILED"}


def test_a_log_is_read_as_it_grows_and_torn_or_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = LogReader(path)
    assert reader.read() == []
    path.write_text('{"event": "attached", "step": 0}\n{"event": "dec')
    assert [event["event"] for event in reader.read()] == ["attached"]
    with path.open("a") as file:
        file.write('ision", "step": 1}\nnonsense\n{"event": 3}\n{"event": "late", "step": 2}\n')
    assert [event["event"] for event in reader.read()] == ["decision", "late"]
    assert reader.read() == []


def test_of_many_decisions_in_one_look_the_latest_are_sent_and_all_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_measured_and_predicted_times_are_those_of_the_plans_that_ran() -> None:
    limits = dataclasses.replace(RESTLESS, decide_every=10)
    tuned = train(deep_gpt, token_batches, gpt_loss, 120, policy="exact", memory_budget_bytes=10**6, limits=limits)
    late = [event for event in tuned.events if event["event"] == "decision"][-4:]  # type: ignore[attr-defined]
    assert all(event["ran"]["seconds"] > 0 and event["ran"]["predicted"] > 0 for event in late)
    status = tuned.status  # type: ignore[attr-defined]
    assert {"seconds": status["measured_s"], "predicted": status["predicted_s"]} == late[-1]["ran"]

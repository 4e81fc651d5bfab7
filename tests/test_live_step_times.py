"""Tests of where the time of attached runs' steps goes: in the log, in the status, in reports, and on two ranks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from small_jobs import next_token_loss, token_batches
from small_models import TinyGPT

import autotune
from autotune.cli.main import run
from autotune.live import step_times
from autotune.live.decision_log import LOG_NAME, read_log
from autotune.live.step_times import StepTimes, _without_pauses, of_all_ranks
from autotune.mechanics import devices
from autotune.records.log_following import Counts, metrics_of
from autotune.report.attached_page import page_of
from autotune.report.attached_run import read_attached, verdict
from autotune.step_parts import PARTS, StepParts

NAP_S = 0.03
LIMITS = autotune.Limits(decide_every=10, overhead_frac=1e9, slowdown_frac=1e9)


def train(
    runs: Path | None, *, steps: int = 50, nap_s: float = NAP_S, every: int = 1, between: Callable[[int], None] = print
) -> tuple[autotune.LiveTuner, dict[str, Any], float]:
    """Train attached with a slow loader; return the tuner, its last status, and the mean wall seconds of late steps."""
    torch.manual_seed(0)
    model = TinyGPT()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    settings = autotune.Settings(accumulation_choices=(1,))
    tuner = autotune.attach(model, optimizer, "planner", runs_dir=runs, limits=LIMITS, settings=settings)
    batches, ends = token_batches(0), []
    for number in range(steps):
        if number % every == 0:
            time.sleep(nap_s)
        for micro in tuner.micro_batches(next(batches)):
            tuner.backward(next_token_loss(model, micro))
        tuner.step()
        ends.append(time.perf_counter())
        if between is not print:
            between(number)
    status = tuner.status
    tuner.detach()
    # The last window ends with the step before its decision.
    return tuner, status, (ends[-2] - ends[-12]) / 10


def test_parts_of_an_attached_run_sum_to_its_steps_and_name_a_slow_loader(tmp_path: Path) -> None:
    tuner, status, step_s = train(tmp_path)
    parts = StepParts.from_json(status["parts"])
    assert math.fsum(parts.seconds().values()) == pytest.approx(step_s, rel=0.02)
    assert max(parts.seconds(), key=parts.seconds().__getitem__) == "data"
    assert parts.data_s >= NAP_S
    assert parts.samples_per_s == pytest.approx(4 / parts.step_s)
    assert "of the step waits for data: more loader workers" in status["advice"]
    assert tuner.folder is not None
    events = read_log(tuner.folder)
    told = [event for event in events if event["event"] == "advice"]
    assert [event["advice"] for event in told] == [status["advice"]]
    measured = [event["measured"] for event in events if event["event"] == "decision" and event["measured"]]
    assert StepParts.from_json(measured[-1]["parts"]) == parts


def test_shown_where_a_run_is_watched_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuner, status, _ = train(tmp_path)
    folder = tuner.folder
    assert folder is not None
    found = read_attached(folder)
    assert found.advice == status["advice"]
    assert verdict(found).endswith(f"{status['advice']}.")
    page = page_of(found)
    assert "Where the time of a step goes" in page
    assert "waits for data" in page
    assert run(["watch", str(folder), "--once"]) == 0
    told = capsys.readouterr().out
    assert "% data" in told
    assert "waits for data" in told
    assert run(["watch", str(folder), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["advice"] == status["advice"]
    assert StepParts.from_json(state["parts"]) == found.parts
    decision = [event for event in read_log(folder) if event["event"] == "decision"][-1]
    metrics = metrics_of(decision, Counts())
    assert found.parts is not None
    assert metrics["part_data_s"] == found.parts.data_s
    del decision["measured"]["parts"]
    assert "part_data_s" not in metrics_of(decision, Counts())


def test_log_of_an_earlier_version_has_no_parts_and_can_still_be_read(tmp_path: Path) -> None:
    tuner, _, _ = train(tmp_path, steps=30)
    assert tuner.folder is not None
    path = tuner.folder / LOG_NAME
    kept = []
    for event in map(json.loads, path.read_text().splitlines()):
        (event.get("measured") or {}).pop("parts", None)
        event.pop("parts", None)
        if event["event"] != "advice":
            event.pop("advice", None)
            kept.append(json.dumps(event))
    path.write_text("\n".join(kept) + "\n")
    found = read_attached(tuner.folder)
    assert found.parts is None
    assert found.advice is None
    assert "Where the time of a step goes" not in page_of(found)


def test_log_with_a_locked_choice_can_be_read(tmp_path: Path) -> None:
    tuner, _, _ = train(tmp_path, steps=20)
    assert tuner.folder is not None
    path = tuner.folder / LOG_NAME
    rows = path.read_text().splitlines()
    locked = {"event": "locked", "step": 20, "what": "accumulation_steps", "reason": "memory ran out"}
    path.write_text("\n".join([*rows[:-1], json.dumps(locked), rows[-1]]) + "\n")
    assert (20, "locked", "memory ran out") in read_attached(tuner.folder).others


def test_evaluation_between_steps_is_no_wait_for_data() -> None:
    def evaluate(number: int) -> None:
        if number % 25 == 22:
            time.sleep(1.0)

    _, status, _ = train(None, nap_s=0.0, between=evaluate)
    # A second among ten steps would be a tenth of a second each.
    assert status["parts"]["data_s"] < 0.08


def test_loader_that_delivers_in_bursts_is_a_wait_for_data() -> None:
    _, status, _ = train(None, nap_s=4 * NAP_S, every=4)
    assert status["parts"]["data_s"] > NAP_S / 2
    assert "waits for data" in status["advice"]


def test_pauses_are_those_far_above_the_others_and_above_a_step() -> None:
    def steps(*waits: float) -> list[dict[str, float]]:
        return [{"data": wait, "compute": 1.0} for wait in waits]

    assert _without_pauses(steps(0, 0, 0, 0, 30)) == [0, 1, 2, 3]
    # Less than a step: no matter how much more than the others.
    assert _without_pauses(steps(0, 0, 0, 0, 0.9)) == [0, 1, 2, 3, 4]
    assert _without_pauses(steps(*(0, 0, 0, 8) * 3)) == list(range(12))
    assert _without_pauses(steps(5, 5, 5)) == [0, 1, 2]


def test_failure_of_the_clock_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(step_times, "seconds_of", fail)
    _, status, _ = train(None, steps=30)
    assert status["attached"]
    assert status["parts"] is None


def test_time_between_the_batches_of_a_step_is_a_wait_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(devices, "border_for", lambda device: lambda: clock[0])
    times = StepTimes(torch.device("cpu"))

    def passes(seconds: float, note: Callable[..., None], *arguments: Any, **named: Any) -> None:
        clock[0] += seconds
        note(*arguments, **named)

    times.end(samples=0, items=0, ordinary=False)
    for _ in range(5):
        passes(1.0, times.begin)
        passes(0.125, times.begun)
        passes(0.5, times.phase, "forward")
        passes(2.0, times.phase, "backward")
        passes(4.0, times.phase, "update")
        # The next batch of the same step.
        passes(8.0, times.come_back)
        passes(16.0, times.phase, "update")
        passes(32.0, times.control)
        passes(64.0, times.end, samples=3, items=7, ordinary=True)
    found = times.take()
    assert found is not None
    assert found.seconds() == {
        "data": 1.0 + 8.0,
        "compute": 0.5 + 2.0 + 4.0 + 16.0,
        "communication": 0.0,
        "synchronisation": 0.0,
        "update": 32.0,
        "control": 0.125 + 64.0,
    }
    assert found.samples_per_s == pytest.approx(3 / found.step_s)
    assert found.items_per_s == pytest.approx(7 / found.step_s)


def test_times_that_are_closed_take_nothing() -> None:
    times = StepTimes.none()
    times.begin()
    times.end(samples=1, items=None, ordinary=True)
    assert times.take() is None


def test_rank_without_parts_leaves_those_of_all_unknown() -> None:
    own = StepParts(step_s=1.0, data_s=0.0, compute_s=1.0, update_s=0.0, control_s=0.0, samples_per_s=4.0)
    known = [0.0, 1.0, *[0.0] * (len(PARTS) - 2)]
    found = of_all_ranks(own, [known, known])
    assert found is not None
    assert found.samples_per_s == 8.0
    assert of_all_ranks(own, [known, [-1.0] * len(PARTS)]) is None


@pytest.mark.slow
def test_slow_loader_slow_rank_and_slow_link_are_each_named_in_attached_runs_on_two_ranks(tmp_path: Path) -> None:
    run_on_ranks("live_parts_rank.py", tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert all(one["attached"] and one["restored"] for one in found.values())
        assert "of the step waits for data" in found["loader"]["advice"]
        assert found["rank"]["advice"].startswith("rank 1 is ")
        assert "of the step is communication that nothing hides" in found["link"]["advice"]

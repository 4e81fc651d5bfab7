"""Tests of the attach benchmark: an unattached copy follows a live run, and the time difference is attributed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_job
import torch

from autotune import Job, Limits, Settings
from autotune.bench.attached_arms import Arm, LiveArm, endless
from autotune.bench.bench_attach import bench_attach
from autotune.bench.bench_followed import Course, bench_followed
from autotune.bench.followed_arm import FollowedArm, follow
from autotune.bench.tuner_timers import COLLECTION, FORWARD, LOOP, PARTS, PartTimers
from autotune.cli.main import run
from autotune.mechanics import controls
from autotune.records.run_directory import benchmark_folder

JOB = str(Path(tiny_job.__file__))
UNBOUND = Limits(overhead_frac=1.0)
FIGURES = {
    *("ratio_median", "ratio_ci95", "ratio_total", "ratio_total_ci95", "ratio_total_after_learning"),
    *("ratio_total_after_learning_ci95", "ratio_total_1000_steps", "learning", "live_s_per_sample"),
    "followed_s_per_sample",
}


def followed(job: Job, steps: int, budget_at: Callable[[int], int], **arguments: Any) -> tuple[LiveArm, FollowedArm]:
    """Return a live arm and the arm that followed it."""
    taken = 0
    live = LiveArm(job, 0, {"memory_budget_bytes": lambda: budget_at(taken), "limits": UNBOUND, **arguments})
    other = FollowedArm(live, 0, arguments["settings"].lr_rule if "settings" in arguments else None)
    for done in follow(live, other, itertools.islice(endless(job, 0), steps)):
        taken = done
    return live, other


def weights_of(arm: Arm) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in arm.model.parameters()]


@pytest.mark.parametrize("mode", ["exact", pytest.param("rounding", marks=pytest.mark.slow)])
def test_following_copy_is_bit_identical_under_the_same_plans(mode: str) -> None:
    live, other = followed(tiny_job.make(clip_norm=0.5), 54, lambda n: 2**45 if n // 6 % 2 else 1, mode=mode)
    assert live.tuner.attached
    assert len(set(map(str, live.plans))) > 1
    assert (len({plan.accumulation_steps for plan in live.plans}) > 1) == (mode == "rounding")
    assert other.plans == live.plans
    assert other.losses == live.losses
    assert all(map(torch.equal, weights_of(live), weights_of(other)))
    assert len(other.seconds) == len(other.cpu_seconds) == len(live.learning) == 54
    assert any(live.learning)
    assert not live.learning[-1]
    # The tuner counts the calls of the first, the middle and the last unit, the copy those since the last switch.
    all_calls, latest = (controls.recomputations(arm.model)["blocks.1"] for arm in (live, other))
    assert all_calls >= latest > 0


def test_following_copy_updates_when_the_live_run_does() -> None:
    job = tiny_job.make(batching="adaptive", lr_rule="sqrt", accumulation_choices=(1, 2, 4), schedule=None)
    settings = Settings(batching="adaptive", lr_rule="sqrt", accumulation_choices=(1, 2, 4))
    arguments = {"mode": "tolerant", "settings": settings}
    live, other = followed(job, 110, lambda _: 2**45, **arguments)
    assert sum(live.updated) < 110
    assert other.plans == live.plans
    assert other.losses == live.losses


def test_each_arm_runs_equally_often_after_itself_and_after_the_other() -> None:
    class Noted(Arm):
        def __init__(self, name: str) -> None:
            self.name = name

        def take(self, batch: Any) -> None:
            order.append(f"{self.name}{batch}")

    order: list[str] = []
    assert list(follow(Noted("live "), Noted("behind "), range(4))) == [1, 2, 3, 4]
    assert order == [
        f"{who} {n}" for n in (0, 2) for who, n in (("live", n), ("live", n + 1), ("behind", n), ("behind", n + 1))
    ]


def test_timers_leave_nothing_behind() -> None:
    def timed() -> list[Any]:
        return [vars(owner)[name] for targets in PARTS.values() for owner, names in targets for name in names]

    before = timed()
    with PartTimers().installed():
        assert not any(one is other for one, other in zip(timed(), before, strict=True))
    assert all(one is other for one, other in zip(timed(), before, strict=True))


def test_time_is_attributed_to_the_innermost_timer() -> None:
    timers = PartTimers()
    inner = timers.timed("inner", lambda: sum(range(20_000)))
    outer = timers.timed("outer", lambda: inner() + inner())
    assert inner() == sum(range(20_000))
    result, spent = timers.step(outer)
    assert result == 2 * sum(range(20_000))
    assert {part: one.entries for part, one in spent.items() if part != COLLECTION} == {LOOP: 1, "outer": 1, "inner": 2}
    assert spent["inner"].wall > spent["outer"].wall
    assert spent["inner"].cpu > spent["outer"].cpu


def test_time_difference_between_a_live_run_and_its_copy_is_attributed() -> None:
    course = Course(name="tiny", job=tiny_job.make(), arguments={"stage": "act"}, budget_at=lambda _: 2**45)
    found = json.loads(json.dumps(bench_followed(course, steps=60, seed=0)))
    assert found["identical"]
    assert found["attached"]
    assert found.keys() >= FIGURES | {"overhead_frac", "unaccounted_frac", "cpu", "breakdown"}
    assert found["cpu"].keys() == FIGURES
    assert 0 < found["learning"]["steps"] < 60
    for clock, figures in (("wall", found), ("cpu", found["cpu"])):
        own = figures["ratio_total_1000_steps"] - 1 - found["overhead_frac"]
        assert found["unaccounted_frac"][clock] == pytest.approx(own)
    kinds = found["breakdown"]
    assert sum(kinds[kind]["batches"] for kind in kinds if kind != "all") == kinds["all"]["batches"] == 60
    for kind in kinds.values():
        for clock in ("wall", "cpu"):
            assert sum(kind[clock]["rooms"].values()) == pytest.approx(kind[clock]["added_frac"])
    parts = kinds["all"]["wall"]["rooms"]
    assert parts.keys() >= {FORWARD, LOOP, "signature", "reading the budget", "choosing the placement", "log", "policy"}
    assert parts["signature"] > 0


def test_document_contains_the_requested_results() -> None:
    found = bench_attach([JOB], [], steps=30, situation_steps=40, seeds=1, policy="planner", seed=0)
    (overhead,) = found["overhead"]
    for stage in ("observe", "act"):
        assert overhead[stage]["identical"]
        assert overhead[stage].keys() >= {"ratio_median", "ratio_ci95", "ratio_total", "ratio_total_1000_steps"}
    assert found["situations"] == found["followed"] == []
    assert found["ratio_median"] == overhead["act"]["ratio_median"]
    json.dumps(found)


def test_bench_attach_runs_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = ["--jobs", "none", "--situations", "none", "--runs-dir", str(tmp_path)]
    assert run(["bench", "attach", *none, "--followed", JOB, "--steps", "30"]) == 0
    assert "of an unattached one's time under the same plans" in capsys.readouterr().out
    found = json.loads((benchmark_folder(tmp_path) / "attach-followed.json").read_text())["followed"]
    assert [one["stage"] for one in found] == ["observe", "act"]
    assert run(["bench", "attach", *none, "--followed", "none"]) == 2
    assert "jobs, situations and followed are all none" in capsys.readouterr().err

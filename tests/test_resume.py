"""Tests of resuming: a campaign killed at any instant continues without repeating measurements."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kills import JOB, kill_campaigns
from known_problem import KnownEngine, known_cost
from test_env import SPACE

from autotune import commands
from autotune.agents.optuna_search import OptunaSearch
from autotune.cli.main import run
from autotune.errors import RunDirectoryError
from autotune.gym.observation import Observation
from autotune.live.decision_log import make_run_folder
from autotune.plan import Plan
from autotune.records import journal as journal_module
from autotune.records.journal import JOURNAL, Journal
from autotune.records.run_directory import RunDirectory

FEW = {"steps": 80, "seed": 3}


class KilledError(BaseException):
    """Ends a campaign as a kill would: no code catches it."""


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return RunDirectory.open(folder).lines(name)


def plans_of(folder: Path) -> list[Any]:
    return [trial["plan"] for trial in lines(folder, "trials.jsonl")]


def only(runs: Path) -> Path:
    (found,) = [path for path in runs.iterdir() if (path / "config.json").is_file()]
    return found


# ------------------------------------------------------------------------------------------------------ the journal


def test_finished_work_is_not_repeated_and_returned_in_order(tmp_path: Path) -> None:
    first = Journal()
    assert first.once({"n": 1}, lambda: [1]) == [1]
    first.keep_in(tmp_path)
    assert first.once({"n": 2}, lambda: {"two": 2.5}) == {"two": 2.5}
    again = Journal.opened(tmp_path)
    assert again.replaying
    assert again.once({"n": 1}, pytest.fail) == [1]
    assert again.once({"n": 2}, pytest.fail) == {"two": 2.5}
    assert not again.replaying
    assert again.once({"n": 3}, lambda: 3) == 3
    assert again.replayed_s >= 0
    third = Journal.opened(tmp_path)
    assert [third.once({"n": n}, pytest.fail) for n in (1, 2, 3)] == [[1], {"two": 2.5}, 3]


def test_failed_work_is_not_recorded(tmp_path: Path) -> None:
    kept = Journal()
    kept.keep_in(tmp_path)
    with pytest.raises(ZeroDivisionError):
        kept.once({"n": 1}, lambda: 1 / 0)
    assert kept.once({"n": 1}, lambda: 7) == 7


def test_journal_of_another_campaign_is_rejected(tmp_path: Path) -> None:
    kept = Journal()
    kept.keep_in(tmp_path)
    kept.once({"window": "a"}, lambda: 1)
    with pytest.raises(
        RunDirectoryError, match=r'record 1 is for \{"window": "a"\}, but the campaign requests \{"window": "b"\}'
    ):
        Journal.opened(tmp_path).once({"window": "b"}, lambda: 1)


def test_torn_last_line_is_dropped_and_other_damage_is_named(tmp_path: Path) -> None:
    kept = Journal()
    kept.keep_in(tmp_path)
    for number in range(3):
        kept.once({"n": number}, lambda number=number: number)
    path = tmp_path / JOURNAL
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        again = Journal.opened(tmp_path)
        left = 0
        while again.replaying:
            assert again.once({"n": left}, pytest.fail) == left
            left += 1
        assert left == whole[:cut].count(b"\n")
        # The next record is written on a separate line.
        again.once({"n": left}, lambda: 5)
        Journal.opened(tmp_path)
    damaged = whole.replace(b'"result": 1', b'"result": 9')
    assert damaged != whole
    path.write_bytes(damaged)
    with pytest.raises(
        RunDirectoryError, match=r"line 2: is damaged: its checksum differs .*without this line and all"
    ):
        Journal.opened(tmp_path)
    path.write_bytes(damaged.splitlines(keepends=True)[0])
    assert Journal.opened(tmp_path).once({"n": 0}, pytest.fail) == 0
    path.write_bytes(whole.replace(b"{", b"[", 1))
    with pytest.raises(RunDirectoryError, match=r"line 1: .*without this line and all"):
        Journal.opened(tmp_path)


def test_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Journal()
    kept.keep_in(tmp_path)

    def full(path: Path, record: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal_module, "append_json_line", full)
    with pytest.raises(RunDirectoryError, match=r"No space left on device.*autotune resume") as caught:
        kept.once({"n": 1}, lambda: 1)
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------------------------------------------- campaigns


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a writer that ends the campaign at its n-th write, before or after it."""
    write = journal_module.append_json_line
    countdown = {"left": 0, "after": False}

    def writes(path: Path, record: Any) -> None:
        countdown["left"] -= 1
        if countdown["left"] == 0 and not countdown["after"]:
            raise KilledError
        write(path, record)
        if countdown["left"] == 0:
            raise KilledError

    def arm(left: int, *, after: bool) -> None:
        countdown.update(left=left, after=after)

    monkeypatch.setattr(journal_module, "append_json_line", writes)
    monkeypatch.setattr("autotune.records.run_directory.append_json_line", writes)
    return arm


@pytest.mark.slow
def test_campaign_interrupted_20_times_finds_the_same_trials(killed_at: Any, tmp_path: Path) -> None:
    whole = commands.tune(str(JOB), "random", runs_dir=tmp_path / "whole", **FEW)  # type: ignore[arg-type]
    expected = plans_of(Path(whole["run"]))
    runs = tmp_path / "broken"
    killed_at(4, after=False)
    with pytest.raises(KilledError):
        commands.tune(str(JOB), "random", runs_dir=runs, **FEW)  # type: ignore[arg-type]
    folder, interruptions, generator = only(runs), 1, random.Random(0)
    document = None
    while document is None:
        killed_at(generator.randint(1, 3) if interruptions < 20 else 10**6, after=generator.random() < 0.5)
        try:
            document = commands.resume(folder, job=str(JOB))
        except KilledError:
            interruptions += 1
    assert interruptions == 20
    found = lines(folder, "trials.jsonl")
    assert [trial["number"] for trial in found] == list(range(len(found)))
    searched = [trial["plan"] for trial in found if not trial["final"]]
    assert searched == expected[: len(searched)]
    assert len(searched) == sum(not trial["final"] for trial in lines(Path(whole["run"]), "trials.jsonl"))
    # Each window was paid for once.
    windows = [row for row in lines(folder, JOURNAL) if "window" in row["what"]]
    assert len(windows) == 2 + len(found)
    assert document["tuning_steps"] == sum(row["result"]["steps"] for row in windows)
    assert commands.resume(folder, job=str(JOB)) == document
    names = [json.loads(row)["values"].get("name") for row in (folder / "tracking.jsonl").read_text().splitlines()]
    trials = [name for name in names if name and "trial" in name]
    assert sorted(trials) == sorted(set(trials))
    assert len(trials) == len(found)


def test_a_resumed_campaign_offers_the_storages_with_which_it_began(
    killed_at: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTUNE_STORAGES", "selective,compress8")
    killed_at(5, after=True)
    with pytest.raises(KilledError):
        commands.tune(str(JOB), "random", runs_dir=tmp_path, **FEW)  # type: ignore[arg-type]
    killed_at(10**6, after=True)
    monkeypatch.setenv("AUTOTUNE_STORAGES", "rebuild")
    commands.resume(only(tmp_path), job=str(JOB))
    assert os.environ["AUTOTUNE_STORAGES"] == "rebuild"
    trials = lines(only(tmp_path), "trials.jsonl")
    chosen = {storage for trial in trials for storage in trial["plan"]["storage"].values()}
    assert chosen == {"save", "selective", "compress8", "recompute"}


def tell(search: OptunaSearch, plan: Plan) -> None:
    """Tell a search the known cost of a plan."""
    engine = KnownEngine()
    reference = engine.run(3)
    engine.apply(plan)
    seen = Observation(
        space=SPACE,
        plan=plan,
        window=engine.run(3),
        reference=reference,
        memory_budget_bytes=None,
        batch_size=8,
        adaptive=False,
    )
    search.tell(plan, seen, known_cost(plan))


@pytest.mark.slow
def test_resumed_study_proposes_the_same_plans(tmp_path: Path) -> None:
    first = [SPACE.baseline(), SPACE.leanest()]

    def go(folder: Path, *, interrupted: bool) -> list[Any]:
        folder.mkdir()
        search = OptunaSearch(SPACE, folder, 5, first)
        proposed = []
        for number in range(24):
            if interrupted and number % 3 == 0:
                # The last proposal has no result, because its process was killed.
                search.ask()
                search._storage.engine.dispose()
                search = OptunaSearch(SPACE, folder, 5, first)
                for plan in proposed:
                    assert search.ask() == plan
                    tell(search, plan)
            plan = search.ask()
            tell(search, plan)
            proposed.append(plan)
        search.close()
        return proposed

    assert go(tmp_path / "a", interrupted=False) == go(tmp_path / "b", interrupted=True)


@pytest.mark.slow
def test_resumed_comparison_repeats_no_finished_run(
    killed_at: Any, measuring_precisions: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTUNE_PRECISIONS", "bf16")
    killed_at(6, after=True)
    with pytest.raises(KilledError):
        commands.compare(str(JOB), ["baseline", "uniform-bf16", "random"], seeds=2, runs_dir=tmp_path, **FEW)  # type: ignore[arg-type]
    folder = only(tmp_path)
    # Another measurement of this machine could find that it does not compute fast in bf16.
    monkeypatch.setenv("AUTOTUNE_PRECISIONS", "fp32")
    for left in (9, 4, 2):
        measuring_precisions()
        killed_at(left, after=True)
        with pytest.raises(KilledError):
            commands.resume(folder, job=str(JOB))
    before = lines(folder, JOURNAL)
    killed_at(10**6, after=True)
    document = commands.resume(folder, job=str(JOB))
    after = lines(folder, JOURNAL)
    assert after[: len(before)] == before
    ran = [(row["what"]["run"], row["what"]["seed"]) for row in after if "run" in row["what"]]
    assert len(ran) == len(set(ran)) == 6
    assert [len(arm["runs"]) for arm in document["arms"]] == [2, 2, 2]
    assert commands.resume(folder, job=str(JOB))["arms"] == document["arms"]
    # Arms that the run does not have are not left out silently.
    with pytest.raises(RunDirectoryError, match="'sqrt' is not among its arms"):
        commands.resume(folder, job=str(JOB), arms=["uniform-bf16", "sqrt"])


def test_interruption_right_after_the_start_names_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Path) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("autotune.campaign.steps.send_pending", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        commands.tune(str(JOB), "random", runs_dir=tmp_path, **FEW)  # type: ignore[arg-type]
    assert caught.value.__notes__ == [str(only(tmp_path))]


def test_resumed_planner_takes_the_profile_with_which_its_run_began(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    document = commands.tune(str(JOB), "exact", memory_budget="60%", runs_dir=runs, report_to="none", steps=60)
    folder = only(runs)
    (folder / "tuned.json").unlink()
    shutil.rmtree(runs / "profiles")
    again = commands.resume(folder, job=str(JOB))
    # A profile that is measured again may give other plans, for which the journal has no windows.
    assert not (runs / "profiles").exists()
    assert (again["plan"], again["measured"]["cost"]) == (document["plan"], document["measured"]["cost"])


def test_campaign_killed_before_its_first_record_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "keep_in", killed)
        with pytest.raises(KilledError):
            commands.tune(str(JOB), "random", runs_dir=tmp_path, **FEW)  # type: ignore[arg-type]
    folder = only(tmp_path)
    assert not (folder / JOURNAL).exists()
    assert commands.resume(folder, job=str(JOB))["run"] == str(folder)
    # A campaign whose journal was removed starts over.
    (folder / JOURNAL).unlink()
    (folder / "tuned.json").unlink()
    with pytest.raises(RunDirectoryError, match="has no journal"):
        commands.resume(folder, job=str(JOB))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["random", "optuna"])
def test_kill_9_at_random_instants_loses_nothing_acknowledged(method: str, tmp_path: Path) -> None:
    acknowledged: dict[Path, list[Any]] = {}

    def look(folder: Path, done: bool) -> None:
        now = [row["what"] for row in lines(folder, JOURNAL)] if (folder / JOURNAL).is_file() else []
        before = acknowledged.get(folder, [])
        assert now[: len(before)] == before
        acknowledged[folder] = now
        if done:
            found = lines(folder, "trials.jsonl")
            assert [trial["number"] for trial in found] == list(range(len(found)))
            if method == "optuna":
                see_that_the_study_is_whole(folder, sum(not trial["final"] for trial in found))

    kill_campaigns(["tune", "--method", method, "--steps", "120"], tmp_path, 4, 1, look)


@pytest.mark.slow
def test_killed_comparisons_continue_and_repeat_no_finished_run(tmp_path: Path) -> None:
    asked = ["compare", "--arms", "random,uniform-bf16", "--memory-budget", "80%", "--seeds", "6", "--steps", "60"]
    for number in range(int(os.environ.get("COMPARISONS", "2"))):
        root, finished = tmp_path / str(number), {}
        root.mkdir()

        def look(folder: Path, done: bool, finished: dict[Path, list[Any]] = finished) -> None:
            now = lines(folder, JOURNAL) if (folder / JOURNAL).is_file() else []
            before = finished.get(folder, [])
            # Times are identical, so no run was repeated.
            assert now[: len(before)] == before
            finished[folder] = now
            if done:
                document = json.loads((folder / "comparison.json").read_text())
                made = [(row["what"]["run"], row["what"]["seed"]) for row in now if "seed" in row["what"]]
                asked_for = {(arm["name"], run["seed"]) for arm in document["arms"] for run in arm["runs"]}
                assert len(asked_for) == 18
                assert set(made) >= asked_for
                assert len(set(made)) == len(made)

        kill_campaigns(asked, root, 3, number, look)


def see_that_the_study_is_whole(folder: Path, searched: int) -> None:
    with sqlite3.connect(folder / "optuna.db") as database:
        states = [state for (state,) in database.execute("select state from trials")]
    assert "RUNNING" not in states
    assert states.count("COMPLETE") >= searched


def test_folder_that_cannot_be_resumed_is_rejected_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["resume", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    other = RunDirectory.create(tmp_path, "profile", "tiny", {})
    assert run(["resume", str(other.path)]) == 2
    assert "verb is 'profile'" in capsys.readouterr().err
    attached = make_run_folder(tmp_path, "Net", {"mode": "exact", "stage": "act", "batching": "fixed", "policy": "ppo"})
    assert run(["resume", str(attached)]) == 2
    assert "is a run of 'attach'" in capsys.readouterr().err

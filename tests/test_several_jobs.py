"""Tests of comparing on several jobs: stratified intervals, and resumption."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from autotune import commands
from autotune.campaign import comparison_campaign
from autotune.campaign.comparison import GATE
from autotune.campaign.setup import Campaign
from autotune.cli.main import run
from autotune.records.requests import CompareRequest
from autotune.records.run_directory import RunDirectory
from autotune.records.stratified import together

TESTS = Path(__file__).parent
JOBS = [f"{TESTS / 'tiny_job.py'}:job", f"{TESTS / 'several_jobs.py'}:narrow"]


def document(job: str, times: dict[str, list[float | None]], **entries: dict[str, Any]) -> dict[str, Any]:
    arms = [
        {"name": name, "runs": [{"seed": seed, "time_to_target_s": value} for seed, value in enumerate(values)]}
        for name, values in times.items()
    ]
    judged = {"time_ratio": 0.5, "non_inferior": True, "verdict": "faster", "reason": ""}
    found = [{"arm": name, **judged, **entries.get(name, {})} for name in times if name != "baseline"]
    return {
        "job": job,
        "baseline": "baseline",
        "seeds": list(range(len(times["baseline"]))),
        "arms": arms,
        "against_baseline": found,
    }


def test_each_job_has_equal_weight_and_failures_on_one_job_count() -> None:
    one = document("one", {"baseline": [10.0] * 4, "a": [5.0, 5.1, 4.9, 5.0], "b": [1.0] * 4})
    two = document("two", {"baseline": [1.0] * 2, "a": [2.0, 2.0], "b": [1.0] * 2})
    first, second = together([one, two])
    assert first["time_ratio"] == pytest.approx(math.sqrt(0.5 * 2), rel=0.01)
    assert first["verdict"] == "no difference shown"
    assert second["time_ratio"] == pytest.approx(math.sqrt(0.1), rel=0.01)
    assert second["verdict"] == "faster"
    lost = {"verdict": "slower", "time_ratio": None, "non_inferior": False, "reason": "1 of 2 runs ended with crashed"}
    (entry,) = together([one, document("two", {"baseline": [1.0] * 2, "b": [1.0, None]}, b=lost)])
    assert (entry["verdict"], entry["reason"]) == ("slower", "two: 1 of 2 runs ended with crashed")
    assert not entry["non_inferior"]


def test_several_jobs_are_compared_by_one_command_that_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = comparison_campaign.compare
    begun: list[str] = []

    def killed_at_the_second(campaign: Campaign, *arguments: Any, **options: Any) -> dict[str, Any]:
        begun.append(campaign.job.name)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return real(campaign, *arguments, **options)

    options = ["--arms", f"uniform-bf16,{GATE}", "--seeds", "2", "--runs-dir", str(tmp_path), "--json"]
    with monkeypatch.context() as patch:
        patch.setattr(comparison_campaign, "compare", killed_at_the_second)
        assert run(["compare", *JOBS, *options]) == 130
    (folder,) = tmp_path.glob("*-compare-jobs-*")
    first = next(tmp_path.glob("*-compare-tiny-*"))
    assert (first / "comparison.json").is_file()
    capsys.readouterr()
    # Only the caller can name code to be loaded.
    assert run(["resume", str(folder), "--job", JOBS[0]]) == 2
    assert "is code, which is not loaded because only the run's own files request it" in capsys.readouterr().err
    assert run(["resume", str(folder), "--job", JOBS[0], "--job", JOBS[1], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["job"] for entry in found["jobs"]] == ["tiny", "narrow"]
    assert found["jobs"][0]["run"] == str(first)
    assert [entry["arm"] for entry in found["together"]] == ["uniform-bf16"]
    assert found["together"][0]["verdict"] in ("faster", "slower", "no difference shown", "not comparable")
    assert RunDirectory.open(folder).read("jobs.json") == found
    assert commands.resume(folder) == found
    # The baseline was compared with itself on both jobs.
    gates = [RunDirectory.open(Path(entry["run"])).read("comparison.json")["gate"] for entry in found["jobs"]]
    assert [gate["arm"] for gate in gates] == [GATE, GATE]
    assert [gate["samples_ratio"] for gate in gates] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*JOBS, "--arms", "plan.json"], "a plan file fits one job"),
        ([JOBS[0], JOBS[0], "--arms", "paper"], "different jobs"),
        ([*JOBS, "--arms", GATE], "there is nothing to compare"),
        ([JOBS[0], "nowhere", "--arms", "paper"], "nowhere"),
    ],
)
def test_invalid_input_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", *arguments, "--runs-dir", str(tmp_path / "runs")]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_campaign_is_not_resumed_on_another_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = CompareRequest(job="digits", arms=["baseline", "paper"], seeds=[1, 2], steps=60)
    arms = {"arms": request.arms, "seeds": request.seeds}
    config = {**arms, "memory_budget": None, "steps": 60, "seed": 0, "asked": asdict(request)}
    folder = RunDirectory.create(tmp_path, "compare", "digits", config)
    folder.close()
    monkeypatch.setattr("autotune.commands.resuming.device_name", lambda: "another")
    assert run(["resume", str(folder.path)]) == 2
    assert "times from different devices are not comparable" in capsys.readouterr().err

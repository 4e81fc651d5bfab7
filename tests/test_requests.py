"""Tests of requests: they round-trip, record no secret, and are the same from command line and keywords."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune import ClusterOptions, InputError, RankOptions, RunDirectoryError, commands
from autotune.campaign.arms import arm_names
from autotune.campaign.setup import prepare
from autotune.campaign.trusted_inputs import TrustedInputs
from autotune.cli.console import ranks
from autotune.cli.main import run
from autotune.io.documents import validated
from autotune.io.progress import Silent
from autotune.plan import Launch
from autotune.records.requests import CompareOptions, Ranks, TuneRequest, digest_of, recorded_address

OPTIONS: dict[str, Any] = {
    "memory_budget": "75%",
    "gradient_norm": 2.5,
    "steps": 80,
    "trials": 7,
    "seed": 3,
    "lean": False,
    "watts": 65.5,
}
TUNE = TuneRequest(
    job="digits",
    method="random",
    isolate=True,
    ranks=Ranks.of(RankOptions(count=3, zero_stage=2, config={"a": 1})),
    cluster=ClusterOptions(address="local:2", cores=4),
    storage=recorded_address("postgresql://user@host:1/db"),
    weights="1,0,0.5",
    **OPTIONS,
)
COMPARE = CompareOptions(seeds=4, dips="5:70%", carbon_intensity="300", **OPTIONS).request(
    "digits", ["baseline", "paper"], within="another-run"
)


@pytest.mark.parametrize("request_", [TUNE, COMPARE], ids=["tune", "compare"])
def test_request_round_trips_through_its_document(request_: Any) -> None:
    written = json.loads(json.dumps(asdict(request_)))
    assert validated(type(request_), written, where="config.json") == request_


@pytest.mark.parametrize(
    "options",
    [
        RankOptions(count=3, zero_stage=2),
        RankOptions(engine="fsdp2", count=4, mesh="dp=2,shard=2"),
        RankOptions(engine="pipeline", count=2, mesh="pipe=2,schedule=gpipe,units=3/5"),
        RankOptions(engine="pipeline"),
    ],
    ids=str,
)
def test_options_of_recorded_ranks_make_the_same_ranks(options: RankOptions) -> None:
    recorded = Ranks.of(options)
    assert recorded is not None
    given = dict(zip(recorded.flags[::2], recorded.flags[1::2], strict=True))
    again = ranks(given["--engine"], int(given["--ranks"]), given.get("--zero-stage", "0"), None, given.get("--mesh"))
    assert again == options
    # Ranks that were to try each layout have the one that the plan was measured in.
    launch = options.launched(Launch())
    assert replace(recorded, zero_stage=0, mesh=None).of_layout(launch) == replace(
        recorded, mesh=launch.mesh or launch.pipeline
    )


def test_passwords_and_configurations_are_not_recorded() -> None:
    config = {"token": "S3CRET"}
    request = TuneRequest(
        job="digits",
        method="random",
        ranks=Ranks.of(RankOptions(config=config)),
        storage=recorded_address("postgresql://user:S3CRET@host:1/db"),
    )
    assert "S3CRET" not in json.dumps(asdict(request))
    assert request.ranks is not None
    assert request.ranks.config == digest_of(config)


BOTH: dict[str, tuple[str, list[str], Callable[[Path], object]]] = {
    "tune": (
        "tuning.run_tuning",
        ["--method", "random"],
        lambda runs: autotune.tune("digits", "random", runs_dir=runs, **OPTIONS),
    ),
    "compare": (
        "comparing.run_comparison",
        ["--arms", "paper", "--seeds", "4", "--dips", "5:70%"],
        lambda runs: autotune.compare("digits", ["paper"], seeds=4, dips="5:70%", runs_dir=runs, **OPTIONS),
    ),
}


@pytest.mark.parametrize("command", BOTH)
def test_command_line_and_keyword_arguments_make_the_same_request(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, more, by_keywords = BOTH[command]
    made: list[Any] = []

    def keep(request: Any, trusted: TrustedInputs, *_: Any, **__: Any) -> dict[str, Any]:
        made.append((request, trusted))
        raise InputError("seen")

    monkeypatch.setattr(f"autotune.commands.{where}", keep)
    monkeypatch.setattr(f"autotune.commands.{where.rpartition('.')[2]}", keep)
    given = ["--memory-budget", "75%", "--gradient-norm", "2.5", "--steps", "80", "--trials", "7", "--seed", "3"]
    given += ["--full", "--watts", "65.5"]
    assert run([command, "digits", *given, *more, "--runs-dir", str(tmp_path)]) == 2
    with pytest.raises(InputError, match="seen"):
        by_keywords(tmp_path)
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"cluster": ClusterOptions(address="local:2"), "ranks": Ranks(count=2, zero_stage=0)},
            "--cluster cannot be combined",
        ),
        ({"steps": 1}, "--steps: steps is 1"),
        ({"isolate": True, "job": None}, "isolate: expected a job's reference"),
    ],
)
def test_contradicting_options_are_rejected(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    request = TuneRequest(**{"job": "digits", "method": "random", **changes})
    job = "digits" if request.job else autotune.load_job("digits")
    trusted = TrustedInputs(jobs=[job], cluster="local:2" if request.cluster else None)
    with pytest.raises(InputError, match=said):
        prepare(request, trusted, tmp_path, Silent())


@pytest.mark.parametrize("request_", [TUNE, COMPARE], ids=["tune", "compare"])
def test_resumed_campaign_keeps_the_limit_on_the_gradient(request_: Any, tmp_path: Path) -> None:
    recorded = {**asdict(request_), "ranks": None, "cluster": None, "storage": None}
    read = validated(type(request_), json.loads(json.dumps(recorded)), where="config.json")
    objective = prepare(
        read, TrustedInputs(jobs=["digits"], carbon_intensity="300"), tmp_path, Silent()
    ).settings.objective
    assert objective.gradient_norm == OPTIONS["gradient_norm"]


@pytest.mark.parametrize(
    ("recorded", "given", "said"),
    [
        ("postgresql://user@host/db", None, "is not taken from a run's own files .*--storage with the value of"),
        (None, "postgresql://user@host/db", "--storage is given, but the original command was run without it"),
    ],
)
def test_address_is_required_exactly_if_the_original_command_had_one(
    recorded: str | None, given: str | None, said: str, tmp_path: Path
) -> None:
    with pytest.raises(RunDirectoryError, match=f"{tmp_path}: .*{said}"):
        TrustedInputs(storage=given, run=tmp_path).database(recorded)


def test_contradicting_training_options_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--search-decisions requires --search"):
        commands.TrainRequest(decisions=8)
    with pytest.raises(InputError, match="--recipe cannot be combined with --resume"):
        commands.TrainRequest(recipe=tmp_path, resume=tmp_path)
    with pytest.raises(InputError, match="--cluster cannot be combined with --search"):
        commands.TrainRequest(cluster=ClusterOptions(address="local:2"), trials=2)


@pytest.mark.parametrize(("tuning", "expected"), [(0, [1000, 1001, 1002]), (1001, [1000, 1002, 1003])])
def test_compared_seeds_were_not_used_in_any_search(tuning: int, expected: list[int]) -> None:
    assert CompareOptions(seeds=3, seed=tuning).request("digits", ["baseline"]).seeds == expected


def test_arms_are_recognized_in_the_notation_of_the_original_command(tmp_path: Path) -> None:
    given = "p.json+tf32+adamw=3e-4"
    (recorded,) = set(arm_names([given])) - {"baseline"}
    assert recorded != given
    TrustedInputs(run=tmp_path, arms=[given]).require_arms(["baseline", recorded])
    with pytest.raises(RunDirectoryError, match="is a file or a folder"):
        TrustedInputs(run=tmp_path).require_arms([recorded])

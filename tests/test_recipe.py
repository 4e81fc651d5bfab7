"""Tests of recipes: the settings that the shipped policy is trained with, and errors of one line."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune import InputError
from autotune.agents.recipe import JobsRecipe, LeverRecipe, Recipe, read_recipe, recipe_of
from autotune.cli.main import run
from autotune.simulator.moving_conditions import Strengths
from autotune.simulator.planner_settings import PlannerSettings

SHIPPED = Path(__file__).parent.parent / "policies" / "ppo.toml"
PARTS = {"ppo": LeverRecipe, "jobs": JobsRecipe, "strengths": Strengths, "planner": PlannerSettings}


def test_shipped_recipe_has_the_documented_values() -> None:
    recipe, document = read_recipe(SHIPPED), tomllib.loads(SHIPPED.read_text())
    assert list(recipe.seeds) == document["seeds"]
    for name in PARTS:
        for key, value in document[name].items():
            own = getattr(getattr(recipe, name), key)
            assert (list(own) if isinstance(own, tuple) else own) == value
    # Changing conditions are declared in full, so that no default of a later version affects them.
    assert set(document["strengths"]) == {item.name for item in dataclasses.fields(Strengths)}


def test_omitted_recipe_values_have_defaults(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("version = 1\n")
    assert read_recipe(path) == Recipe()
    path.write_text("version = 1\nseeds = [7]\n[ppo]\nlearning_rate = 1\n")
    found = read_recipe(path)
    assert found == Recipe(seeds=(7,), ppo=LeverRecipe(learning_rate=1.0))
    assert type(found.ppo.learning_rate) is float


def test_recipe_round_trips_through_json() -> None:
    for recipe in (Recipe(), read_recipe(SHIPPED)):
        again = recipe_of(json.loads(json.dumps(recipe.to_json(), allow_nan=False)))
        assert again == recipe
        assert (again.sha256, again.strengths_sha256) == (recipe.sha256, recipe.strengths_sha256)


def names_of(part: object) -> list[str]:
    return [item.name for item in dataclasses.fields(part)]  # type: ignore[arg-type]


def moved(value: Any) -> Any:
    """Return another value that is valid wherever the first is."""
    if isinstance(value, tuple):
        return ("jittered",)
    if isinstance(value, str):
        return {"belief": "last", "weighed": "assumed"}[value]
    other = value + 4 if isinstance(value, int) else 0.8 * value + 0.013
    assert other != value
    return other


@pytest.mark.parametrize("name", names_of(Strengths))
def test_hashes_change_with_any_strength(name: str) -> None:
    recipe = read_recipe(SHIPPED)
    other = moved(getattr(recipe.strengths, name))
    changed = dataclasses.replace(recipe, strengths=dataclasses.replace(recipe.strengths, **{name: other}))
    assert changed.strengths_sha256 != recipe.strengths_sha256
    assert changed.sha256 != recipe.sha256


@pytest.mark.parametrize("part", ["ppo", "jobs", "planner"])
def test_recipe_hash_changes_with_other_values_and_the_hash_of_strengths_does_not(part: str) -> None:
    recipe = Recipe(ppo=LeverRecipe(lanes=4, clones=2))
    seen = {recipe.sha256}
    for name in names_of(PARTS[part]):
        own = getattr(recipe, part)
        other = 1 if name == "clones" else moved(getattr(own, name))
        changed = dataclasses.replace(recipe, **{part: dataclasses.replace(own, **{name: other})})
        assert changed.strengths_sha256 == recipe.strengths_sha256
        seen.add(changed.sha256)
    seen.add(dataclasses.replace(recipe, seeds=(4, 3, 2, 1, 0)).sha256)
    assert len(seen) == len(names_of(PARTS[part])) + 2


def toml(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(f"version = 1\n{text}\n")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "cannot be read"),
    "folder": (Path.mkdir, "is a folder"),
    "oversized": (lambda path: path.write_text("version = 1\n" + "#" * 2**16), "larger than 65536"),
    "device that never ends": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
    "empty": (lambda path: path.write_text(""), "version is None"),
    "not TOML": (lambda path: path.write_text("{}"), "is not TOML"),
    "JSON": (lambda path: path.write_text('{"version": 1}'), "is not TOML"),
    "not text": (lambda path: path.write_bytes(b"version = 1\n# \xff\xfe"), "is not UTF-8 text at byte 14"),
    "nested without end": (toml("seeds = " + "[" * 30_000), "is not TOML"),
    "number without end": (toml("[ppo]\nlanes = " + "9" * 9000), "is not TOML"),
    "key twice": (toml("[ppo]\nlanes = 1\nlanes = 2"), "is not TOML"),
    "table twice": (toml("[ppo]\nlanes = 1\n[ppo]\nlanes = 2"), "is not TOML"),
    "no version": (lambda path: path.write_text("seeds = [1]\n"), "version is None"),
    "newer version": (lambda path: path.write_text("version = 2\n"), "version is 2 (allowed: 1)"),
    "version in words": (lambda path: path.write_text('version = "1"\n'), "version is '1'"),
    "version that is true": (lambda path: path.write_text("version = true\n"), "version is True"),
    "version with a point": (lambda path: path.write_text("version = 1.0\n"), "version is 1.0"),
    "unknown table": (toml("[optimizer]\nlearning_rate = 1"), "unknown key 'optimizer'"),
    "unknown key": (toml("rate = 3"), "unknown key 'rate'"),
    "key that writes on the terminal": (toml('"\\u001b[2J\\n" = 3'), r"unknown key '\x1b[2J\n'"),
    "unknown key of ppo": (toml("[ppo]\nspeed = 3"), "unknown key 'ppo.speed'"),
    "unknown key of jobs": (toml("[jobs]\nspeed = 3"), "unknown key 'jobs.speed'"),
    "unknown strength": (toml("[strengths]\nspeed = 3"), "unknown key 'strengths.speed'"),
    "unknown setting": (toml("[planner]\nspeed = 3"), "unknown key 'planner.speed'"),
    "table that is none": (toml("ppo = 3"), "ppo is 3 (allowed: an object)"),
    "list of tables": (toml("[[ppo]]\nlanes = 3"), "(allowed: an object)"),
    "text for a number": (toml('[ppo]\nlearning_rate = "0.1"'), "ppo.learning_rate is '0.1'"),
    "part of a whole number": (toml("[ppo]\nlanes = 2.5"), "ppo.lanes is 2.5 (allowed: a whole number)"),
    "whole number with a point": (toml("[ppo]\nlanes = 2.0"), "ppo.lanes is 2.0"),
    "true for a whole number": (toml("[ppo]\nlanes = true"), "ppo.lanes is True"),
    "true for a number": (toml("[strengths]\nlength = true"), "strengths.length is True"),
    "date for a number": (toml("[strengths]\nlength = 2024-01-01"), "is not JSON (Object of type date"),
    "list for a number": (toml("[strengths]\nlength = [0.1]"), "strengths.length is [0.1]"),
    "negative number": (
        toml("[strengths]\nlength = -0.1"),
        "strengths.length is -0.1 (allowed: a number from 0 to 1e+12)",
    ),
    "negative whole number": (toml("[strengths]\nevent_every = -1"), "strengths.event_every is -1"),
    "negative setting": (toml("[planner]\nrise = -1e-9"), "planner.rise is -1e-09"),
    "NaN": (toml("[planner]\nrise = nan"), "planner.rise is nan"),
    "infinity": (toml("[strengths]\njitter = inf"), "strengths.jitter is inf"),
    "infinity by digits": (toml("[strengths]\njitter = 1e999"), "strengths.jitter is inf"),
    "no seeds": (toml("seeds = []"), "seeds is []"),
    "seed twice": (toml("seeds = [1, 2, 1]"), "seeds is [1, 2, 1] (allowed: different whole numbers)"),
    "one seed that is no list": (toml("seeds = 3"), "seeds is 3"),
    "negative seed": (toml("seeds = [-1]"), "seeds is [-1]"),
    "seed that is true": (toml("seeds = [true]"), "seeds[0] is True"),
    "seed that generators do not take": (toml("seeds = [4294967296]"), "seeds is [4294967296]"),
    "no decisions": (toml("[ppo]\ndecisions = 0"), "ppo.decisions is 0"),
    "no lanes": (toml("[ppo]\nlanes = 0"), "ppo.lanes is 0"),
    "clones that do not divide lanes": (toml("[ppo]\nlanes = 6\nclones = 4"), "ppo.clones is 4"),
    "batch of one": (toml("[ppo]\nbatch = 1"), "ppo.batch is 1"),
    "rate of zero": (toml("[ppo]\nlearning_rate = 0"), "ppo.learning_rate is 0.0"),
    "discount above 1": (toml("[ppo]\ndiscount = 1.1"), "ppo.discount is 1.1"),
    "narrow network": (toml("[ppo]\nwidth = 4"), "ppo.width is 4 (allowed: 8 to 128)"),
    "wide network": (toml("[ppo]\nwidth = 4096"), "ppo.width is 4096"),
    "no jobs": (toml("[jobs]\ntraining = 0"), "jobs.training is 0"),
    "deepest above shallowest": (toml("[jobs]\nshallowest = 9\ndeepest = 3"), "jobs.deepest is 3"),
    "more than all jobs": (toml("[jobs]\nall_storages_frac = 1.5"), "jobs.all_storages_frac is 1.5"),
    "one window": (toml("[jobs]\nwindows = 1"), "jobs.windows is 1"),
    "share above 1": (toml("[strengths]\ncommon_share = 1.5"), "strengths.common_share is 1.5"),
    "lanes above all": (toml("[strengths]\nlength_lanes = 1.01"), "strengths.length_lanes is 1.01"),
    "event that leaves nothing": (toml("[strengths]\nevent_share = 0"), "strengths.event_share is 0.0"),
    "event that leaves more": (toml("[strengths]\nevent_share = 1.1"), "strengths.event_share is 1.1"),
    "nothing remembered of lengths": (toml("[strengths]\nlength_windows = 0"), "strengths.length_windows is 0.0"),
    "nothing remembered of speeds": (toml("[strengths]\ndrift_windows = 0.0"), "strengths.drift_windows is 0.0"),
    "spread below 1": (toml("[strengths]\nspread = 0"), "strengths.spread is 0.0"),
    "deviation without bound": (toml("[strengths]\nlength = 1e11"), "strengths.length is 100000000000.0"),
    "horizon beyond the longest forecast": (toml("[planner]\nhorizon = 1000"), "planner.horizon is 1000"),
    "unknown explanation of costs": (toml("[planner]\ncosts = 'guessed'"), "costs"),
    "dips that leave nothing": (toml("[strengths]\nevent_share = 1e-300"), "strengths.event_share is 1e-300"),
    "share of a planner above 1": (toml("[planner]\ncommon_share = 2"), "planner.common_share is 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_recipe_is_one_line_exit_code_2_and_no_files(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, expected = BAD[case]
    path, work = tmp_path / "recipe.toml", tmp_path / "work"
    make(path)
    work.mkdir()
    monkeypatch.chdir(work)
    with pytest.raises(InputError) as raised:
        read_recipe(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert expected in str(raised.value)
    assert run(["train", "--recipe", str(path), "--runs-dir", "runs"]) == 2
    captured = capsys.readouterr()
    # The command line checks the kind of file at a path before reading it.
    refused_early = f"autotune: --recipe {path}: is neither a file nor a folder (allowed: a file or a folder)"
    assert captured.err.strip() in (f"autotune: {raised.value}", refused_early)
    assert str(raised.value).isprintable()
    assert captured.out == ""
    assert list(work.iterdir()) == []


def test_recipe_and_resume_cannot_be_combined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--recipe", str(SHIPPED), "--resume", str(tmp_path), "--runs-dir", str(tmp_path / "runs")]
    assert run(arguments) == 2
    assert "--recipe cannot be combined with --resume" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("strengths", [Strengths(), read_recipe(SHIPPED).strengths])
def test_every_single_strength_is_within_the_bounds(strengths: Strengths) -> None:
    for item in dataclasses.fields(Strengths):
        document = {"version": 1, "strengths": {item.name: getattr(strengths, item.name)}}
        assert getattr(recipe_of(document).strengths, item.name) == getattr(strengths, item.name)

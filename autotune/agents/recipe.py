"""Training recipes: TOML files with the jobs, the conditions and PPO's settings for training a policy."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from autotune.io.documents import STRICT, validated
from autotune.io.files import json_sha256, read_text
from autotune.simulator.dip_families import FAMILIES
from autotune.simulator.moving_conditions import Strengths
from autotune.simulator.planner_settings import PlannerSettings

RECIPE_VERSION = 1
_LARGEST_BYTES = 2**16
# Upper bound of all numbers in a recipe.
_LIMIT = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverRecipe:
    """PPO's settings for a network of levers.

    Attributes:
        decisions: windows to train on.
        lanes: number of simultaneous runs.
        clones: lanes that share a course; with more than one, a reward is relative to the mean of the other lanes.
        epochs: passes over a rollout, which is one whole run of every lane.
        batch: decisions in a gradient step.
        learning_rate: learning rate of Adam, which falls linearly to 0.
        entropy: weight of the entropy bonus.
        clip: PPO's clip range.
        discount: discount of rewards per window.
        trace: lambda of generalised advantage estimation.
        width: width of the network.
    """

    __pydantic_config__ = STRICT

    decisions: int = 2_000_000
    lanes: int = 256
    clones: int = 1
    epochs: int = 6
    batch: int = 2048
    learning_rate: float = 1e-3
    entropy: float = 2e-3
    clip: float = 0.2
    discount: float = 0.95
    trace: float = 0.9
    width: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsRecipe:
    """The simulated jobs for training and validation.

    Attributes:
        training: number of jobs for training.
        validation: number of jobs for choosing the best seed.
        seed: random seed for the training jobs; the validation jobs use the next seed.
        shallowest: recomputable units of the shallowest job.
        deepest: recomputable units of the deepest job.
        windows: windows of a run.
        all_storages_frac: share of the jobs that offer all storages; the others offer to save or to recompute.
    """

    __pydantic_config__ = STRICT

    training: int = 384
    validation: int = 128
    seed: int = 1
    shallowest: int = 2
    deepest: int = 24
    windows: int = 60
    all_storages_frac: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe.

    Attributes:
        seeds: random seeds, one per trained network; the policy is the network that is best on validation jobs.
        ppo: PPO's settings.
        jobs: the simulated jobs.
        strengths: how strongly the conditions vary.
        planner: settings of the planner that the policy adjusts.
    """

    __pydantic_config__ = STRICT

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    ppo: LeverRecipe = field(default_factory=LeverRecipe)
    jobs: JobsRecipe = field(default_factory=JobsRecipe)
    strengths: Strengths = field(default_factory=Strengths)
    planner: PlannerSettings = field(default_factory=PlannerSettings)

    def __post_init__(self) -> None:
        for name in ("ppo", "jobs", "strengths", "planner"):
            numbers = {key: one for key, one in asdict(getattr(self, name)).items() if isinstance(one, int | float)}
            for key, value in numbers.items():
                _require(0 <= value < _LIMIT, f"{name}.{key}", value, f"a number from 0 to {_LIMIT:g}")
        seeds = self.seeds
        _require(all(seed >= 0 for seed in seeds), "seeds", list(seeds), "whole numbers >= 0")
        _require(len(seeds) > 0 and len(set(seeds)) == len(seeds), "seeds", list(seeds), "different whole numbers")
        _require(max(seeds) < 2**32, "seeds", list(seeds), "numbers below 2^32")
        ppo, jobs = self.ppo, self.jobs
        for name in ("decisions", "lanes", "clones", "epochs", "batch"):
            _require(getattr(ppo, name) >= 1, f"ppo.{name}", getattr(ppo, name), ">= 1")
        _require(ppo.lanes % ppo.clones == 0, "ppo.clones", ppo.clones, "a divisor of ppo.lanes")
        _require(8 <= ppo.width <= 128, "ppo.width", ppo.width, "8 to 128")
        for name in ("learning_rate", "clip", "discount", "trace"):
            _require(0 < getattr(ppo, name) <= 1, f"ppo.{name}", getattr(ppo, name), "above 0, at most 1")
        for name in ("training", "validation", "shallowest"):
            _require(getattr(jobs, name) >= 1, f"jobs.{name}", getattr(jobs, name), ">= 1")
        _require(jobs.deepest >= jobs.shallowest, "jobs.deepest", jobs.deepest, ">= jobs.shallowest")
        _require(jobs.all_storages_frac <= 1, "jobs.all_storages_frac", jobs.all_storages_frac, "at most 1")
        _require(jobs.windows >= 2, "jobs.windows", jobs.windows, ">= 2")
        _require(ppo.batch >= 2, "ppo.batch", ppo.batch, ">= 2")
        self._check_strengths()

    def _check_strengths(self) -> None:
        """Reject strengths with which no course can be drawn."""
        strengths = self.strengths
        sizes = ("noise_error", "cost_error", "time_noise", "drift", "length", "curriculum", "jitter", "event_depth")
        for name in (*sizes, "spread"):
            value = getattr(strengths, name)
            _require(value <= 10, f"strengths.{name}", value, "at most 10")
        for name in ("common_share", "length_lanes", "event_share", "event_told"):
            value = getattr(strengths, name)
            _require(value <= 1, f"strengths.{name}", value, "at most 1")
        for name in ("drift_windows", "length_windows"):
            value = getattr(strengths, name)
            _require(value > 0, f"strengths.{name}", value, "above 0")
        _require(strengths.event_share >= 0.01, "strengths.event_share", strengths.event_share, "at least 0.01")
        _require(strengths.spread >= 1, "strengths.spread", strengths.spread, ">= 1")
        families = strengths.event_families
        _require(bool(families) and set(families) <= set(FAMILIES), "strengths.event_families", families, [*FAMILIES])
        lasts = strengths.event_windows
        _require(1 <= lasts <= 1000, "strengths.event_windows", lasts, "1 to 1000")

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as a JSON object."""
        strengths = {**asdict(self.strengths), "event_families": list(self.strengths.event_families)}
        return {"version": RECIPE_VERSION, **asdict(self), "seeds": list(self.seeds), "strengths": strengths}

    def to_toml(self) -> str:
        """Return the whole recipe as the text of a recipe file."""
        lines = [f"version = {RECIPE_VERSION}", f"seeds = {list(self.seeds)}"]
        for name, part in asdict(self).items():
            if name != "seeds":
                lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in part.items())]
        return "\n".join(lines) + "\n"

    @property
    def strengths_sha256(self) -> str:
        """Return a SHA-256 of the strengths, which are fixed before training begins."""
        return json_sha256(asdict(self.strengths))

    @property
    def sha256(self) -> str:
        """Return a SHA-256 of the whole recipe."""
        return json_sha256(self.to_json())


def read_recipe(path: Path) -> Recipe:
    """Read a recipe file.

    Raises:
        InputError: if the recipe is invalid; the message gives the file, the key, its value and what is allowed.
    """
    where = str(path)
    text = read_text(path, limit_bytes=_LARGEST_BYTES)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Invalid syntax, deep nesting, or integers with more digits than Python converts.
        raise InputError(f"is not TOML ({error})", where=where, allowed="a recipe in TOML") from error
    return recipe_of(document, where=where)


def recipe_of(document: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
    """Return the recipe in a document.

    Raises:
        InputError: if the recipe is invalid; the message gives the key, its value and what is allowed.
    """
    return validated(Recipe, document, where=where, version=RECIPE_VERSION)


def _toml(value: object) -> str:
    return json.dumps(value) if isinstance(value, str | tuple | bool) else repr(value)


def _require(holds: bool, name: str, value: object, allowed: str | list[str]) -> None:
    if not holds:
        raise InputError(f"{name} is {value!r}", where="recipe", allowed=allowed)

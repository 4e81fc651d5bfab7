"""Helpers that run real campaigns of a tiny job, whose reports are then tested."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tiny_job
import torch
from torch import nn

import autotune
from autotune.agents.policy import StaticPolicy
from autotune.campaign.comparison import compare
from autotune.gym.observation import Observation
from autotune.io.files import write_json
from autotune.plan import Plan, PlanSpace
from autotune.records.protocol import Arm, Protocol
from autotune.report.writing import write_campaign


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


ARMS = ["paper", "exact", "optuna"]
JOB = tiny_job.make(evaluate_every=2, target=3.9, optimizer=adamw)


class Restless:
    """An arm that changes its plan after every window."""

    name = "restless"

    def __init__(self, space: PlanSpace) -> None:
        self.plan = space.baseline()
        self._plans = itertools.cycle([space.leanest(), space.baseline()])

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        return next(self._plans)

    def reset(self) -> None:
        pass


def compare_all(runs: Path) -> Path:
    """Compare arms, one of which changes its plan for certain, and return the run directory."""
    found = autotune.compare(JOB, ARMS, seeds=2, memory_budget="90%", steps=48, runs_dir=runs)
    folder = Path(found["run"])
    live = restless(found)
    for key in ("arms", "against_baseline"):
        found[key].append(live[key][-1])
    write_json(folder / "comparison.json", found)
    write_campaign(folder)
    return folder


def restless(found: dict[str, Any]) -> dict[str, Any]:
    """Compare the baseline with an arm that changes its plan after every window."""
    protocol = Protocol(
        job=JOB.name,
        arms=("baseline", "restless"),
        seeds=tuple(found["seeds"]),
        horizon_samples=found["horizon_samples"],
        memory_budget_bytes=found["memory_budget_bytes"],
    )
    arms = [Arm(name="baseline", policy=lambda space: StaticPolicy("baseline", space.baseline()))]
    return compare(JOB, [*arms, Arm(name="restless", policy=Restless)], protocol, device=found["device"])


def tune_one(runs: Path) -> Path:
    """Tune the job and return the run directory."""
    return Path(autotune.tune(JOB, "optuna", memory_budget="90%", steps=48, runs_dir=runs)["run"])

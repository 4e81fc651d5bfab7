"""Settings of a policy's evaluation, and the evaluated policy: its folder and all networks of its training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autotune.agents.planner_policy import PlannerPolicy, Ranges
from autotune.agents.policy_folder import MANIFEST, WEIGHTS, fill, load_policy
from autotune.agents.shipped_network import LeverNetwork
from autotune.choices import DEFAULT_STORAGES, Storage
from autotune.errors import PolicyFileError, RunDirectoryError
from autotune.gym.levers import NEUTRAL, Actions, Features
from autotune.io.files import read_bytes, read_json, require_plain
from autotune.simulator.dip_families import FAMILIES
from autotune.simulator.planner_settings import PlannerSettings

# Active strengths in each world; the recipe was not fitted to "all_half" and "all_double".
MECHANISMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "noise_scale": ("noise_error",),
    "costs": ("cost_error", "drift", "time_noise"),
    "pressure": ("length", "jitter"),
    "curriculum": ("curriculum",),
    "events": ("event_every",),
    "switching": ("switch_windows", "event_every"),
}
# Factor on the fitted strengths in the worlds in which all conditions change.
FACTORS = {"all": 1.0, "all_half": 0.5, "all_double": 2.0}
VARIANTS = ("depth48", "shifted", "misjudged")

# Offset of the random seed for moving jobs; static jobs use the seed itself.
MOVING_SEED = 10_000
_LARGEST_NETWORK_BYTES = 64 * 2**20

Choose = Callable[[tuple[Features, Features]], Actions]
Share = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Settings of an evaluation.

    Attributes:
        jobs: number of held-out jobs in each table.
        seed: random seed for the jobs.
        depth: smallest and largest number of recomputable units of the static jobs.
        storages: allowed storages of recomputable units.
        variants: further static tables; any of ``VARIANTS``.
        mechanisms: the moving worlds; keys of ``MECHANISMS`` and ``FACTORS``.
        families: families of dips, each a table of its own; keys of ``FAMILIES``.
        lanes: smallest number of parallel moving runs.
        evaluations: number of plans that each search may measure.
        optuna_jobs: largest number of static jobs for Optuna, which is slow.
        units: number of units of the job on which decisions are timed.
    """

    jobs: int = 200
    seed: int = 0
    depth: tuple[int, int] = (2, 48)
    storages: tuple[Storage, ...] = DEFAULT_STORAGES
    variants: tuple[str, ...] = VARIANTS
    mechanisms: tuple[str, ...] = (*MECHANISMS, *FACTORS)
    families: tuple[str, ...] = tuple(FAMILIES)
    lanes: int = 128
    evaluations: int = 50
    optuna_jobs: int = 16
    units: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Contents of a policy folder, and the networks of all seeds of its training.

    Attributes:
        folder: the policy folder.
        settings: settings of the planner that the policy adjusts.
        ranges: ranges of the features in training.
        shipped: the network in the folder.
        networks: the networks to evaluate, by name; without a training run, only the shipped one.
        hashes: hashes of the files, for the document.
    """

    folder: Path
    settings: PlannerSettings
    ranges: Ranges
    shipped: LeverNetwork
    networks: Mapping[str, LeverNetwork]
    hashes: Mapping[str, Any]


def load_judged(policy: Path, train_run: Path | None = None) -> Judged:
    """Load the policy to evaluate.

    Args:
        policy: a policy folder that ``train`` wrote.
        train_run: run directory of a training, to evaluate all its networks; ``None`` for the policy alone.

    Raises:
        PolicyFileError: if the folder has no such policy, or the file of a network is damaged.
        RunDirectoryError: if the run directory has no networks.
    """
    loaded = load_policy(policy)
    if not isinstance(loaded, PlannerPolicy):
        raise PolicyFileError("does not adjust a planner", where=str(policy), allowed="a policy that adjusts a planner")
    # Loading the policy has checked both files.
    manifest = read_json(policy / MANIFEST)
    files = {"policy": policy / WEIGHTS}
    if train_run is not None:
        require_plain(train_run)
        files = {path.stem: path for path in sorted(train_run.glob("seed-*.safetensors"))}
        if not files:
            raise RunDirectoryError(
                "has no seed-*.safetensors", where=str(train_run), allowed="the run directory of a training"
            )
    return Judged(
        folder=policy,
        settings=loaded.settings,
        ranges=Ranges(np.array(manifest["lowest"]), np.array(manifest["highest"])),
        shipped=_network(policy / WEIGHTS, manifest["width"]),
        networks={name: _network(path, manifest["width"]) for name, path in files.items()},
        hashes={
            "weights_sha256": manifest["weights_sha256"],
            "recipe_sha256": manifest["training"]["recipe_sha256"],
            "strengths_sha256": manifest["training"]["strengths_sha256"],
            "planner": asdict(loaded.settings),
            "networks_sha256": {name: hashlib.sha256(_bytes(path)).hexdigest() for name, path in files.items()},
        },
    )


def _bytes(path: Path) -> bytes:
    return read_bytes(path, limit_bytes=_LARGEST_NETWORK_BYTES, follow=False)


def _network(path: Path, width: int) -> LeverNetwork:
    network = LeverNetwork(width)
    fill(network, _bytes(path), str(path))
    return network


def untrained_network(width: int) -> LeverNetwork:
    """Return a network in the initial state of training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LeverNetwork(width)


class Guarded:
    """A policy as in real runs: if a feature is outside the range of training, the planner acts alone.

    Args:
        judged: the policy.

    Attributes:
        decisions: number of decisions.
        alone: number of decisions that the planner made alone.
    """

    def __init__(self, judged: Judged) -> None:
        self._judged = judged
        self.decisions = self.alone = 0

    def __call__(self, features: tuple[Features, Features]) -> Actions:
        """Return each lane's actions, shape (n, levers)."""
        outside = np.array([self._judged.ranges.outside(row[None]) is not None for row in features[0]])
        self.decisions += len(outside)
        self.alone += int(outside.sum())
        return np.where(outside[:, None], np.array([NEUTRAL]), self._judged.shipped.most_likely(features))

"""Policies as folders that cannot contain code: ``manifest.json``, ``policy.safetensors``, ``README.md``.

Loading checks everything before it is used: a closed schema, the feature version, the SHA-256 of the manifest itself,
the size and the SHA-256 of the weights, every tensor's name, shape, dtype and finiteness, and finally that the network
gives the same answer to a fixed probe as when it was saved.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from autotune.agents.planner_policy import PlannerPolicy, Ranges
from autotune.agents.policy import Policy
from autotune.agents.scratch_network import Layout, LearnedPolicy, PolicyNetwork, most_likely
from autotune.agents.shipped_network import LeverNetwork
from autotune.catalog import content_folder
from autotune.choices import USUAL_PRECISIONS
from autotune.errors import PolicyFileError, raised_as
from autotune.gym import levers
from autotune.gym.observation import FEATURE_VERSION, GLOBAL_FEATURES, UNIT_FEATURES
from autotune.io.documents import shown, validated
from autotune.io.files import parse_json, read_bytes, read_json, sealed, write_atomic, write_json
from autotune.simulator.planner_settings import LARGEST, Costs, Dips, PlannerSettings

MANIFEST, WEIGHTS, CARD = "manifest.json", "policy.safetensors", "README.md"
_LARGEST_BYTES = 4 * 2**20
_PROBE_UNITS = 5
_PROBES = 8
_SHA256 = r"^[0-9a-f]{64}$"
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Setting = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Training(_Closed):
    """The training of a policy that chooses plans without a planner."""

    job: str
    seed: int
    windows: Annotated[int, Field(ge=0)]
    steps: Annotated[int, Field(ge=0)]
    memory_budget_bytes: int | None


class LeverTraining(_Closed):
    """The training of a policy that adjusts a planner, and its gain on validation jobs.

    Attributes:
        recipe_sha256: SHA-256 of the recipe.
        strengths_sha256: SHA-256 of the strengths of the conditions, which are fixed before training.
        seed: seed of the chosen network.
        seeds: number of trained networks, one per seed.
        decisions: number of windows that each network was trained on.
        won_percent: time saved on validation jobs against the planner alone, in percent; mean over all networks.
        won_ci95: 95 % confidence interval of that mean over jobs and seeds.
    """

    recipe_sha256: Annotated[str, Field(pattern=_SHA256)]
    strengths_sha256: Annotated[str, Field(pattern=_SHA256)]
    seed: Annotated[int, Field(ge=0)]
    seeds: Annotated[int, Field(ge=1)]
    decisions: Annotated[int, Field(ge=0)]
    won_percent: _Finite
    won_ci95: Annotated[list[_Finite], Field(min_length=2, max_length=2)]


class _Planner(_Closed):
    reserve: _Setting
    rise: _Setting
    retry: _Setting
    horizon: Annotated[_Setting, Field(le=LARGEST["horizon"])]
    cost_error: _Setting
    common_share: _Share
    drift: _Setting
    time_noise: _Setting
    # Policies of before these settings had planners that expected no dips and errors of the assumed sizes.
    dips: Dips = "none"
    costs: Costs = "assumed"


class _Manifest(_Closed):
    version: Literal[1]
    feature_version: Annotated[int, Field(ge=1)]
    global_features: Annotated[int, Field(ge=1)]
    unit_features: Annotated[int, Field(ge=1)]
    width: Annotated[int, Field(ge=8, le=256)]
    weights_sha256: Annotated[str, Field(pattern=_SHA256)]
    weights_bytes: Annotated[int, Field(ge=1, le=_LARGEST_BYTES)]
    probe_action: Annotated[list[int], Field(max_length=64)]
    manifest_sha256: Annotated[str, Field(pattern=_SHA256)] = "0" * 64


class _PlanManifest(_Manifest):
    kind: Literal["ppo"]
    training: Training


class _LeverManifest(_Manifest):
    kind: Literal["levers"]
    planner: _Planner
    lowest: Annotated[list[_Finite], Field(max_length=256)]
    highest: Annotated[list[_Finite], Field(max_length=256)]
    training: LeverTraining


_SCHEMAS = {
    "ppo": (FEATURE_VERSION, len(GLOBAL_FEATURES), len(UNIT_FEATURES)),
    "levers": (levers.LEVER_VERSION, len(levers.RUN_FEATURES), len(levers.UNIT_FEATURES)),
}


def save_policy(folder: Path, network: PolicyNetwork, training: Training) -> None:
    """Write the folder of a policy that chooses plans without a planner; the manifest is written last.

    Args:
        folder: the folder of the policy; created if missing.
        network: the trained network.
        training: how it was trained.
    """
    manifest = _PlanManifest(kind="ppo", **_common("ppo", network, _probe(network)), training=training)
    _save(folder, network, manifest, _card(network, training))


def save_levers(
    folder: Path, network: LeverNetwork, settings: PlannerSettings, ranges: Ranges, training: LeverTraining, card: str
) -> None:
    """Write the folder of a policy that adjusts a planner; the manifest is written last.

    Args:
        folder: the folder of the policy; created if missing.
        network: the trained network.
        settings: settings of the planner.
        ranges: training ranges of the features.
        training: how it was trained.
        card: text of its ``README.md``.
    """
    manifest = _LeverManifest(
        kind="levers",
        **_common("levers", network, _lever_probe(network)),
        planner=_Planner(**asdict(settings)),
        lowest=[float(value) for value in ranges.lowest],
        highest=[float(value) for value in ranges.highest],
        training=training,
    )
    _save(folder, network, manifest, card)


def load_policy(folder: Path) -> Policy:
    """Load a policy folder.

    Raises:
        PolicyFileError: if anything is missing, unknown, damaged or different from what was saved.
    """
    manifest = _read_manifest(folder / MANIFEST)
    weights = _read_weights(folder / WEIGHTS, manifest)
    leans = isinstance(manifest, _LeverManifest)
    # On the meta device, no initial weights are drawn from the caller's generator.
    with torch.device("meta"):
        network = LeverNetwork(manifest.width) if leans else PolicyNetwork(manifest.width)
    fill(network, weights, str(folder / WEIGHTS))
    answer = _lever_probe(network) if isinstance(network, LeverNetwork) else _probe(network)
    if answer != manifest.probe_action:
        raise PolicyFileError("the network does not give the stored answer to the probe", where=str(folder))
    if isinstance(manifest, _LeverManifest) and isinstance(network, LeverNetwork):
        ranges = Ranges(np.array(manifest.lowest), np.array(manifest.highest))
        return PlannerPolicy("ppo", PlannerSettings(**manifest.planner.model_dump()), network, ranges)
    assert isinstance(network, PolicyNetwork)
    return LearnedPolicy(network)


def shipped_policy() -> PlannerPolicy:
    """Return the policy that is shipped with the package.

    Raises:
        PolicyFileError: if it is missing or damaged.
    """
    folder = content_folder("policies") / "ppo"
    policy = load_policy(folder)
    if not isinstance(policy, PlannerPolicy):
        raise PolicyFileError(
            "the policy does not adjust a planner", where=str(folder), allowed="a policy of kind levers"
        )
    return policy


def _common(kind: str, network: nn.Module, probe: list[int]) -> dict[str, Any]:
    weights = _weights(network)
    version, run, unit = _SCHEMAS[kind]
    return {
        "version": 1,
        "feature_version": version,
        "global_features": run,
        "unit_features": unit,
        "width": network.width,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "weights_bytes": len(weights),
        "probe_action": probe,
    }


def _weights(network: nn.Module) -> bytes:
    return save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()})


def _save(folder: Path, network: nn.Module, manifest: _Manifest, card: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / WEIGHTS, _weights(network))
    write_atomic(folder / CARD, card)
    write_json(folder / MANIFEST, sealed(manifest.model_dump(), "manifest_sha256"))


def _read_manifest(path: Path) -> _PlanManifest | _LeverManifest:
    with raised_as(PolicyFileError):
        document = read_json(path, limit_bytes=2**16, follow=False)
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in _SCHEMAS:
        raise PolicyFileError(f"kind is {shown(kind)}", where=str(path), allowed=sorted(_SCHEMAS))
    model: type[_PlanManifest | _LeverManifest] = _LeverManifest if kind == "levers" else _PlanManifest
    manifest = validated(model, document, where=str(path), error=PolicyFileError)
    if document != sealed(document, "manifest_sha256"):
        raise PolicyFileError(
            "the manifest's SHA-256 is not the one it contains", where=str(path), allowed="what was saved"
        )
    expected = _SCHEMAS[manifest.kind]
    found = (manifest.feature_version, manifest.global_features, manifest.unit_features)
    if found != expected:
        raise PolicyFileError(
            f"feature schema is {found}", where=str(path), allowed=f"{expected} (train the policy again)"
        )
    if isinstance(manifest, _LeverManifest) and not len(manifest.lowest) == len(manifest.highest) == expected[1]:
        raise PolicyFileError(
            "the manifest does not have one range per feature", where=str(path), allowed=f"{expected[1]} numbers"
        )
    return manifest


def _read_weights(path: Path, manifest: _Manifest) -> bytes:
    with raised_as(PolicyFileError):
        weights = read_bytes(path, limit_bytes=manifest.weights_bytes, follow=False)
    if len(weights) != manifest.weights_bytes:
        raise PolicyFileError(
            f"the file has {len(weights)} bytes", where=str(path), allowed=str(manifest.weights_bytes)
        )
    if hashlib.sha256(weights).hexdigest() != manifest.weights_sha256:
        raise PolicyFileError(
            "the weights' SHA-256 is not the one in the manifest", where=str(path), allowed=manifest.weights_sha256
        )
    return weights


def fill(network: nn.Module, weights: bytes, where: str) -> None:
    """Load weights into a network.

    Args:
        network: the network.
        weights: exactly the network's tensors, in the safetensors format.
        where: the source of the weights, for error messages.

    Raises:
        PolicyFileError: if a tensor is missing, unknown or not finite, or has the wrong shape or dtype.
    """
    try:
        tensors = load_tensors(weights)
        # The library accepts a tensor that is listed twice; this parser does not.
        header = parse_json(weights[8 : 8 + int.from_bytes(weights[:8], "little")].decode(), where=where)
    except (SafetensorError, KeyError, ValueError) as error:
        raise PolicyFileError(f"is not safetensors ({str(error)!r})", where=where) from error
    wanted = network.state_dict()
    if header.keys() != wanted.keys():
        name = sorted(header.keys() ^ wanted.keys())[0]
        raise PolicyFileError(f"tensor {name!r} is missing or unknown", where=where, allowed=sorted(wanted))
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape or tensor.dtype != wanted[name].dtype:
            allowed = f"{tuple(wanted[name].shape)} {wanted[name].dtype}"
            raise PolicyFileError(
                f"tensor {name!r} is {tuple(tensor.shape)} {tensor.dtype}", where=where, allowed=allowed
            )
        if not torch.isfinite(tensor).all():
            raise PolicyFileError(f"tensor {name!r} is not finite", where=where)
    network.load_state_dict(tensors, assign=True)


def _probe(network: PolicyNetwork) -> list[int]:
    """Return the network's decision on a fixed observation."""
    generator = np.random.default_rng(0)
    units = generator.uniform(-1, 1, (_PROBE_UNITS, len(UNIT_FEATURES))).astype(np.float32)
    units[:, 0] = 1.0
    arrays = {
        "global": generator.uniform(-1, 1, len(GLOBAL_FEATURES)).astype(np.float32),
        "units": units.reshape(-1),
    }
    layout = Layout((1, 2, 4), tuple(range(len(USUAL_PRECISIONS))), _PROBE_UNITS, tuple(range(_PROBE_UNITS)))
    return most_likely(network, arrays, layout)


def _lever_probe(network: LeverNetwork) -> list[int]:
    """Return the network's decisions on fixed observations."""
    generator = np.random.default_rng(0)
    run = generator.uniform(-2, 2, (_PROBES, len(levers.RUN_FEATURES))).astype(np.float32)
    units = generator.uniform(-2, 2, (_PROBES, _PROBE_UNITS, len(levers.UNIT_FEATURES))).astype(np.float32)
    units[:, :, levers.UNIT_FEATURES.index("present")] = 1.0
    return [int(choice) for choice in network.most_likely((run, units)).reshape(-1)]


def _card(network: PolicyNetwork, training: Training) -> str:
    count = sum(parameter.numel() for parameter in network.parameters())
    return f"""# Policy

A network of {count:,} parameters that maps gradient statistics and memory pressure to k, precision per unit and
storage per unit.

Trained by PPO on the job `{training.job}` (seed {training.seed}): {training.windows} windows, for which
{training.steps} real optimizer steps were taken; memory budget {training.memory_budget_bytes} bytes.

It has seen this one job, device and budget and knows nothing of others.
"""

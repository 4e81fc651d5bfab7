"""Store and load a policy as a folder that cannot run code: ``manifest.json``, ``policy.safetensors``, ``README.md``.

Loading checks everything before it is used: a closed schema, the feature version, the size, the SHA-256 of the weights,
every tensor's name, shape, dtype and finiteness, and at last that the network answers a stored probe as it did when it
was saved.
"""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from autotune.agents.network import Layout, LearnedPolicy, PolicyNetwork, most_likely
from autotune.errors import InputError, PolicyFileError
from autotune.files import read_json, write_atomic, write_json
from autotune.gym.observation import FEATURE_VERSION, GLOBAL_FEATURES, UNIT_FEATURES
from autotune.plan import Precision

MANIFEST, WEIGHTS, CARD = "manifest.json", "policy.safetensors", "README.md"
_LARGEST_BYTES = 4 * 2**20
_PROBE_UNITS = 5


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Training(_Closed):
    """Say what a policy was trained on."""

    job: str
    seed: int
    windows: Annotated[int, Field(ge=0)]
    steps: Annotated[int, Field(ge=0)]
    memory_budget_bytes: int | None


class _Manifest(_Closed):
    version: Literal[1]
    kind: Literal["ppo"]
    feature_version: Annotated[int, Field(ge=1)]
    global_features: Annotated[int, Field(ge=1)]
    unit_features: Annotated[int, Field(ge=1)]
    width: Annotated[int, Field(ge=8, le=256)]
    weights_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    weights_bytes: Annotated[int, Field(ge=1, le=_LARGEST_BYTES)]
    probe_action: Annotated[list[int], Field(max_length=64)]
    training: Training


def save_policy(folder: Path, network: PolicyNetwork, training: Training) -> None:
    """Write a policy folder, the manifest last.

    Args:
        folder: where the policy shall stand; created if missing.
        network: the trained network.
        training: what it was trained on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    weights = save_tensors(tensors)
    manifest = _Manifest(
        version=1,
        kind="ppo",
        feature_version=FEATURE_VERSION,
        global_features=len(GLOBAL_FEATURES),
        unit_features=len(UNIT_FEATURES),
        width=network.width,
        weights_sha256=hashlib.sha256(weights).hexdigest(),
        weights_bytes=len(weights),
        probe_action=_probe(network),
        training=training,
    )
    write_atomic(folder / WEIGHTS, weights)
    write_atomic(folder / CARD, _card(network, training))
    write_json(folder / MANIFEST, manifest.model_dump())


def load_policy(folder: Path) -> LearnedPolicy:
    """Load a policy folder.

    Raises:
        PolicyFileError: in one line, for whatever is missing, foreign, damaged or not what was saved.
    """
    manifest = _read_manifest(folder / MANIFEST)
    weights = _read_weights(folder / WEIGHTS, manifest)
    network = PolicyNetwork(manifest.width)
    _fill(network, weights, str(folder / WEIGHTS))
    answer = _probe(network)
    if answer != manifest.probe_action:
        raise PolicyFileError("the network does not answer the stored probe as it did", where=str(folder))
    return LearnedPolicy(network)


def _read_manifest(path: Path) -> _Manifest:
    _refuse_special(path)
    try:
        manifest = _Manifest.model_validate(read_json(path, limit_bytes=2**16))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise PolicyFileError(f"{key}: {first['msg']}", where=str(path), allowed="a policy manifest") from error
    except InputError as error:
        raise PolicyFileError(error.problem, where=str(path), allowed=error.allowed) from error
    expected = (FEATURE_VERSION, len(GLOBAL_FEATURES), len(UNIT_FEATURES))
    found = (manifest.feature_version, manifest.global_features, manifest.unit_features)
    if found != expected:
        raise PolicyFileError(
            f"feature schema is {found}", where=str(path), allowed=f"{expected} (train the policy anew)"
        )
    return manifest


def _read_weights(path: Path, manifest: _Manifest) -> bytes:
    _refuse_special(path)
    size = path.stat().st_size
    if size != manifest.weights_bytes:
        raise PolicyFileError(f"holds {size} bytes", where=str(path), allowed=str(manifest.weights_bytes))
    weights = path.read_bytes()
    if hashlib.sha256(weights).hexdigest() != manifest.weights_sha256:
        raise PolicyFileError("its SHA-256 is not the manifest's", where=str(path), allowed=manifest.weights_sha256)
    return weights


def _fill(network: PolicyNetwork, weights: bytes, where: str) -> None:
    try:
        tensors = load_tensors(weights)
    except (SafetensorError, KeyError, ValueError) as error:
        raise PolicyFileError(f"is not safetensors ({error})", where=where) from error
    wanted = network.state_dict()
    if tensors.keys() != wanted.keys():
        name = sorted(tensors.keys() ^ wanted.keys())[0]
        raise PolicyFileError(f"tensor {name!r} is missing or unknown", where=where, allowed=sorted(wanted))
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape or tensor.dtype != wanted[name].dtype:
            allowed = f"{tuple(wanted[name].shape)} {wanted[name].dtype}"
            raise PolicyFileError(
                f"tensor {name!r} is {tuple(tensor.shape)} {tensor.dtype}", where=where, allowed=allowed
            )
        if not torch.isfinite(tensor).all():
            raise PolicyFileError(f"tensor {name!r} is not finite", where=where)
    network.load_state_dict(tensors)


def _refuse_special(path: Path) -> None:
    """Refuse links, pipes, devices and folders, which a policy folder never has."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise PolicyFileError("cannot be read", where=str(path), allowed="a policy folder") from error
    if not stat.S_ISREG(mode):
        raise PolicyFileError("is not a regular file", where=str(path), allowed="a regular file")


def _probe(network: PolicyNetwork) -> list[int]:
    """Return the network's decision on a fixed observation."""
    generator = np.random.default_rng(0)
    units = generator.uniform(-1, 1, (_PROBE_UNITS, len(UNIT_FEATURES))).astype(np.float32)
    units[:, 0] = 1.0
    arrays = {
        "global": generator.uniform(-1, 1, len(GLOBAL_FEATURES)).astype(np.float32),
        "units": units.reshape(-1),
    }
    layout = Layout((1, 2, 4), tuple(range(len(Precision))), _PROBE_UNITS, tuple(range(_PROBE_UNITS)))
    return most_likely(network, arrays, layout)


def _card(network: PolicyNetwork, training: Training) -> str:
    count = sum(parameter.numel() for parameter in network.parameters())
    return f"""# Policy

A network of {count:,} parameters that maps gradient statistics and memory pressure to k, precision per unit and
storage per unit.

Trained by PPO on the job `{training.job}` (seed {training.seed}): {training.windows} windows, for which
{training.steps} real optimizer steps were taken; memory budget {training.memory_budget_bytes} bytes.

It has seen this one job, device and budget and knows nothing of others.
"""

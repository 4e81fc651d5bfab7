"""Write a training state to a file and read it back bit for bit; reading runs no code from the file."""

from __future__ import annotations

from dataclasses import asdict
from typing import IO, Any

import numpy as np
import torch

from autotune.cost_model.noise_scale import NoiseScaleAverage
from autotune.engines.torch_engine import Progress, Snapshot
from autotune.errors import EngineError
from autotune.measurement import GradientStatistics, UnitGradient
from autotune.mechanics.gradient_stats import MonitorState
from autotune.mechanics.randomness import RandomState


def write_snapshot(file: IO[bytes], snapshot: Snapshot) -> None:
    """Replace the content of an open file with a snapshot.

    Raises:
        OSError: if the file cannot be written.
    """
    file.seek(0)
    file.truncate()
    torch.save(_plain(snapshot), file)
    file.flush()


def read_snapshot(file: IO[bytes]) -> Snapshot:
    """Read a snapshot from an open file.

    Raises:
        EngineError: if the file is not a valid snapshot.
    """
    try:
        file.seek(0)
        document = torch.load(file, weights_only=True, map_location="cpu")
        return _snapshot(document)
    except Exception as error:  # torch and zipfile raise a dozen kinds for a damaged file
        raise EngineError(f"the snapshot cannot be read ({type(error).__name__}: {error})") from error


def _plain(snapshot: Snapshot) -> dict[str, Any]:
    kind, keys, *rest = snapshot.random.numpy
    statistics = snapshot.statistics
    return {
        "tensors": snapshot.tensors,
        "optimizer": snapshot.optimizer,
        "scaler": snapshot.scaler,
        "random": {
            "python": snapshot.random.python,
            "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
            "cpu": snapshot.random.cpu,
            "accelerators": snapshot.random.accelerators,
        },
        "progress": asdict(snapshot.progress),
        "statistics": {
            **asdict(statistics),
            "latest": None if statistics.latest is None else asdict(statistics.latest),
        },
    }


def _snapshot(document: dict[str, Any]) -> Snapshot:
    random = document["random"]
    kind, keys, *rest = random["numpy"]
    statistics = dict(document["statistics"])
    statistics["average"] = NoiseScaleAverage(**statistics["average"])
    if statistics["latest"] is not None:
        units = {name: UnitGradient(**unit) for name, unit in statistics["latest"]["per_unit"].items()}
        statistics["latest"] = GradientStatistics(**{**statistics["latest"], "per_unit": units})
    return Snapshot(
        tensors=document["tensors"],
        optimizer=document["optimizer"],
        scaler=document["scaler"],
        random=RandomState(
            python=random["python"],
            numpy=(kind, keys.numpy().astype(np.uint32), *rest),
            cpu=random["cpu"],
            accelerators=tuple(random["accelerators"]),
        ),
        progress=Progress(**document["progress"]),
        statistics=MonitorState(**statistics),
    )

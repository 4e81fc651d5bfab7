"""Write a training state to a file and read it back, bit for bit; reading runs no code that the file brings."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autotune.engines.torch_engine import Progress, Snapshot
from autotune.errors import EngineError
from autotune.measurement import GradientStatistics, UnitGradient
from autotune.mechanics.gradient_stats import MonitorState
from autotune.mechanics.randomness import RandomState
from autotune.physics.noise_scale import NoiseScaleAverage


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot atomically.

    Raises:
        OSError: if it cannot be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(_plain(snapshot), file)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot.

    Raises:
        EngineError: if the file holds none.
    """
    try:
        document = torch.load(path, weights_only=True, map_location="cpu")
        return _snapshot(document)
    except Exception as error:  # torch and zipfile raise a dozen kinds for a damaged file
        raise EngineError(f"{path} is no snapshot ({type(error).__name__}: {error})") from error


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
            "cuda": snapshot.random.cuda,
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
            cuda=tuple(random["cuda"]),
        ),
        progress=Progress(**document["progress"]),
        statistics=MonitorState(**statistics),
    )

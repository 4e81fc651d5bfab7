"""Shared parts of all benchmarks: the document's header, alternating turns, and the output file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from autotune.io.files import write_json
from autotune.io.progress import Reporter, Silent
from autotune.mechanics.devices import device_name
from autotune.records.run_directory import benchmark_folder, describe_environment

T = TypeVar("T")

SILENT: Reporter = Silent()


def document_of(benchmark: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return a benchmark's document: device, threads, torch version and figures.

    Args:
        benchmark: name of the benchmark.
        figures: its results by name.
    """
    return {
        "version": 1,
        "benchmark": benchmark,
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **figures,
    }


def write_document(name: str, document: Mapping[str, Any], runs: Path) -> tuple[Path, dict[str, Any]]:
    """Write a document with the machine's environment to ``<runs>/benchmarks/<device>/<name>.json``.

    Args:
        name: name of the file, without its suffix.
        document: the benchmark's document.
        runs: the folder of runs.

    Returns:
        The path and the written document.
    """
    path = benchmark_folder(runs) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = {**document, "environment": describe_environment()}
    write_json(path, written)
    return path, written


def alternating(items: Sequence[T], turn: int) -> list[T]:
    """Return the items in the order of a turn: every other turn is reversed, so that drift affects all items equally.

    Args:
        items: the items to measure.
        turn: number of the turn, from 0.
    """
    return list(items) if turn % 2 == 0 else list(items)[::-1]


def interval_text(found: Mapping[str, Any]) -> str:
    """Return a mean with its interval as text, as in ``0.912 [0.887, 0.938]``.

    Args:
        found: ``mean`` and ``ci95``, from :func:`autotune.stats.mean_with_interval`.
    """
    low, high = found["ci95"]
    return f"{found['mean']:.3f} [{low:.3f}, {high:.3f}]"

"""Start ranks with ``torchrun``, tell them what to do through a folder, and read what rank 0 answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import EngineError
from autotune.files import read_json, write_json

_ASKED, _FOUND = "asked.json", "found.json"


def run_on_ranks(module: str, folder: Path, asked: Mapping[str, Any], *, ranks: int) -> dict[str, Any]:
    """Run a module as so many ranks on this machine, and return what rank 0 answers.

    Args:
        module: the module, whose only argument is the folder.
        folder: where ranks are told what to do, and answer.
        asked: what they are told.
        ranks: how many.

    Raises:
        EngineError: if a rank fails; its first error is quoted.
    """
    write_json(folder / _ASKED, {**asked, "path": sys.path})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, "-m", module, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        # One thread a rank, one rank alone as well: else ranks would not be what scales.
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        raise EngineError(f"a rank failed: {errors[0] if errors else done.stderr[-200:]}")
    return read_json(folder / _FOUND)


def asked_of_ranks(folder: Path) -> dict[str, Any]:
    """Return what the ranks are told, on a rank; jobs are found where the program that asked finds them."""
    asked: dict[str, Any] = json.loads((folder / _ASKED).read_text())
    sys.path += [entry for entry in asked["path"] if entry not in sys.path]
    return asked


def answer(folder: Path, document: Mapping[str, Any]) -> None:
    """Say what was found, on rank 0."""
    write_json(folder / _FOUND, document)

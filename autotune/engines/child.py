"""Be the process in which an isolated engine trains: ``python -m autotune.engines.child FD``.

It answers one call after another over the socket that it inherits, and ends when its parent does. What the job prints
goes to where the parent said; what the job breaks, the parent sees.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.engines.wire import Wire
from autotune.errors import InputError

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Serve the socket whose number is the first argument, until it closes."""
    _die_with_parent()
    wire = Wire(socket.socket(fileno=int(arguments[0])))
    # Without a parent, nobody is there to be told of anything.
    with contextlib.suppress(EOFError, OSError):
        serve(wire)
    # Without the interpreter's clean-up, which a job's own threads could hang.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(wire: Wire) -> None:
    """Open the engine that the first document names, and answer calls until the wire closes."""
    opening = wire.receive()
    try:
        engine = _open(opening)
        answers = _answers(engine)
        locks = {**engine.locks}
        wire.send({"space": engine.space.to_json(), "locks": locks, "batch": engine.job.batching})
    except InputError as error:
        wire.send({"input_error": _input_error(error)})
        return
    while True:
        request = wire.receive()
        call = request.pop("call")
        try:
            wire.send({"answer": answers[call](**request)})
        except InputError as error:
            wire.send({"input_error": _input_error(error)})
        except Exception as error:  # noqa: BLE001 - whatever the job raises, the parent classifies
            wire.send({"raised": f"{type(error).__name__}: {error}"})


def _open(opening: dict[str, Any]) -> Any:
    from autotune.catalog import load_job
    from autotune.engines.torch_engine import EngineOptions, TorchEngine

    for folder in reversed(opening["path"]):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    if opening["threads"] is not None:
        import torch

        torch.set_num_threads(opening["threads"])
    job = load_job(opening["job"])
    options = EngineOptions(**opening["options"])
    return TorchEngine(job, seed=opening["seed"], device=opening["device"], options=options)


def _answers(engine: Any) -> dict[str, Callable[..., Any]]:
    from autotune.engines.snapshot_files import read_snapshot, write_snapshot
    from autotune.plan import Plan

    def run(steps: int, plan: dict[str, Any], memory_budget_bytes: int | None) -> dict[str, Any]:
        engine.apply(Plan.from_json(plan))
        engine.memory_budget_bytes = memory_budget_bytes
        found: dict[str, Any] = engine.run(steps).to_json()
        return found

    def evaluate() -> float:
        return float(engine.evaluate())

    def snapshot(path: str) -> None:
        write_snapshot(Path(path), engine.snapshot())

    def restore(path: str) -> None:
        engine.restore(read_snapshot(Path(path)))

    return {"run": run, "evaluate": evaluate, "snapshot": snapshot, "restore": restore}


def _input_error(error: InputError) -> dict[str, str]:
    return {"kind": type(error).__name__, "problem": error.problem, "where": error.where, "allowed": error.allowed}


def _die_with_parent() -> None:
    """Ask the system to end this process with its parent, where it can."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])

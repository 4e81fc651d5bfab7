"""Be the process in which an isolated engine trains: ``python -m autotune.engines.child FOLDER``.

It reads there what to open, answers one call after another over the socket that lies there, and ends when its parent
does. Started several times by ``torchrun``, rank 0 answers, and the others do the same as it. What the job prints goes
to where the parent said; what the job breaks, the parent sees.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from autotune.engines.processes import RAISED, die_with_parent, leave
from autotune.engines.wire import Wire
from autotune.errors import InputError, one_line

# In the folder: what to open, and where the parent listens.
OPENING, SOCKET = "opening.json", "socket"


def main(arguments: list[str]) -> None:
    """Serve the socket in the folder that is the first argument, until it closes."""
    die_with_parent()
    folder = Path(arguments[0])
    opening = json.loads((folder / OPENING).read_text())
    # Where nobody asked for ranks, the number is somebody else's.
    rank = 0 if opening["ranks"] is None else int(os.environ["RANK"])
    # Without a parent, nobody is there to be told of anything.
    with contextlib.suppress(EOFError, OSError):
        if rank == 0:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(folder / SOCKET))
            serve(Wire(connection), opening)
        else:
            follow(opening, rank)
    leave(0)


def serve(wire: Wire, opening: dict[str, Any]) -> None:
    """Open the engine that a document names, and answer calls until the wire closes."""
    try:
        engine = _open(opening)
        answers = _answers(engine)
        told = _Told(opening)
        described = {"space": engine.space.to_json(), "locks": {**engine.locks}, "batch": engine.job.batching}
        wire.send({**described, "processes": told.processes})
    except InputError as error:
        wire.send({"input_error": error.to_json()})
        return
    while True:
        request = wire.receive()
        told.pass_on(request)
        call = request.pop("call")
        try:
            wire.send({"answer": answers[call](**request)})
        except InputError as error:
            wire.send({"input_error": error.to_json()})
        except Exception as error:  # noqa: BLE001 - whatever the job raises, the parent classifies
            wire.send({"raised": f"{type(error).__name__}: {error}", "failure": _class_of(error)})


def follow(opening: dict[str, Any], rank: int) -> None:
    """Do what rank 0 does; what raises here ends all ranks, and is said in a line that the parent looks for."""
    try:
        engine = _open(opening)
        answers = _answers(engine)
        told = _Told(opening)
        while True:
            request = told.next()
            answers[request.pop("call")](**request)
    except Exception as error:  # noqa: BLE001 - whatever the job raises, the parent classifies
        print(f"{RAISED} {rank}: {_class_of(error)}: {one_line(error)}", file=sys.stderr)  # noqa: T201 - the parent reads it
        leave(1)


class _Told:
    """Pass what rank 0 is asked on to the other ranks, who may wait for it for days.

    Args:
        opening: says whether there are others.
    """

    def __init__(self, opening: dict[str, Any]) -> None:
        self._group: Any = None
        self.processes = [os.getpid()]
        if opening["ranks"] is not None:
            from torch import distributed

            self._group = distributed.new_group(backend="gloo", timeout=timedelta(days=30))
            told: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(told, os.getpid(), group=self._group)
            self.processes = told

    def pass_on(self, request: dict[str, Any]) -> None:
        """Tell the others, if there are any."""
        self._broadcast([request])

    def next(self) -> dict[str, Any]:
        """Return what rank 0 was asked."""
        told: list[Any] = [None]
        self._broadcast(told)
        found: dict[str, Any] = told[0]
        return found

    def _broadcast(self, told: list[Any]) -> None:
        if self._group is not None:
            from torch import distributed

            distributed.broadcast_object_list(told, src=0, group=self._group)


def _class_of(error: Exception) -> str:
    from autotune.engines.inspection import classify

    return str(classify(error))


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
    if opening["ranks"] is not None:
        from autotune.engines.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(
            job,
            zero_stage=opening["ranks"]["zero_stage"],
            seed=opening["seed"],
            device=opening["device"],
            options=options,
            config=opening["ranks"]["config"],
        )
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

    # Each rank has its own part of a snapshot.
    rank = os.environ.get("RANK", "0")

    def snapshot(path: str) -> None:
        write_snapshot(Path(f"{path}.{rank}"), engine.snapshot())

    def restore(path: str) -> None:
        engine.restore(read_snapshot(Path(f"{path}.{rank}")))

    return {"run": run, "evaluate": evaluate, "snapshot": snapshot, "restore": restore}


if __name__ == "__main__":
    main(sys.argv[1:])

"""Entry point of the process in which an isolated engine trains.

It opens what it is told to over its wire, and answers one call after another, until its asker is gone. Where several
ranks train, each is told the same, and all do the same. What the job prints goes to where the asker said; what the job
breaks, the asker sees.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from autotune.engines.wire import Wire
from autotune.engines.worker_processes import fail, leave, opened


def main() -> None:
    """Serve the asker, until it is gone."""
    wire, opening, number = opened()
    # Without an asker, nobody is there to be told of anything.
    with contextlib.suppress(EOFError, OSError):
        serve(wire, opening, number)
    leave(0)


def serve(wire: Wire, opening: dict[str, Any], number: int) -> None:
    """Open the engine that a document names, and answer calls until the wire closes.

    Args:
        wire: to the asker.
        opening: names the engine.
        number: this process's, among the ranks.
    """
    request: dict[str, Any] = {"call": "describe"}
    answers: dict[str, Callable[..., Any]] = {}
    while True:
        try:
            answers = answers or _answers(_open(opening), wire)
            answer = answers[request.pop("call")](**request)
        except Exception as error:  # noqa: BLE001 - whatever the job raises, the asker classifies
            fail(wire, number, error)
        wire.send({"answer": answer})
        request = wire.receive()


def _open(opening: dict[str, Any]) -> Any:
    from autotune.catalog import load_job
    from autotune.engines.torch_engine import EngineOptions, TorchEngine

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


def _answers(engine: Any, wire: Wire) -> dict[str, Callable[..., Any]]:
    from autotune.engines.snapshot_files import read_snapshot, write_snapshot
    from autotune.plan import Plan

    def describe() -> dict[str, Any]:
        return {"space": engine.space.to_json(), "locks": {**engine.locks}}

    def run(steps: int, plan: dict[str, Any], memory_budget_bytes: int | None) -> dict[str, Any]:
        engine.apply(Plan.from_json(plan))
        engine.memory_budget_bytes = memory_budget_bytes
        found: dict[str, Any] = engine.run(steps).to_json()
        return found

    def evaluate() -> float:
        return float(engine.evaluate())

    # Each rank has its own part of a snapshot.
    def snapshot() -> None:
        with os.fdopen(wire.receive_file(), "r+b") as file:
            write_snapshot(file, engine.snapshot())

    def restore() -> None:
        with os.fdopen(wire.receive_file(), "r+b") as file:
            engine.restore(read_snapshot(file))

    return {"describe": describe, "run": run, "evaluate": evaluate, "snapshot": snapshot, "restore": restore}


if __name__ == "__main__":
    main()

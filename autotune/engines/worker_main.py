"""Entry point of the process in which an isolated engine trains.

The process opens the engine that its first document names, and answers calls until the caller is gone. If several ranks
train, all receive and answer the same calls. The caller reads what the job prints.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from autotune.engines.wire import Wire
from autotune.engines.worker_processes import fail, leave, opened, send_answer


def main() -> None:
    """Serve the caller until it is gone."""
    wire, opening, number = opened()
    # If the caller is gone, there is nothing to report.
    with contextlib.suppress(EOFError, OSError):
        serve(wire, opening, number)
    leave()


def serve(wire: Wire, opening: dict[str, Any], number: int) -> None:
    """Open an engine, and answer calls until the wire closes.

    Args:
        wire: connection to the caller.
        opening: the engine's name, job and arguments.
        number: number of this process among the ranks.
    """
    request: dict[str, Any] = {"call": "describe"}
    answers: dict[str, Callable[..., Any]] = {}
    while True:
        try:
            answers = answers or _answers(_open(**opening), wire)
            answer = answers[request.pop("call")](**request)
        except Exception as error:  # noqa: BLE001 - whatever the job raises is reported to the caller
            fail(wire, number, error)
        send_answer(wire, "answer", answer)
        request = wire.receive()


def _open(
    *,
    engine: str,
    arguments: dict[str, Any],
    job: str,
    seed: int,
    device: str,
    options: dict[str, Any],
    threads: int | None,
) -> Any:
    from autotune.catalog import load_job
    from autotune.engines.registry import ENGINES
    from autotune.engines.torch_engine import EngineOptions

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    loaded = load_job(job)
    return ENGINES[engine].load()(loaded, seed=seed, device=device, options=EngineOptions(**options), **arguments)


def _answers(engine: Any, wire: Wire) -> dict[str, Callable[..., Any]]:
    from autotune.engines.engine_calls import described, measured
    from autotune.engines.snapshot_files import read_snapshot, write_snapshot

    # Each rank writes and reads its own part of a snapshot.
    def snapshot() -> None:
        with os.fdopen(wire.receive_file(), "r+b") as file:
            write_snapshot(file, engine.snapshot())

    def restore() -> None:
        with os.fdopen(wire.receive_file(), "r+b") as file:
            engine.restore(read_snapshot(file))

    return {
        "describe": lambda: described(engine),
        "run": lambda **window: measured(engine, **window),
        "evaluate": engine.evaluate,
        "snapshot": snapshot,
        "restore": restore,
    }


if __name__ == "__main__":
    main()

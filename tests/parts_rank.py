"""Entry point that torchrun starts: one rank of jobs in which a loader, a rank or a link is slow."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sharded_rank
import torch
from torch import distributed, nn

from autotune import EngineOptions
from autotune.engines.deepspeed_engine import DeepSpeedEngine
from autotune.step_parts import advice

NAP_S = 0.1
STEPS = 8


def slow_loader() -> dict[str, Any]:
    def batches(seed: int) -> Iterator[dict[str, torch.Tensor]]:
        for batch in sharded_rank.batches(seed):
            time.sleep(NAP_S)
            yield batch

    return {"batches": batches}


def slow_rank() -> dict[str, Any]:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if model.training and distributed.get_rank() == 1:
            time.sleep(NAP_S)
        return sharded_rank.loss(model, batch)

    return {"loss": loss}


def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
    def late(*arguments: Any, **named: Any) -> Any:
        time.sleep(NAP_S / 2)
        return call(*arguments, **named)

    return late


def measured(stage: int, *, slow_link: bool = False, **changes: Any) -> dict[str, Any]:
    options = EngineOptions(meter_memory=False, statistics_every=None, discard_steps=2)
    engine = DeepSpeedEngine(sharded_rank.make(**changes), zero_stage=stage, options=options)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "reduce", "reduce_scatter_tensor") if slow_link else ():
            patch.setattr(distributed, name, delayed(getattr(distributed, name)))
        window = engine.run(STEPS)
    engine.close()
    return {"window": window.to_json(), "advice": advice(window.parts)}


def main() -> None:
    """Train one job after another."""
    folder, stage = Path(sys.argv[1]), int(sys.argv[2])
    found = {
        "loader": measured(stage, **slow_loader()),
        "rank": measured(stage, **slow_rank()),
        "link": measured(stage, slow_link=True),
    }
    (folder / f"rank{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""Entry point that torchrun starts: one rank of a ragged job that is cut by tokens, against plain torch."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from sharded_rank import farthest, whole
from test_cutting import UNWATCHED, Causal, make, trim
from torch import distributed

from autotune import TorchEngine
from autotune.engines.deepspeed_engine import DeepSpeedEngine
from autotune.plan import Precision


def main() -> None:
    """Train the same batches on ranks, by tokens, and in this process, whole."""
    job = make(model=Causal, trim=trim, accumulation_choices=(1, 2, 4))
    ours, plain = DeepSpeedEngine(job, options=UNWATCHED), TorchEngine(job, options=UNWATCHED)
    draw, apart = random.Random(1), []
    for _ in range(20):
        k = draw.choice(ours.space.accumulation_choices)
        ours.apply(ours.space.plan(accumulation_steps=k, precision=Precision.FP32))
        apart.append(abs((ours.run(1).loss or 0.0) - (plain.run(1).loss or 1.0)))
    found = {"apart": farthest(whole(ours), list(plain.model.parameters())), "losses_apart": max(apart)}
    Path(sys.argv[1], f"rank{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

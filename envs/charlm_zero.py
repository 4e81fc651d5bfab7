"""Train ``charlm`` on several ranks: the same model and text, for DeepSpeed and its ZeRO stages.

``autotune tune charlm_zero --engine deepspeed --ranks 2 --zero-stage 2 --method optuna`` starts the ranks and tunes the
job; ``torchrun --nproc-per-node 2 envs/charlm_zero.py --zero-stage 2`` trains it under the baseline or ``--plan FILE``.
The same file runs on GPUs, one rank on each.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from autotune import Job, load_job


def job() -> Job:
    return replace(load_job("charlm"), name="charlm_zero")


def main() -> None:
    """Train on the ranks that torchrun started, and print what rank 0 measures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--zero-stage", type=int, default=2, choices=range(4))
    parser.add_argument("--plan", type=Path, help="a plan file, as autotune tune writes it")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    from autotune.engines.deepspeed_engine import DeepSpeedEngine
    from autotune.records.run_directory import read_plan

    engine = DeepSpeedEngine(job(), zero_stage=arguments.zero_stage)
    if arguments.plan is not None:
        engine.apply(read_plan(arguments.plan))
    window = engine.run(arguments.steps)
    metric = engine.evaluate()
    if engine.rank == 0:
        took = f"{window.seconds_per_step:.3f} s per step, peak {window.peak_bytes:,} bytes on the worst rank"
        print(f"loss {window.loss:.3f}, {took}; validation loss {metric:.3f}")  # noqa: T201 - it is a program


if __name__ == "__main__":
    main()

"""What the list of commands says about each command, and the examples below its help."""

from __future__ import annotations

from collections.abc import Sequence

# A summary that fits one line of 80 columns, then examples.
HELP: dict[str, tuple[str, ...]] = {
    "demo": ("Tune and compare a real training job, about ten minutes.", "autotune demo"),
    "profile": (
        "Measure what each unit of a job costs.",
        "autotune profile charlm",
        "autotune profile mine.py:job --validate 20",
    ),
    "plan": (
        "Estimate the best plan for another device.",
        "autotune plan mine.py:job --device h200",
        "autotune plan mine.py:job --device a100 --memory-budget 30GiB --output plan.json",
        "autotune plan --config config.json --seq 8192 --device h100 --devices 64",
        "autotune plan --config config.json --seq 8192 --device h100 --devices 64,256 --tokens 1T --price 2.5USD",
        "autotune plan --layers 32 --hidden 4096 --heads 32 --vocab 128256 --seq 8192 --device h100 --devices 64",
    ),
    "calibrate": (
        "Measure this machine's rates for 'plan'.",
        "autotune calibrate",
        "autotune calibrate --check digits,charlm --output machine.json",
    ),
    "tune": (
        "Find the fastest plan within a memory budget.",
        "autotune tune charlm --memory-budget 40%",
        "autotune tune mine.py:job --method optuna --memory-budget 8GB --steps 200",
        "autotune tune mine.py:job --isolate",
        "autotune tune charlm --memory-budget 40% --knobs",
    ),
    "knobs": (
        "Measure what free knobs win on a job.",
        "autotune knobs charlm",
        "autotune knobs mine.py:job --tolerant --json",
    ),
    "ramp": (
        "Find a learning rate, and a ramp of the batch.",
        "autotune ramp charlm_long:contexts --fixed-cost 64 --cost 60000",
        "autotune ramp mine.py:job --json",
    ),
    "train": (
        "Train a policy by PPO.",
        "autotune train --recipe policies/ppo.toml",
        "autotune train mine.py:job --from policies/ppo --memory-budget 60%",
    ),
    "compare": (
        "Compare plans, rules and policies on fresh seeds.",
        "autotune compare charlm --arms baseline,paper,optuna,ppo --memory-budget 40%",
        "autotune compare mine.py:job --arms baseline,runs/RUN/plan.json --seeds 6",
    ),
    "resume": (
        "Finish an interrupted run.",
        "autotune resume runs/RUN",
        "autotune resume runs/RUN --job mine.py:job",
    ),
    "reproduce": (
        "Repeat one of the paper's tables.",
        "autotune reproduce table3 --scale cpu",
        "autotune reproduce table1 --data /data",
    ),
    "elastic": (
        "Train a job on ranks whose number may change.",
        "autotune elastic charlm --folder run --memory-budget 1GiB",
    ),
    "explain": (
        "Show why a plan chose what it chose.",
        "autotune explain runs/RUN --pareto",
        "autotune explain plan.json --job mine.py:job",
        "autotune explain sqrt --job charlm",
    ),
    "export": (
        "Write a plan for another program.",
        "autotune export runs/RUN/plan.json --job mine.py:job --to deepspeed",
    ),
    "replay": (
        "Check an attached run's predictions.",
        "autotune replay runs/RUN",
    ),
    "report": ("Write a page about a run.", "autotune report runs/RUN"),
    "watch": ("Show an attached run while it trains.", "autotune watch runs/RUN"),
    "schedule": (
        "Find the start time with the least carbon.",
        "autotune schedule --carbon-intensity grid.csv --length 6h --watts 700",
    ),
    "doctor": ("Check this machine and installation.", "autotune doctor"),
    "bench": ("Run this project's benchmarks.",),
}


def example_lines(examples: Sequence[str]) -> str | None:
    """Return examples as the last paragraph of a help text; ``None`` for no examples."""
    # Click keeps the line ends of a paragraph that begins with \b.
    return "\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples) if examples else None

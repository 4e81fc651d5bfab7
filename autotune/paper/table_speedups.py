"""The paper's closing equations with measured figures: net speed-up (21), and doubling of efficiency (22, 23)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.cost_model.paper_equations import cycles_to_double, net_speedup
from autotune.paper import paper_numbers as paper
from autotune.paper.experiments import Experiment
from autotune.paper.rows import TableRow, over
from autotune.paper.table_3_ablation import BASELINE, CHECKPOINTS, SCHEDULE
from autotune.paper.table_comparisons import summarised

NOTES = (
    "eq. 21: the gain is the throughput of all components except checkpoints relative to the baseline; the overhead is "
    "the time that recomputation adds to a step, from a profile. The measured value is the throughput of all "
    "components relative to the baseline. The paper's conclusion gives an overhead of 18-27 %, its eq. 21 uses 12 %",
    "eq. 22 leaves the length of a cycle, T_cycle, undefined, and eq. 23 sets it to 5 months, taken from the "
    "target that it argues for. So only the number of cycles can be computed; months are right if a cycle takes 5. "
    "5 log(2)/log(1.26) is 15.0, not 14.8; and 26 % less time is a gain of 1.36 per cycle, not of 1.26",
)


def outlook(experiment: Experiment, document: Mapping[str, Any], overhead: float) -> list[TableRow]:
    """Return the rows of eqs. 21 to 23 for one task.

    Args:
        experiment: the task.
        document: the comparison of its ablation: the content of ``comparison.json``.
        overhead: time that recomputation adds to a step, as a fraction of the step.
    """
    rates = {name: summarised(document, name).throughput for name in (BASELINE, SCHEDULE, CHECKPOINTS)}
    gain = over(rates[SCHEDULE], rates[BASELINE])
    net = None if gain is None else net_speedup(gain, overhead)
    measured = over(rates[CHECKPOINTS], rates[BASELINE])
    ratio = next(entry["time_ratio"] for entry in document["against_baseline"] if entry["arm"] == CHECKPOINTS)
    cycle = None if ratio is None else 1 / ratio
    cycles = None if cycle is None else cycles_to_double(cycle)
    missing = "not every run reached the target" if cycle is None else "a cycle that gains nothing never doubles"

    def row(metric: str, figure: paper.PaperFigure, ours: float | None, problem: str = "") -> TableRow:
        name, source = experiment.architecture, figure.source
        return TableRow(metric, name, figure.unit, ours, paper=figure.value, source=source, problem=problem)

    return [
        row("throughput gain (21)", paper.THROUGHPUT_GAIN, gain),
        row("recomputation overhead (21)", paper.RECOMPUTATION_OVERHEAD, overhead),
        row("net speed-up (21)", paper.NET_SPEEDUP, net),
        row("net speed-up, measured", paper.NET_SPEEDUP, measured),
        row("gain of a cycle (22)", paper.CYCLE_GAIN, cycle, missing),
        TableRow(
            "cycles to double (22)",
            experiment.architecture,
            "cycles",
            cycles,
            paper=cycles_to_double(paper.CYCLE_GAIN.value),
            source="eq. 22, solved for 2",
            problem=missing,
        ),
        row("time to double (23)", paper.DOUBLING, None if cycles is None else cycles * paper.CYCLE_MONTHS, missing),
    ]

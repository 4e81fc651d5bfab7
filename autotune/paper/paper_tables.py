"""The paper's tables by name, and how each is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.engines.deepspeed_library import imported
from autotune.errors import InputError
from autotune.job import DataSource
from autotune.mechanics.devices import device_name
from autotune.paper.cross_layer import cross_layer
from autotune.paper.error_analysis import error_analysis
from autotune.paper.experiments import CONVOLUTION, TRANSFORMER, Experiment, experiments_of
from autotune.paper.paper_numbers import TABLE_1, TABLE_2
from autotune.paper.rows import Table
from autotune.paper.table_3_ablation import ablation
from autotune.paper.table_4_ranks import scaling
from autotune.paper.table_comparisons import Campaign
from autotune.paper.tables_1_2_efficiency import efficiency
from autotune.records.protocol import FEWEST_FOR_A_CLAIM

TABLES: Mapping[str, tuple[str, ...]] = {
    "table1": (CONVOLUTION,),
    "table2": (TRANSFORMER,),
    "table3": (CONVOLUTION,),
    "table4": (CONVOLUTION,),
    "error-analysis": (CONVOLUTION, TRANSFORMER),
}
_ON_RANKS = ("table4", "error-analysis")
RANKS = (1, 2, 4)


def experiments_for(table: str, scale: str) -> list[Experiment]:
    """Return the tasks of one table.

    Args:
        table: name of the table.
        scale: scale of the tasks.

    Raises:
        InputError: if there is no such table or scale, or the table needs DeepSpeed, which is missing.
    """
    if table not in TABLES:
        raise InputError(f"table is {table!r}", where="reproduce", allowed=tuple(TABLES))
    known = experiments_of(scale)
    if table in _ON_RANKS:
        imported("cpu")
    return [known[architecture] for architecture in TABLES[table]]


def sources_of(experiments: Sequence[Experiment]) -> list[DataSource]:
    """Return the data sources of tasks.

    Raises:
        JobError: if data is missing; the message names what was expected and what was found.
    """
    found: list[DataSource] = []
    for experiment in experiments:
        sources = experiment.job.data_sources
        found += sources() if sources is not None else []
    return found


def reproduced(table: str, scale: str, experiments: Sequence[Experiment], campaign: Campaign) -> dict[str, Any]:
    """Measure one table and return its document.

    Args:
        table: name of the table.
        scale: scale of its tasks.
        experiments: its tasks, from :func:`experiments_for`.
        campaign: the measurement setup.
    """
    measured = _measured(table, experiments, campaign)
    if len(campaign.seeds) < FEWEST_FOR_A_CLAIM:
        measured += Table(notes=[f"{len(campaign.seeds)} seeds are an indication, not a claim"])
    about = {
        "device": device_name(),
        "jobs": [experiment.reference for experiment in experiments],
        "seeds": list(campaign.seeds),
    }
    return measured.document(table, scale, about)


def _measured(table: str, experiments: Sequence[Experiment], campaign: Campaign) -> Table:
    first = experiments[0]
    if table == "table1":
        return efficiency(first, TABLE_1, campaign)
    if table == "table2":
        return efficiency(first, TABLE_2, campaign)
    if table == "table3":
        return ablation(first, campaign) + cross_layer(first, campaign)
    if table == "table4":
        return scaling(first, campaign, RANKS)
    return error_analysis(experiments, campaign)

"""Reproduction of the paper's tables: ``autotune.reproduce``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.data import pointed_at
from autotune.io.files import folder_given
from autotune.io.progress import Reporter, Silent
from autotune.records.journal import Journal
from autotune.records.protocol import paired_seeds
from autotune.records.run_directory import RunDirectory, require_writable
from autotune.records.run_documents import TableRequest
from autotune.records.tracking import Tracker
from autotune.report.png_figures import draw_reproduction
from autotune.report_to import chosen


def reproduce(
    table: str,
    *,
    data: str | Path | None = None,
    scale: str = "paper",
    seeds: int = 6,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Reproduce one of the paper's tables: the paper's numbers, our own, and their ratios.

    Args:
        table: ``table1`` to ``table4``, or ``error-analysis``.
        data: folder with CIFAR-10 and WikiText-2 in a published format; ``None`` for the folder in ``AUTOTUNE_DATA``,
            or for a scale that needs no data.
        scale: ``paper`` for the paper's own jobs; ``cpu`` for small jobs on data that every machine has.
        seeds: number of paired seeds; with fewer than six, the result is only an indication.
        runs_dir: folder in which the run directory is made.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that ``autotune reproduce --json`` prints.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    from autotune.paper.paper_tables import experiments_for, sources_of

    folder = None if data is None else str(folder_given(data, "data").absolute())
    request = TableRequest(table=table, data=folder, scale=scale, seeds=seeds)
    paired_seeds(seeds)
    chosen()
    with pointed_at(data):
        sources = sources_of(experiments_for(table, scale))
    require_writable(folder_given(runs_dir, "runs_dir"))
    config = {"asked": asdict(request), "data": [asdict(source) for source in sources]}
    with RunDirectory.create(folder_given(runs_dir, "runs_dir"), "reproduce", table, config) as run:
        journal = Journal()
        journal.keep_in(run.path)
        return reproduced_run(request, run, journal, reporter or Silent())


def reproduced_run(request: TableRequest, run: RunDirectory, journal: Journal, reporter: Reporter) -> dict[str, Any]:
    """Measure what is missing from a table, and return the table's document."""
    from autotune.paper.paper_tables import experiments_for, reproduced
    from autotune.paper.table_comparisons import Campaign

    began = journal.clock()
    with pointed_at(request.data):
        experiments = experiments_for(request.table, request.scale)
        campaign = Campaign(run=run, journal=journal, seeds=paired_seeds(request.seeds), reporter=reporter)
        document = reproduced(request.table, request.scale, experiments, campaign)
    document = {**document, "seconds": journal.clock() - began, "run": str(run.path)}
    _publish(document, run)
    return document


def _publish(document: Mapping[str, Any], run: RunDirectory) -> None:
    """Write the table and its figure, and log both and our numbers to MLflow."""
    tracker = Tracker(run.path.parent, run.path, f"reproduce {document['table']}")
    tracker.params({name: document[name] for name in ("table", "scale", "jobs", "seeds", "device")})
    tracker.metrics({f"{row['metric']} of {row['configuration']}": row["ours"] for row in document["rows"]})
    tracker.artifact(run.write("reproduction.json", document))
    if any(row["our_change"] is not None for row in document["rows"]):
        tracker.artifact(draw_reproduction(document, run.path / "reproduction.png"))
    tracker.close()

"""Repeat the paper's tables: ``autotune reproduce``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.data import pointed_at
from autotune.io.progress import Reporter, Silent
from autotune.records.journal import Journal
from autotune.records.protocol import paired_seeds
from autotune.records.run_directory import RunDirectory, require_writable
from autotune.records.run_documents import AskedTable
from autotune.records.tracking import Tracker
from autotune.report.figures import draw_reproduction


def reproduce(
    table: str,
    *,
    data: str | Path | None = None,
    scale: str = "paper",
    seeds: int = 6,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Repeat one of the paper's tables: its numbers, ours, and the ratio.

    Args:
        table: ``table1`` to ``table4``, or ``error-analysis``.
        data: the folder that CIFAR-10 and WikiText-2 lie in, in a published format; ``None`` for the one that the
            environment names, or for a scale that needs none.
        scale: ``paper`` for the paper's own jobs; ``cpu`` for small ones on data that every machine has.
        seeds: how many paired seeds; fewer than six give an indication.
        runs_dir: where the run directory is made.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that ``autotune reproduce --json`` prints.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    from autotune.paper.paper_tables import experiments_for, sources_of

    runs = Path(runs_dir)
    paired_seeds(seeds)
    with pointed_at(data):
        sources = sources_of(experiments_for(table, scale))
    require_writable(runs)
    asked = AskedTable(table=table, data=None if data is None else str(Path(data).absolute()), scale=scale, seeds=seeds)
    config = {"asked": asdict(asked), "data": [asdict(source) for source in sources]}
    with RunDirectory.create(runs, "reproduce", table, config) as run:
        journal = Journal()
        journal.keep_in(run.path)
        return reproduced_run(asked, run, journal, reporter or Silent())


def reproduced_run(asked: AskedTable, run: RunDirectory, journal: Journal, reporter: Reporter) -> dict[str, Any]:
    """Measure what is missing of a table, and return its document."""
    from autotune.paper.paper_tables import experiments_for, reproduced
    from autotune.paper.table_comparisons import Campaign

    began = journal.clock()
    with pointed_at(asked.data):
        experiments = experiments_for(asked.table, asked.scale)
        campaign = Campaign(
            run=run,
            journal=journal,
            seeds=paired_seeds(asked.seeds),
            reporter=reporter,
        )
        document = reproduced(asked.table, asked.scale, experiments, campaign)
    document = {**document, "seconds": journal.clock() - began, "run": str(run.path)}
    _log(document, run)
    return document


def _log(document: Mapping[str, Any], run: RunDirectory) -> None:
    """Write the table and its figure, and send both and every number of ours to MLflow."""
    tracker = Tracker(run.path.parent, run.path, f"reproduce {document['table']}")
    tracker.params({name: document[name] for name in ("table", "scale", "jobs", "seeds", "device")})
    tracker.metrics({f"{row['metric']} of {row['configuration']}": row["ours"] for row in document["rows"]})
    tracker.artifact(run.write("reproduction.json", document))
    if any(row["our_change"] is not None for row in document["rows"]):
        tracker.artifact(draw_reproduction(document, run.path / "reproduction.png"))
    tracker.close()

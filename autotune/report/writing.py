"""Write what there is to see of a run: its page, its figures and its tables."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.cost_model.carbon import Intensity
from autotune.io.files import write_atomic
from autotune.records.tracking import Tracker
from autotune.report import figures
from autotune.report.campaign_run import CampaignRun, read_campaign
from autotune.report.comparison_page import ComparisonPage
from autotune.report.pareto import front_of
from autotune.report.svg import Figure
from autotune.report.tuning_page import TuningPage

PAGE_NAME, FIGURES = "report.html", "figures"
logger = logging.getLogger(__name__)


def page_for(run: CampaignRun, intensity: Intensity | None = None) -> ComparisonPage | TuningPage:
    """Return the page of a campaign.

    Args:
        run: the campaign.
        intensity: the grid's carbon intensity; ``None`` if it was not given.
    """
    front = None if run.profile is None else front_of(run.profile, run.budget_bytes)
    kind = ComparisonPage if run.compared else TuningPage
    return kind(run=run, front=front, intensity=intensity)


def to_json(page: ComparisonPage | TuningPage) -> dict[str, Any]:
    """Return what ``autotune report --json`` prints of a campaign."""
    run, best = page.run, None if page.front is None else page.front.best
    optimum = None
    if best is not None:
        plan, cost = best
        optimum = {
            "plan": plan.to_json(),
            "seconds_per_sample": cost.seconds_per_sample,
            "peak_bytes": cost.peak_bytes,
        }
    return {
        "version": 1,
        "run": str(run.folder),
        "verb": run.config.verb,
        "job": run.job,
        "verdict": page.verdict,
        "memory_budget_bytes": run.budget_bytes,
        "plan": None if run.plan is None else run.plan.to_json(),
        "predicted_optimum": optimum,
    }


def publish(folder: Path, tracker: Tracker) -> None:
    """Write the page of a campaign that has ended into its run directory, and hand it and its figures to the tracker.

    A campaign is finished without them: what goes wrong here is logged, and ``autotune report`` says it again.
    """
    try:
        write_campaign(folder)
    except Exception as error:  # noqa: BLE001 - whatever it is, what the campaign measured stands
        logger.warning("no report was written: %s: %s", type(error).__name__, error)
        return
    tracker.artifact(folder / PAGE_NAME)
    tracker.artifact(folder / FIGURES)


def write_campaign(folder: Path) -> None:
    """Write a campaign's page and its figures into its run directory.

    Raises:
        RunDirectoryError: if the folder holds no campaign that has ended.
        OSError: if they cannot be written.
    """
    page = page_for(read_campaign(folder))
    write_atomic(folder / PAGE_NAME, page.text)
    write_figures(page.figures, folder / FIGURES)


def draw_figures(page: ComparisonPage | TuningPage, folder: Path) -> list[Path]:
    """Write the pictures of a campaign as PNG files and return their paths.

    Raises:
        OSError: if they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trade = page.trade
    drawn = [] if trade is None else [figures.draw_trade(trade, folder / "time-against-memory.png")]
    if page.run.compared:
        drawn.append(figures.draw_comparison(page.run.document, folder / "comparison.png"))
    return drawn


def write_figures(drawn: Sequence[Figure], folder: Path) -> list[Path]:
    """Write figures as SVG files and return their paths; those of one name are numbered.

    Raises:
        OSError: if they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for figure in drawn:
        path = folder / f"{figure.name}.svg"
        while path in paths:
            path = folder / f"{figure.name}-{len(paths) + 1}.svg"
        write_atomic(path, figure.file)
        paths.append(path)
    return paths

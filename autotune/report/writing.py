"""Writing of a campaign's page and figures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.cost_model.carbon import Intensity
from autotune.io.files import write_atomic
from autotune.records.tracking import Tracker
from autotune.report.campaign_page import CampaignPage
from autotune.report.campaign_run import CampaignRun, read_campaign
from autotune.report.comparison_page import comparison_page
from autotune.report.pareto import front_of
from autotune.report.png_figures import draw, draw_comparison
from autotune.report.svg import Figure
from autotune.report.tuning_page import tuning_page

PAGE_NAME, FIGURES = "report.html", "figures"
logger = logging.getLogger(__name__)


def page_for(run: CampaignRun, intensity: Intensity | None = None) -> CampaignPage:
    """Return the page of a campaign.

    Args:
        run: the campaign.
        intensity: the grid's carbon intensity; ``None`` if it was not given.
    """
    front = None if run.profile is None else front_of(run.profile, run.budget_bytes)
    return (comparison_page if run.compared else tuning_page)(run, front, intensity)


def to_json(page: CampaignPage) -> dict[str, Any]:
    """Return the document of ``autotune report --json`` for a campaign."""
    run, optimum = page.run, None
    if page.front is not None and page.front.best is not None:
        plan, cost = page.front.best
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
    """Write the page and the figures of a finished campaign into its run directory, and send them to the tracker.

    The campaign is complete without them, so an error is only logged; ``autotune report`` would raise it.
    """
    try:
        write_campaign(folder)
    except Exception as error:  # noqa: BLE001 - the results of the campaign are complete without a report
        logger.warning("no report was written: %s: %s", type(error).__name__, error)
        return
    tracker.artifact(folder / PAGE_NAME)
    tracker.artifact(folder / FIGURES)


def write_campaign(folder: Path) -> None:
    """Write the page and the figures of a campaign into its run directory.

    Raises:
        RunDirectoryError: if the folder does not contain a finished campaign.
        OSError: if a file cannot be written.
    """
    page = page_for(read_campaign(folder))
    write_atomic(folder / PAGE_NAME, page.text)
    write_figures(page.figures, folder / FIGURES)


def draw_figures(page: CampaignPage, folder: Path) -> list[Path]:
    """Write the pictures of a campaign as PNG files and return their paths.

    Raises:
        OSError: if a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    costs = page.costs
    drawn = [] if costs is None else [draw([costs], folder / "time-against-memory.png")]
    if page.run.compared:
        drawn.append(draw_comparison(page.run.document, folder / "comparison.png"))
    return drawn


def write_figures(drawn: Sequence[Figure], folder: Path) -> list[Path]:
    """Write figures as SVG files and return their paths; figures with the same name are numbered.

    Raises:
        OSError: if a file cannot be written.
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

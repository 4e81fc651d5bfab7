"""``autotune schedule``: find the start time at which a run emits the least CO2."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import console as shared
from autotune.cli.arguments import input_path
from autotune.cli.console import JsonOption

if TYPE_CHECKING:
    from autotune.cost_model.carbon import Start


def command(
    length: Annotated[str, typer.Option("--length", help="Length of the run, as in 6h, 90min or 1d12h.")],
    carbon_intensity: Annotated[
        Path,
        typer.Option(
            "--carbon-intensity", callback=input_path, help="CSV file with two columns: ISO time with zone, gCO2/kWh."
        ),
    ],
    earliest: Annotated[
        str | None, typer.Option("--earliest", help="Earliest start, as an ISO time with zone; by default now.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", help="Latest end; by default the end of the series.")
    ] = None,
    watts: Annotated[
        float | None,
        typer.Option("--watts", max=shared.MOST_WATTS, help="Mean power of the run in watts, to compute grams."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the best start time for a run of known length from a series of carbon intensities."""
    from autotune.cost_model import carbon
    from autotune.mechanics.energy_meter import require_watts

    length_s = carbon.parse_length(length)
    require_watts(watts)
    series, now_s = carbon.Intensity.read(carbon_intensity), time.time()
    # A forecast may begin tomorrow.
    begins_later = earliest is None and series.begin_s > now_s
    earliest_s = max(now_s, series.begin_s) if earliest is None else carbon.parse_time(earliest, where="--earliest")
    deadline_s = None if deadline is None else carbon.parse_time(deadline, where="--deadline")
    found = carbon.schedule(series, length_s, earliest_s, deadline_s)
    energy_j = None if watts is None else watts * length_s
    rows = {"best": found.best, "earliest": found.earliest, "worst": found.worst}
    document: dict[str, Any] = {
        "length_s": length_s,
        "energy_j": energy_j,
        **{name: _row(start, energy_j) for name, start in rows.items()},
        "saved_frac": _saved(found.best, found.earliest),
        "saved_frac_of_worst": _saved(found.best, found.worst),
    }
    if as_json:
        shared.print_json(document)
        return
    show(document, now=earliest is None and not begins_later)


def show(document: dict[str, Any], *, now: bool) -> None:
    """Print a table of the best, the earliest and the worst start."""
    at_once = "now" if now else "earliest"
    called = {"best": "best", "earliest": at_once, "worst": "worst"}
    with_grams = document["energy_j"] is not None
    table = shared.table()
    for name in ("UTC", "start", "end", "gCO2/kWh", *(["gCO2"] if with_grams else [])):
        table.add_column(name, justify="right" if name.startswith("gCO2") else "left")
    for name, title in called.items():
        row = document[name]
        grams = [f"{row['grams']:.0f}"] if with_grams else []
        table.add_row(title, _short(row["start"]), _short(row["end"]), f"{row['grams_per_kwh']:.0f}", *grams)
    output = shared.console(as_json=False)
    output.print(table)
    output.print(
        f"Starting at {document['best']['start']} emits {document['saved_frac']:.0%} less than starting "
        f"{at_once if now else 'as early as possible'}, and {document['saved_frac_of_worst']:.0%} less than the worst.",
        soft_wrap=True,
    )
    if not with_grams:
        output.print("The grams depend on the power of the run; give it with --watts.")


def _row(start: Start, energy_j: float | None) -> dict[str, Any]:
    from autotune.cost_model.carbon import JOULES_PER_KWH, iso

    grams = None if energy_j is None else energy_j / JOULES_PER_KWH * start.grams_per_kwh
    return {
        "start": iso(start.begin_s),
        "end": iso(start.end_s),
        "grams_per_kwh": start.grams_per_kwh,
        "grams": grams,
    }


def _short(time: str) -> str:
    return time[:16].replace("T", " ")


def _saved(best: Start, other: Start) -> float:
    return 1 - best.grams_per_kwh / other.grams_per_kwh if other.grams_per_kwh else 0.0

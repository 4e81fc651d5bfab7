"""Tables of a campaign for papers and notebooks, as CSV or Parquet.

One row per arm, run, evaluation, plan, window, trial or unit; names of columns end in the unit of measurement.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.cost_model.carbon import Intensity
from autotune.io.files import write_atomic
from autotune.plan import Plan
from autotune.records.run_documents import TuneConfig
from autotune.report.campaign_run import CampaignRun, launched
from autotune.report.costs import arm_costs
from autotune.report.terminal_tables import judged_arms
from autotune.step_parts import StepParts, metrics_of

Row = Mapping[str, Any]
# Characters that start a formula in a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def write_sheets(run: CampaignRun, folder: Path, kind: str, intensity: Intensity | None = None) -> list[Path]:
    """Write a campaign's tables and return their paths.

    Args:
        run: the campaign.
        folder: output folder; created if it does not exist.
        kind: ``csv`` or ``parquet``.
        intensity: the grid's carbon intensity; ``None`` for the grams that the campaign recorded.

    Raises:
        OSError: if a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, rows in sheets_of(run, intensity).items():
        path = folder / f"{name}.{kind}"
        write_atomic(path, _as_csv(rows) if kind == "csv" else _as_parquet(rows))
        paths.append(path)
    return paths


def sheets_of(run: CampaignRun, intensity: Intensity | None = None) -> dict[str, list[Row]]:
    """Return a campaign's tables by name; tables without rows are left out."""
    sheets = {"trials": list(_trials(run)), "units": list(_units(run))}
    if run.compared:
        sheets |= {
            "arms": list(_arms(run, intensity)),
            "runs": list(_runs(run)),
            "curves": list(_curves(run)),
            "plans": list(_plans(run)),
            "windows": list(_windows(run)),
        }
    return {name: rows for name, rows in sheets.items() if rows}


def _as_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO(newline="")
    # In a run that another version wrote, rows of one table may have different keys.
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _as_text(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _as_text(value: Any) -> Any:
    """Return a value that no spreadsheet interprets as a formula, because a run may contain any names."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _as_parquet(rows: Sequence[Row]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), sink)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _arms(run: CampaignRun, intensity: Intensity | None) -> Iterator[Row]:
    judged = judged_arms(run.document)
    keys = ("time_ratio", "p_value", "memory_ratio", "metric_difference", "non_inferior", "break_even_steps")
    for cost in arm_costs(run.document, intensity):
        entry = judged.get(cost.arm, {})
        intervals = {
            f"{name}_{end}": bound
            for name, key in (("time_ratio", "time_ratio_ci95"), ("time_ratio_bca", "time_ratio_bca95"))
            for end, bound in zip(("low", "high"), entry.get(key) or (None, None), strict=True)
        }
        yield {
            **asdict(cost),
            **{key: entry.get(key) for key in keys},
            **intervals,
            "verdict": entry.get("verdict", "reference"),
            "reason": entry.get("reason", ""),
        }


def _records(run: CampaignRun) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name of the arm and the record of each run."""
    for arm in run.document["arms"]:
        yield from ((arm["name"], record) for record in arm["runs"])


def _runs(run: CampaignRun) -> Iterator[Row]:
    for arm, record in _records(run):
        parts = record.get("parts")
        own = {key: value for key, value in record.items() if not isinstance(value, list | dict) and key != "parts"}
        yield {"arm": arm, **own, **metrics_of(StepParts.from_json(parts) if parts else None)}


def _curves(run: CampaignRun) -> Iterator[Row]:
    for arm, record in _records(run):
        for seconds, samples, metric in record["curve"]:
            own = {"train_s": float(seconds), "samples": samples, "metric": float(metric)}
            yield {"arm": arm, "seed": record["seed"], **own}


def _plans(run: CampaignRun) -> Iterator[Row]:
    for arm, record in _records(run):
        for entry in record.get("plans") or ():
            own = {"arm": arm, "seed": record["seed"], "from_step": entry["step"]}
            yield own | _plan_columns(Plan.from_json(entry["plan"]))


def _windows(run: CampaignRun) -> Iterator[Row]:
    for arm, record in _records(run):
        yield from ({"arm": arm, "seed": record["seed"], **window} for window in record.get("windows") or ())


def _trials(run: CampaignRun) -> Iterator[Row]:
    keys = ("seconds_per_step", "samples_per_step", "peak_bytes", "loss", "energy_j", "energy_source", "failure")
    for trial in run.trials:
        yield {
            **{key: trial[key] for key in ("method", "number", "final", "cost", "tuning_steps", "tuning_s")},
            **{key: trial["measurement"].get(key) for key in keys},
            **_plan_columns(Plan.from_json(trial["plan"])),
        }


def _plan_columns(plan: Plan) -> dict[str, Any]:
    return {"accumulation_steps": plan.accumulation_steps, "plan": str(plan), "digest": plan.digest}


def _units(run: CampaignRun) -> Iterator[Row]:
    """Yield the choices for each unit in the plan that each arm starts with."""
    if isinstance(run.config, TuneConfig):
        plans = [(run.config.method, Plan.from_json(run.document["plan"]))]
    else:
        plans = [(arm["name"], launched(arm)) for arm in run.document["arms"]]
    for name, plan in plans:
        for unit in dict.fromkeys([*plan.precision, *plan.storage]):
            storage = str(plan.storage_of(unit)) if unit in plan.storage else None
            yield {"arm": name, "unit": unit, "precision": str(plan.precision_of(unit)), "storage": storage}

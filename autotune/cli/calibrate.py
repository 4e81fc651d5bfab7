"""``autotune calibrate``: measure this machine's rates, for ``autotune plan``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.budget import format_bytes
from autotune.cli import console as shared
from autotune.cli.arguments import output_file
from autotune.cli.console import JsonOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table


def command(
    output: Annotated[Path, typer.Option("--output", callback=output_file, help="File to write the rates to.")] = Path(
        "machine.json"
    ),
    check: Annotated[
        str, typer.Option("--check", help="Jobs, separated by commas, whose steps are estimated and then measured.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Measure the rates of this machine's operators, in about two minutes.

    'autotune plan JOB --device machine.json' then estimates jobs that have never run here.
    """
    import torch

    from autotune.catalog import load_job
    from autotune.cost_model import machine_file
    from autotune.io.files import write_json
    from autotune.mechanics.devices import device_kind
    from autotune.profiling.calibration import calibrated
    from autotune.profiling.calibration_check import check as checked
    from autotune.profiling.calibration_check import errors

    jobs = [load_job(name) for name in check.split(",") if name]
    console = shared.console(as_json=as_json)
    with shared.Bars(console) as bars:
        began = time.perf_counter()
        bars.stage("measure operators", 1)
        device = calibrated(torch.device(device_kind()), on_progress=bars.advance)
        document = machine_file.to_json(device, threads=torch.get_num_threads(), torch_version=torch.__version__)
        write_json(output, document)
        seconds = time.perf_counter() - began
        bars.stage("check jobs", max(len(jobs), 1))
        rows = checked(jobs, machine_file.load(output), on_job=lambda: bars.advance(1))
    document |= {"output": str(output), "seconds": seconds, "checked": rows, "errors": errors(rows)}
    if as_json:
        shared.print_json(document)
        return
    fastest = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in document["flops"].items())
    console.print(
        f"{device.name}, {document['threads']} thread(s): matrix products {fastest}; memory "
        f"{device.bandwidth / 1e9:,.0f} GB/s; measured in {seconds:.0f} s. Written to {output}.",
        soft_wrap=True,
    )
    if rows:
        console.print(_table(rows))
    for name, own in document["errors"].items():
        console.print(f"Errors of {name}: {own['median']:.1%} (median), {own['largest']:.1%} (largest).")
    console.print("Estimate a job with it:")
    console.print(f"    autotune plan mine.py:job --device {output}", soft_wrap=True)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = shared.table(title="estimated, and as a share of what was measured", title_justify="left")
    for name in ("job", "plan", "step", "", "peak", ""):
        table.add_column(name, justify="left" if name in ("job", "plan") else "right")
    for row in rows:
        if row["failure"] is not None:
            table.add_row(row["job"], row["failure"], "", "", "", "")
            continue
        table.add_row(
            row["job"],
            row["plan"],
            f"{row['predicted_s']:.4g} s",
            f"{row['predicted_s'] / row['measured_s']:.0%}",
            format_bytes(row["predicted_peak_bytes"]),
            f"{row['predicted_peak_bytes'] / row['measured_peak_bytes']:.0%}",
        )
    return table

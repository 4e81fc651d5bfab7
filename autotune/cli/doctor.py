"""``autotune doctor``: show the capabilities of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from autotune.budget import format_bytes
from autotune.cli import console as shared
from autotune.cli.console import JsonOption, RunsOption
from autotune.extras import EXTRAS, install_command, is_installed


def command(runs_dir: RunsOption = shared.RUNS, as_json: JsonOption = False) -> None:
    """Show versions, the device, its useful precisions, memory, load, the jobs, and what is missing, with remedies.

    The exit code is 2 if runs cannot be written.
    """
    from autotune.records.run_directory import require_writable

    document = _examine(runs_dir)
    if as_json:
        shared.print_json(document)
    else:
        _show(document)
    require_writable(runs_dir)


def _show(document: dict[str, Any]) -> None:
    document["memory"] = format_bytes(document.pop("memory_bytes"))
    document["extras"] = {
        name: "yes" if there else f"no; to install: {install_command(name)}"
        for name, there in document["extras"].items()
    }
    table = shared.table(show_header=False)
    table.add_column("")
    table.add_column("", overflow="fold")
    for key, value in document.items():
        table.add_row(key.replace("_", " "), _text(value))
    shared.console(as_json=False).print(table)


def _examine(runs: Path) -> dict[str, Any]:
    import torch

    from autotune import __version__
    from autotune.catalog import catalog
    from autotune.errors import InputError, RunDirectoryError
    from autotune.io.addresses import without_secrets
    from autotune.mechanics import devices
    from autotune.mechanics.energy_meter import find_meter
    from autotune.mechanics.precision import excluded_precisions, useful_precisions
    from autotune.records.destinations import destination
    from autotune.records.run_directory import require_writable
    from autotune.report_to import VARIABLE, chosen

    kind = devices.device_kind()
    try:
        require_writable(runs)
        writable = "yes"
    except RunDirectoryError as error:
        writable = str(error)
    try:
        tracking = without_secrets(destination(chosen(), runs, runs).address)
    except InputError as error:
        if os.environ.get(VARIABLE):
            raise
        # Nobody has asked for the default tracker, whose library is missing.
        tracking = str(error)
    return {
        "autotune": __version__,
        "torch": torch.__version__,
        "device": devices.device_name(),
        "fp32": devices.fp32_arithmetic(kind),
        "settings": devices.settings(kind),
        "lacks": devices.lacks_here(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load": f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores in the last minute",
        "precisions": [str(precision) for precision in useful_precisions(kind)],
        "precisions_excluded": {str(key): reason for key, reason in excluded_precisions(kind).items()},
        "energy": find_meter(torch.device(kind)).source,
        "jobs": list(catalog()),
        "runs_directory": str(runs),
        "runs_writable": writable,
        "tracking": tracking,
        "extras": {name: is_installed(name) for name in EXTRAS},
    }


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_text(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(str(entry) for entry in value)
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)

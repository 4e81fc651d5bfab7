"""``autotune doctor``: show the capabilities of this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from autotune.cli import console as shared
from autotune.cli.console import JsonOption, RunsOption

_EXTRAS = ("deepspeed", "transformers", "lightning", "ray", "zeus", "psycopg", "pytorch_optimizer", "bitsandbytes")


def command(runs_dir: RunsOption = shared.RUNS, as_json: JsonOption = False) -> None:
    """Show versions, the device, its useful precisions, the jobs, and whether the folder of runs is writable."""
    document = _examine(runs_dir)
    if as_json:
        shared.print_json(document)
        return
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
    from autotune.errors import RunDirectoryError
    from autotune.io.addresses import without_secrets
    from autotune.mechanics import devices
    from autotune.mechanics.energy_meter import find_meter
    from autotune.mechanics.precision import excluded_precisions, useful_precisions
    from autotune.records.run_directory import require_writable
    from autotune.records.tracking import tracking_uri

    kind = devices.device_kind()
    try:
        require_writable(runs)
        writable = "yes"
    except RunDirectoryError as error:
        writable = str(error)
    return {
        "autotune": __version__,
        "torch": torch.__version__,
        "device": devices.device_name(),
        "fp32": devices.fp32_arithmetic(kind),
        "settings": devices.settings(kind),
        "lacks": devices.lacks_here(),
        "threads": torch.get_num_threads(),
        "precisions": [str(precision) for precision in useful_precisions(kind)],
        "precisions_excluded": {str(key): reason for key, reason in excluded_precisions(kind).items()},
        "energy": find_meter(torch.device(kind)).source,
        "jobs": list(catalog()),
        "runs_directory": str(runs),
        "runs_writable": writable,
        "tracking": without_secrets(tracking_uri(runs)),
        "extras": {name: importlib.util.find_spec(name) is not None for name in _EXTRAS},
    }


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_text(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(str(entry) for entry in value)
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)

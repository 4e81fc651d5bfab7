"""The two kill switches of attached runs: an environment variable, and a file in the run's folder."""

from __future__ import annotations

import os
from pathlib import Path

# If set to anything but "" or 0, no tuner attaches, and attached ones detach within a step.
KILL_VARIABLE = "AUTOTUNE_DISABLE"
_STOP_FILE = "STOP"


def is_disabled() -> bool:
    """Return whether the environment forbids live tuners."""
    return os.environ.get(KILL_VARIABLE, "0") not in ("", "0")


def stop_file_in(folder: Path | None) -> str | None:
    """Return the path of the file whose appearance detaches a run's tuner; ``None`` for a run without a folder."""
    return None if folder is None else str(folder / _STOP_FILE)


def reason_to_stop(stop_file: str | None) -> str | None:
    """Return which kill switch is set; ``None`` if neither is.

    Args:
        stop_file: the run's stop file; ``None`` for none.
    """
    if is_disabled():
        return f"{KILL_VARIABLE} is set"
    # Path.exists() raises if a folder is not accessible or its disk is gone.
    if stop_file is not None and os.path.exists(stop_file):  # noqa: PTH110
        return f"{stop_file} exists"
    return None

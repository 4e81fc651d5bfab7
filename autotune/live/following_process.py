"""The start of the process that sends a run's decision log to an experiment tracker.

It is a process rather than a thread, so that the tracker's imports, random draws, environment variables and waits
do not affect the run. It reads only the log's file, and ends with the run.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

logger = logging.getLogger(__name__)

# The module is started by its name, because this package must not import ``autotune.records``.
MODULE = "autotune.records.log_following"
OUTPUT = "tracking.log"
# By these, wandb would write to the run and the process of the user's own code.
_OF_THE_USERS_RUN = ("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID")


def follow(folder: Path, report_to: str) -> bool:
    """Start the process that sends a run's decision log to a tracker; the run goes on if that fails.

    Args:
        folder: the run directory.
        report_to: name of the tracker.

    Returns:
        Whether the process was started.
    """
    # The process imports this package from where it was imported here, and never from the working directory.
    paths = [str(Path(__file__).resolve().parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_THE_USERS_RUN}
    environment = {**inherited, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-P", "-m", MODULE, str(folder.absolute()), str(os.getpid()), report_to]
    try:
        with (folder / OUTPUT).open("ab") as output:
            # In its own session, the process survives an interrupt of the run and can send the rest.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        logger.warning("the run is not sent to %s: %s: %s", report_to, type(error).__name__, error)
        return False
    # Without a thread that waits for it, the process would remain a zombie until the run ends.
    threading.Thread(target=process.wait, name="autotune-follower", daemon=True).start()
    return True

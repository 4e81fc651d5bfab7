"""Start the process that sends a run's decision log to MLflow.

It is a process, not a thread: what MLflow imports, draws at random, sets in the environment or waits for must not reach
the run. It reads the log's file and nothing else, and ends with the run.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

logger = logging.getLogger(__name__)

# A module by its name: processes are started by it, and this floor knows nothing of the one it lies on.
MODULE = "autotune.records.mlflow_following"
OUTPUT = "tracking.log"


def follow(folder: Path) -> bool:
    """Have a run's decision log sent on; without it, nothing is sent and the run goes on.

    Args:
        folder: the run directory.

    Returns:
        Whether the process was started.
    """
    # Found where this package was, wherever the run looks for its modules; and the working directory is not looked at.
    paths = [str(Path(__file__).resolve().parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-P", "-m", MODULE, str(folder.absolute()), str(os.getpid())]
    try:
        with (folder / OUTPUT).open("ab") as output:
            # In a session of its own, an interrupt of the run lets it send what is left.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        logger.warning("MLflow is not followed: %s: %s", type(error).__name__, error)
        return False
    # Somebody must take its exit code, and nobody of the run has time to.
    threading.Thread(target=process.wait, name="autotune-follower", daemon=True).start()
    return True

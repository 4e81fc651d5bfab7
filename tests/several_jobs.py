"""Other small real jobs, to compare on several at once."""

import tiny_job

from autotune import Job


def narrow() -> Job:
    """Return the tiny job at another target, under another name."""
    return tiny_job.make(name="narrow", target=2.5)

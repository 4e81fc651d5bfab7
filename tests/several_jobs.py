"""Further small real jobs, for comparisons on several jobs."""

import tiny_job

from autotune import Job


def narrow() -> Job:
    """Return the tiny job with another target and name."""
    return tiny_job.make(name="narrow", target=2.5)

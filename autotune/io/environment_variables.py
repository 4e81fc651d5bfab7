"""Set environment variables for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Run the body with an environment variable set, which then is what it was.

    Args:
        name: of the variable.
        value: for it; processes that are started meanwhile see it too.
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before

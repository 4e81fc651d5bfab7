"""Set environment variables temporarily."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Run the body with an environment variable set, also for processes that it starts; then restore the variable.

    Args:
        name: name of the variable.
        value: its value.
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before

"""Set environment variables temporarily."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def variable(name: str, value: str | None) -> Iterator[None]:
    """Run the body with an environment variable set, also for processes that it starts; then restore the variable.

    Args:
        name: name of the variable.
        value: its value; ``None`` for a variable that is not set.
    """
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before

"""A fake accelerator, so that what the project does on a GPU can be tested without one.

The device type is `fake` and its module is `torch.fake`: memory of the host behind an allocator like CUDA's, kernels of
the CPU on a virtual clock, and a random generator of its own. Importing this package changes nothing; `load()`
registers the device for the rest of the process, absent until `present(True)`. Tests take the fixture `accelerator`.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from pathlib import Path
from types import ModuleType

from .build import AUTOLOAD, build, reason

__all__ = ["autoload", "child_environment", "load", "reason"]

_VARIABLE = "FAKE_ACCELERATOR"


def load() -> ModuleType:
    """Register the device in this process, once, and return its controls.

    Raises:
        RuntimeError: If the device cannot be had here; the message is what `reason()` returns.
    """
    from . import library

    if not library.loaded():
        if (why := reason()) is not None:
            raise RuntimeError(why)
        library.register(build())
    from . import controls

    return controls


def child_environment(**knobs: object) -> dict[str, str]:
    """Return an environment in which a child process has the device as soon as it imports torch.

    Args:
        knobs: Functions of the controls with their argument, as `capacity=2**30`.
    """
    build()
    tests = Path(__file__).resolve().parents[1]
    paths = [str(build().parent / AUTOLOAD), str(tests), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), _VARIABLE: json.dumps(knobs)}


def autoload() -> None:
    """Switch the device on where `child_environment` asks for it; torch calls this when it is imported."""
    if (knobs := os.environ.get(_VARIABLE)) is None:
        return
    controls = load()
    atexit.register(_settle)
    controls.present(True)
    for name, value in json.loads(knobs).items():
        getattr(controls, name)(value)


def _settle() -> None:
    """Let autograd's device thread drop what it holds of the last graph.

    It needs the interpreter's lock for that, and a thread that waits for the lock while the interpreter is taken down
    aborts the process. An exit right after a backward pass on a busy machine is too early.
    """
    time.sleep(0.2)

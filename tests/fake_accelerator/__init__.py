"""A fake accelerator, to test GPU code without a GPU.

The device type is `fake` and its module is `torch.fake`. It has host memory behind an allocator like CUDA's, CPU
kernels on a virtual clock, and its own random number generator. Importing this package changes nothing: `load()`
registers the device for the rest of the process, and the device stays absent until `present(True)`.
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
        RuntimeError: If the device is not available here; the message is the result of `reason()`.
    """
    from . import library

    if not library.loaded():
        if (why := reason()) is not None:
            raise RuntimeError(why)
        library.register(build())
    from . import controls

    return controls


def child_environment(**knobs: object) -> dict[str, str]:
    """Return an environment in which a child process gets the device when it imports torch.

    Args:
        knobs: Functions of the controls with their argument, such as `capacity=2**30`.
    """
    build()
    tests = Path(__file__).resolve().parents[1]
    paths = [str(build().parent / AUTOLOAD), str(tests), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), _VARIABLE: json.dumps(knobs)}


def autoload() -> None:
    """Switch the device on if `child_environment` asks for it; torch calls this when it is imported."""
    if (knobs := os.environ.get(_VARIABLE)) is None:
        return
    controls = load()
    atexit.register(_settle)
    controls.present(True)
    for name, value in json.loads(knobs).items():
        getattr(controls, name)(value)


def _settle() -> None:
    """Let autograd's device thread release the last graph.

    The thread needs the interpreter lock for that. A thread that waits for the lock while the interpreter shuts down
    aborts the process, which can happen if a busy machine exits right after a backward pass.
    """
    time.sleep(0.2)

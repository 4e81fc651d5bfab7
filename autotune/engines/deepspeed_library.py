"""Import DeepSpeed, compile the extension that it needs, and connect this process with the other ranks.

On CPUs, DeepSpeed compiles one extension for communication. PyTorch guards the folder of an extension with a file
called ``lock``, even to load one that is already compiled. A rank that is killed meanwhile leaves the file behind, and
every later process waits forever. Autotune therefore uses a folder of its own and guards it with a lock that the
kernel releases when its holder ends. Under that lock, a leftover ``lock`` file can be deleted: its process has ended.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import torch
from torch import distributed

from autotune import extras
from autotune.engines.rendezvous import join_ranks
from autotune.errors import InputError
from autotune.io.environment_variables import variable

_EXTENSIONS = "TORCH_EXTENSIONS_DIR"


def imported(device: str) -> ModuleType:
    """Import the library and compile its extension for a device.

    One process on the machine compiles; the others wait.

    Args:
        device: ``cpu``, or an accelerator's type.

    Raises:
        InputError: if DeepSpeed or ninja is missing.
    """
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed compiles with ninja, which is in the folder of the interpreter.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:
        with redirect_stdout(sys.stderr):
            import deepspeed
    except ImportError as error:
        raise extras.missing("deepspeed", where="engine deepspeed") from error
    if shutil.which("ninja") is None:
        raise InputError("ninja is missing", where="engine deepspeed", allowed=extras.install_command("deepspeed"))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    library: ModuleType = deepspeed
    _compile(library)
    return library


def connect(library: ModuleType, device: str) -> None:
    """Join the process group of the ranks, or make one of this process alone."""
    join_ranks(device)
    if not library.comm.is_initialized():
        with redirect_stdout(sys.stderr):
            library.init_distributed(dist_backend=distributed.get_backend(), auto_mpi_discovery=False)


def _compile(library: ModuleType) -> None:
    """Load the extension that DeepSpeed needs, if any, and compile it if necessary."""
    builder = library.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not library.ops.__compatible_ops__.get(builder.NAME, False):
        return
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "autotune.lock").open("wb") as held, variable(_EXTENSIONS, str(folder)):
        fcntl.flock(held, fcntl.LOCK_EX)
        (folder / builder.NAME / "lock").unlink(missing_ok=True)
        with redirect_stdout(sys.stderr):
            builder.load(verbose=False)


def _folder() -> Path:
    """Return Autotune's own folder for compiled extensions."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get(_EXTENSIONS) or get_default_build_root())
    return root / f"autotune-{sys.implementation.cache_tag}-torch-{torch.__version__}"

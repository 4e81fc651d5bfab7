"""Find everything that a tuner could leave in a model, in its optimizer or in the process."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autotune.mechanics.memory_meter import storages

OURS = ("autotune.live", "autotune.mechanics")
Facts = dict[str, object]


def of_process() -> Facts:
    """Return the state of the process besides its objects: threads, files, settings, hooks."""
    tables = {
        name: dict(table)
        for module in (nn.modules.module, sys.modules["torch.optim.optimizer"])
        for name, table in vars(module).items()
        if name.startswith("_global_") and isinstance(table, dict)
    }
    # torch's compiler creates one of these per compilation.
    contexts = {one.name: value for one, value in contextvars.copy_context().items() if "ConfigPatch" not in one.name}
    return {
        **{f"hooks {name}": {key: id(hook) for key, hook in table.items()} for name, table in tables.items()},
        **{f"variable {name}": value for name, value in os.environ.items()},
        **{f"file {name}": path for name, path in _open_files()},
        **{f"signal {number}": signal.getsignal(number) for number in signal.valid_signals()},
        **{f"child {child}": True for child in _children()},
        **{f"context {name}": value for name, value in contexts.items()},
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": sorted(path.read_text() for path in Path("/proc/self/task").glob("*/comm")),
        "warnings": list(warnings.filters),
        "torch": _settings(),
        "numpy": np.geterr(),
        "collector": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "python": (sys.excepthook, threading.excepthook, sys.getprofile(), sys.gettrace(), sys.getswitchinterval()),
        "imports": (list(sys.path), list(sys.meta_path), list(sys.path_hooks)),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "working directory": str(Path.cwd()),
    }


def of_objects(model: nn.Module, optimizer: torch.optim.Optimizer) -> Facts:
    """Return the contents of modules, parameters and an optimizer, by identity."""
    found: Facts = {}
    for name, module in model.named_modules():
        found |= _held(f"{name or 'model'}:", module)
        for key, value in vars(module).items():
            found |= _listed(f"{name or 'model'}:{key}", value)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
        found |= {f"{name}:{kind}": list(getattr(tensor, kind) or ()) for kind in hooks}
        found |= {f"{name}:{key}": id(value) for key, value in vars(tensor).items()}
        found[f"{name}:as it is"] = (id(tensor), tensor.requires_grad, tensor.retains_grad, tensor.dtype)
    found |= _held("optimizer:", optimizer)
    for key, value in vars(optimizer).items():
        if "hooks" in key:
            found |= _listed(f"optimizer:{key}", value)
    for number, group in enumerate(optimizer.param_groups):
        found[f"optimizer:{number}"] = sorted(group)
    return found


def changes(before: Facts, after: Facts) -> set[str]:
    """Return additions, removals and changes, by name."""
    return (
        {f"added {name}" for name in after.keys() - before.keys()}
        | {f"gone {name}" for name in before.keys() - after.keys()}
        | {f"changed {name}" for name in before.keys() & after.keys() if before[name] != after[name]}
    )


@contextlib.contextmanager
def only_new_objects() -> Iterator[None]:
    """Let the garbage collector see only objects created in the body."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_bytes() -> int:
    """Return the bytes of all tensors that the garbage collector sees."""
    gc.collect()
    found = (one for one in gc.get_objects() if isinstance(one, torch.Tensor))
    # Tensors used for compiler tracing have no memory.
    return sum(storages([one for one in found if not isinstance(one, FakeTensor)]).values())


def alive() -> list[str]:
    """Return the types of the package's live objects: tuners, pilots, profilers, forwards."""
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    return sorted(kind.__name__ for kind in kinds if str(kind.__module__).startswith(OURS))


def _listed(name: str, held: object) -> Facts:
    """Return the items of a dictionary; hooks in their order, because a process-wide counter numbers them."""
    if not isinstance(held, Mapping):
        return {}
    keys = range(len(held)) if "hooks" in name else held
    return {f"{name}[{key!r}]": id(value) for key, value in zip(keys, held.values(), strict=True)}


def _held(name: str, owner: object) -> Facts:
    own = {f"{name}{key}": id(value) for key, value in vars(owner).items() if key not in ("training", "param_groups")}
    return {**own, f"{name}type": type(owner), f"{name}training": getattr(owner, "training", None)}


def _open_files() -> Iterator[tuple[str, str]]:
    for entry in list(Path("/proc/self/fd").iterdir()):
        # One of them belongs to this check itself.
        with contextlib.suppress(OSError):
            path = str(entry.readlink())
            if not path.endswith("/fd"):
                yield entry.name, path


def _children() -> set[str]:
    return {child for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split()}


def _settings() -> tuple[object, ...]:
    autograd = torch._C._autograd
    return (
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        torch.get_deterministic_debug_mode(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_float32_matmul_precision(),
        torch.is_autocast_cache_enabled(),
        [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        torch._C._is_multithreading_enabled(),
        autograd._profiler_enabled(),
        autograd._saved_tensors_hooks_is_enabled(),
        autograd._top_saved_tensors_default_hooks(True),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.backends.cudnn.enabled,
        torch.backends.mkldnn.enabled,
    )

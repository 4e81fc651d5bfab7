"""Global state of torch that affects a call: flags that choose kernels and numerics, and intercepting modes and hooks.

``torch.utils.checkpoint`` restores autocast, the default device and the random generators, and nothing else. Flags that
a caller sets only around a forward pass (``sdpa_kernel``, a matrix-product precision) must be restored for its
recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.nn.utils import parametrize
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_C: Any = torch._C
# The names of torch's functions that read and set each flag.
_ANYWHERE = (
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
)
_ON_CUDA = (
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
    ("_get_cublas_allow_fp16_reduced_precision_reduction", "_set_cublas_allow_fp16_reduced_precision_reduction"),
    ("_get_cublas_allow_bf16_reduced_precision_reduction", "_set_cublas_allow_bf16_reduced_precision_reduction"),
)
_CACHED = "it was called within parametrize.cached(), whose cache its recomputation would not find"
_TRANSFORMED = "it was called within a transform of torch.func, which allows no recomputation"
_FORWARD_AD = "it was called within forward-mode differentiation, which recomputation does not repeat"
_MODE = "it was called within a mode that intercepts operations of torch, which recomputation would not run under"
_ON_ALL = "a hook on the calls of all modules is registered, which recomputation would call again"
_FORBIDDEN = "it runs where hooks for saved tensors are forbidden"
_DEBUGGED = "checkpoints are being debugged"
_SAVING = "its caller has set hooks on the tensors saved for backward"


def _flags() -> tuple[tuple[Callable[[], Any], Callable[..., Any]], ...]:
    """Return the functions that read and set each flag of this version of torch."""
    names = (*_ANYWHERE, *(_ON_CUDA if torch.backends.cuda.is_built() else ()))
    found = [(getattr(_C, get), getattr(_C, put)) for get, put in names if hasattr(_C, get) and hasattr(_C, put)]
    deterministic = (_C._get_deterministic_algorithms, _set_deterministic)
    return ((torch.get_default_dtype, torch.set_default_dtype), deterministic, *found)


def _set_deterministic(strict: bool) -> None:
    _C._set_deterministic_algorithms(strict, warn_only=_C._get_deterministic_algorithms_warn_only())


_FLAGS = _flags()
_READS = tuple(read for read, _ in _FLAGS)


def flags() -> list[Any]:
    """Return the current values of the flags; ``None`` for a flag that cannot be read."""
    try:
        return [read() for read in _READS]
    except RuntimeError:
        # Torch refuses to read some flags after the user has set them through both of their interfaces.
        return [_read(read) for read in _READS]


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return None


def put(wanted: list[Any], present: list[Any]) -> None:
    """Set the flags whose wanted value differs from the present one.

    Args:
        wanted: values to set; ``None`` leaves a flag as it is.
        present: current values.
    """
    for (_, write), value, other in zip(_FLAGS, wanted, present, strict=True):
        if value != other and value is not None:
            write(*value) if isinstance(value, tuple) else write(value)


@contextmanager
def keeping_grad_mode() -> Iterator[None]:
    """Run the body, and leave autograd on or off as it was, even if torch's own contexts are interrupted within it."""
    enabled = torch.is_grad_enabled()
    try:
        yield
    finally:
        if torch.is_grad_enabled() is not enabled:
            torch.set_grad_enabled(enabled)


@contextmanager
def out_of_batched_backward() -> Iterator[None]:
    """Run the body outside of a backward pass of several gradients at once, if one is running.

    That is ``is_grads_batched``, or ``torch.vmap`` over a backward pass. A recomputation has no dimension of gradients,
    and random operations are refused within one.
    """
    depth = _C._vmapmode_increment_nesting() - 1
    for _ in range(depth + 1):
        _C._vmapmode_decrement_nesting()
    outside = temporarily_clear_interpreter_stack() if _C._are_functorch_transforms_active() else nullcontext()
    try:
        with outside:
            yield
    finally:
        for _ in range(depth):
            _C._vmapmode_increment_nesting()


def runs_backward() -> bool:
    """Return whether autograd runs a backward pass on this thread."""
    return bool(_C._current_graph_task_id() != -1)


def transformed() -> bool:
    """Return whether a ``torch.func`` transform or forward-mode differentiation is active on this thread.

    Tensors within one have no readable storage and accept no hooks.
    """
    return bool(_C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def recorded() -> bool:
    """Return whether torch records a program on this thread: ``jit.trace``, ``fx.symbolic_trace`` or ``make_fx``.

    What is recorded must be the user's own program.
    """
    return bool(
        _C._is_tracing()
        or _symbolic_trace._is_fx_tracing_flag
        or _C._get_dispatch_mode(_C._TorchDispatchModeKey.PROXY) is not None
    )


def interception(module: nn.Module) -> str | None:
    """Return why a call of a module in the current context cannot be recomputed; ``None`` if it can.

    Args:
        module: the called module.
    """
    if _C._are_functorch_transforms_active():
        return _TRANSFORMED
    if not _C._autograd._saved_tensors_hooks_is_enabled():
        return _FORBIDDEN
    if checkpoint._checkpoint_debug_enabled:
        return _DEBUGGED
    if forward_ad._current_level >= 0:
        return _FORWARD_AD
    if _C._len_torch_dispatch_stack() and any(map(_is_foreign, _get_current_dispatch_mode_stack())):
        return _MODE
    function_modes = range(_C._len_torch_function_stack())
    if function_modes and any(_is_foreign(_C._get_function_stack_at(place)) for place in function_modes):
        return _MODE
    if parametrize._cache_enabled and any(map(parametrize.is_parametrized, module.modules())):
        return _CACHED
    if _global_hooks():
        return _ON_ALL
    pack = saving_hook()
    return _SAVING if pack is not None and _is_foreign(pack) else None


def _global_hooks() -> bool:
    """Return whether hooks on the forward passes of all modules are registered."""
    every = nn.modules.module
    return bool(every._global_forward_pre_hooks or every._global_forward_hooks)


def saving_hook() -> Callable[[torch.Tensor], Any] | None:
    """Return the active hook on tensors that autograd saves for backward; ``None`` if there is none.

    A version of torch that does not expose the hooks counts as having none.
    """
    top = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(False)
    return None if hooks is None else hooks[0]


def checkpoints() -> bool:
    """Return whether what runs now is checkpointed by torch's own function, without reentrance."""
    pack = saving_hook()
    return pack is not None and pack.__module__ == checkpoint.__name__


def _is_foreign(one: Any) -> bool:
    """Return whether a mode or hook belongs neither to torch, whose own keep its semantics, nor to this package."""
    named = one if hasattr(one, "__qualname__") else type(one)
    return str(named.__module__).partition(".")[0] not in ("torch", "autotune")

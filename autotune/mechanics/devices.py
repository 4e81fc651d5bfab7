"""The device layer: all differences between devices.

No other file names a backend. Abilities are queried from the device: each backend is a module of torch
(``torch.get_device_module``) with more or fewer of the same functions.
"""

from __future__ import annotations

import functools
import gc
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType, _enable_profiler
from torch._C._profiler import RecordScope
from torch.autograd.profiler import _run_on_profiler_start, profile, record_function

from autotune.errors import InputError, first_line
from autotune.io.environment_variables import variable

AnyDevice = torch.device | str

_FP32, _TF32 = "fp32", "tf32"
# Choices for products of fp32 numbers with torch's names, and the first compute capability with TF32.
_FP32_CHOICES = {_FP32: "ieee", _TF32: "tf32"}
_TF32_CAPABILITY = (8, 0)
# The first compute capability with products of 8-bit floating-point numbers.
_FLOAT8_CAPABILITY = (8, 9)
# Files with the versions of NVIDIA's and AMD's kernel modules.
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))

# Parts of the messages with which torch, the host's allocator, drivers and libraries report that memory ran out, mostly
# in a plain RuntimeError. MPS: "MPS backend out of memory". NCCL and RCCL allocate memory outside torch.
_OUT_OF_MEMORY_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "ROCBLAS_STATUS_MEMORY_ERROR",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    # From cuDNN, if no algorithm has room for its workspace.
    "CUDNN_STATUS_NOT_SUPPORTED",
    "miopenStatusAllocFailed",
    "hipErrorOutOfMemory",
    "cudaErrorMemoryAllocation",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_RESOURCES",
    "Failed to CUDA calloc async",
    "Invalid buffer size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """Statistics of a device's allocator for this process, in bytes.

    Attributes:
        current: bytes of blocks in use; each block is rounded up.
        peak: the largest ``current`` since the peaks were last reset.
        reserved: bytes of segments taken from the driver, used or not; ``nvidia-smi`` adds the context to these.
        reserved_peak: the largest ``reserved`` since the peaks were last reset.
        retries: allocations since the process began for which the cache had to be freed first.
    """

    current: int
    peak: int
    reserved: int
    reserved_peak: int
    retries: int


def device_kind(ranks: int = 1) -> str:
    """Return the default device type of jobs on this machine: its accelerator's type, or ``cpu``.

    Args:
        ranks: number of processes that train a job on this machine, each on its own device.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or torch.accelerator.device_count() < ranks or not _is_traced(found):
        return "cpu"
    return found.type


def accelerator_kind() -> list[str]:
    """Return the type of accelerator that this torch is built for, whether there is one or not; none if for none."""
    found = torch.accelerator.current_accelerator()
    return [] if found is None else [found.type]


def resolved(device: AnyDevice | None, where: str = "device") -> torch.device:
    """Return a device on which a job can train; ``None`` for the default device of this machine.

    Raises:
        InputError: if there is no such device here, or it lacks an ability that every job needs.
    """
    allowed = ", ".join(dict.fromkeys(["cpu", device_kind()]))
    try:
        found = torch.device(device_kind() if device is None else device)
    except (RuntimeError, TypeError):
        raise InputError(f"device is {str(device)!r}", where=where, allowed=allowed) from None
    if found.type == "cpu":
        return found
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != found.type:
        raise InputError(f"there is no device {str(found)!r} here", where=where, allowed=allowed)
    count = torch.accelerator.device_count()
    # torch wraps indices that are too large.
    wrapped = isinstance(device, str) and ":" in device and str(found) != device
    if wrapped or (found.index is not None and found.index >= count):
        raise InputError(
            f"there is no device {str(device)!r} here",
            where=where,
            allowed=f"{found.type}:0 to {found.type}:{count - 1}",
        )
    reason = unusable(found)
    if reason is not None:
        raise InputError(f"device {str(found)!r} cannot be used: {reason}", where=where, allowed=allowed)
    return found


def is_accelerator(device: AnyDevice) -> bool:
    """Return whether a device has its own memory, clock and allocator."""
    found = device if isinstance(device, torch.device) else torch.device(device)
    return found.type not in ("cpu", "meta")


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which a model computes: the accelerator, even if some parameters are on the host."""
    devices = [parameter.device for parameter in model.parameters()]
    return next(filter(is_accelerator, devices), devices[0])


def rank_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of a rank on this machine, and make it the current device of this process.

    Args:
        kind: ``cpu``, or an accelerator's type.
        local_rank: number of the rank on this machine.
    """
    if not is_accelerator(kind):
        return torch.device(kind)
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def require_devices(ranks: int, where: str) -> None:
    """Refuse more ranks than accelerators: each rank needs its own device.

    Raises:
        InputError: naming the number of devices.
    """
    count = torch.accelerator.device_count() if device_kind() != "cpu" else ranks
    if ranks > count:
        raise InputError(
            f"{ranks} ranks would share {count} {device_kind()} device{'s' * (count > 1)}",
            where=where,
            allowed=f"up to {count}, or the devices hidden from torch, to train on the processor",
        )


def collective_backend(kind: str) -> str:
    """Return the communication library of ranks on a type of device."""
    return str(torch.distributed.get_default_backend_for_device(kind))


def device_name(device: AnyDevice | None = None) -> str:
    """Return the name of an accelerator or processor.

    Args:
        device: the device; ``None`` for the default device of this machine.
    """
    found = torch.device(device_kind() if device is None else device)
    if is_accelerator(found):
        named = _function(found, "get_device_name")
        return found.type if named is None else str(named(found))
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def energy_library() -> str:
    """Return the vendor library that reads a GPU's energy."""
    return "amdsmi" if torch.version.hip else "nvml"


def driver(device: AnyDevice) -> str | None:
    """Return the versions of a device's driver and platform libraries, as far as they are known."""
    if not is_accelerator(device):
        return None
    modules = [path.read_text(errors="replace").split("\n")[0].strip() for path in _DRIVERS if path.is_file()]
    versions = [(name, getattr(torch.version, name, None)) for name in ("cuda", "hip", "xpu")]
    return "; ".join([*modules, *(f"{name} {version}" for name, version in versions if version)]) or None


# ---------------------------------------------------------------------------------------------- what a device can do


@functools.cache
def lacks(device: AnyDevice) -> Mapping[str, str]:
    """Return the abilities that a device lacks, each with its consequence for this package."""
    found = torch.device(device)
    if not is_accelerator(found):
        return MappingProxyType({})
    missing = {}
    if _function(found, "memory_stats") is None or _function(found, "reset_peak_memory_stats") is None:
        missing["peak statistics"] = "peaks are not measured, so no budget is watched"
    if _function(found, "mem_get_info") is None:
        missing["free memory"] = "there is no memory budget unless you set one"
    if _function(found, "Event") is None:
        missing["events"] = "units are timed by waiting for the device, which makes a timed step slower"
    if torch.bfloat16 not in autocast_dtypes(found):
        missing["bf16"] = "plans have no bf16"
    if torch.float16 not in autocast_dtypes(found):
        missing["fp16"] = "plans have no fp16"
    if not _is_traced(found):
        missing["traces of memory"] = "no job can be profiled on it, and attached runs are only observed"
    return MappingProxyType(missing)


def lacks_here() -> dict[str, str]:
    """Return the abilities that this machine's accelerator lacks, even if jobs therefore train on the processor."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return {} if found is None else dict(lacks(found))


def unusable(device: AnyDevice) -> str | None:
    """Return why jobs cannot be profiled on a device; ``None`` if they can, or while the user's own profiler runs."""
    if torch._C._autograd._profiler_enabled():
        return None
    try:
        return None if traces_memory(device) else "torch's profiler does not see its allocations"
    except RuntimeError as error:
        return f"nothing can be allocated on it ({first_line(error)})"


def _is_traced(device: torch.device) -> bool:
    """Return whether a device's allocations are traced; ``True`` if none can be made now, or a profiler runs."""
    if torch._C._autograd._profiler_enabled():
        # A second profiler within the first one would crash the process.
        return True
    try:
        return traces_memory(device)
    except RuntimeError:
        return True


@functools.cache
def traces_memory(device: AnyDevice) -> bool:
    """Return whether torch's profiler traces a device's allocations, by making one.

    Raises:
        RuntimeError: if no allocation can be made.
    """
    found = torch.device(device)
    if not is_accelerator(found):
        return True
    # Tracing the host suffices: the device's own tracing (CUPTI) need not be available.
    with profiled(memory=True) as seen, record_function("probe"):
        torch.empty(1024, device=found)
    results: Any = seen.kineto_results
    return any(event.name() == "[memory]" and event.device_type() != DeviceType.CPU for event in results.events())


@contextmanager
def profiled(*, memory: bool = False, operations: bool = True) -> Iterator[profile]:
    """Profile what the host does, without printing anything.

    Args:
        memory: whether allocations are traced.
        operations: whether operations are; without them, which are most events, the profile costs a third.
    """
    kind = profile if operations else _WithoutOperations
    with quiet_profiler(), kind(use_kineto=True, profile_memory=memory) as found:
        yield found


def quiet_profiler() -> AbstractContextManager[None]:
    """Return a context in which the library of torch's profiler prints nothing."""
    return variable("KINETO_LOG_LEVEL", os.environ.get("KINETO_LOG_LEVEL") or "99")


class _WithoutOperations(profile):
    """A profile of allocations and of what :class:`record_function` names."""

    def _start_trace(self) -> None:
        # As the other class does, which cannot be given scopes.
        self.entered = True
        _run_on_profiler_start()
        enable: Any = _enable_profiler
        enable(profile.config(self), self.kineto_activities, {RecordScope.USER_SCOPE})
        self.profiling_start_time_ns = time.perf_counter_ns()


def autocast_dtypes(device: AnyDevice) -> tuple[torch.dtype, ...]:
    """Return the reduced formats that autocast supports on a device."""
    found = torch.device(device)
    if not torch.amp.autocast_mode.is_autocast_available(found.type):
        return ()
    named = _function(found, "get_amp_supported_dtype")
    both = (torch.bfloat16, torch.float16)
    return both if named is None else tuple(dtype for dtype in both if dtype in named())


# ------------------------------------------------------------------------------------------- copies beside the work


def lacks_copies_beside(device: AnyDevice) -> str:
    """Return why a device cannot copy to and from the host while it computes; empty if it can."""
    found = torch.device(device)
    if not is_accelerator(found):
        return f"on {found.type} there is no memory of a device that it could free"
    if _function(found, "Stream") is None or _function(found, "Event") is None:
        return f"{found.type} has no streams, so it cannot copy while it computes"
    return ""


@functools.cache
def side_stream(device: torch.device) -> torch.Stream:
    """Return this process's stream of a device for copies beside the computation."""
    return torch.Stream(device=device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream of a device that this thread computes on."""
    return torch.accelerator.current_stream(device)


# ------------------------------------------------------------------------------------------------------------- time


def synchronize(device: AnyDevice) -> None:
    """Wait until a device has finished its work."""
    if is_accelerator(device):
        torch.accelerator.synchronize(torch.device(device))


def seconds_of(call: Callable[[], object], device: AnyDevice) -> float:
    """Return the seconds of a call, the device's work included."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def stamp_for(device: AnyDevice) -> Callable[[], Any]:
    """Return a function that records the time on a device: an event in its stream, or the clock after its work."""
    if not is_accelerator(device):
        return time.perf_counter
    event = _function(device, "Event")
    if event is None:
        return functools.partial(_settled_clock, torch.device(device))

    index = torch.device(device).index

    def stamp() -> Any:
        # An event belongs to the current device of the process.
        with nullcontext() if index is None else torch.accelerator.device_index(index):
            made = event(enable_timing=True)
            made.record()
        return made

    return stamp


def border_for(device: AnyDevice) -> Callable[[], Any]:
    """Return a function that records the time on a device without waiting for it: an event, or the host's clock."""
    return time.perf_counter if _function(device, "Event") is None else stamp_for(device)


def _settled_clock(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def seconds_between(stamps: Sequence[Any], device: AnyDevice) -> list[float]:
    """Return the seconds from the first stamp of :func:`stamp_for` to each stamp."""
    if not stamps:
        return []
    synchronize(device)
    first = stamps[0]
    if isinstance(first, float):
        return [stamp - first for stamp in stamps]
    return [first.elapsed_time(stamp) / 1e3 for stamp in stamps]


# ----------------------------------------------------------------------------------------------------------- memory


def allocated(device: AnyDevice) -> Allocated | None:
    """Return the statistics of a device's allocator; ``None`` if there is none, or it records no peaks."""
    statistics = _function(device, "memory_stats") if is_accelerator(device) else None
    if statistics is None:
        return None
    found = statistics(torch.device(device))
    return Allocated(
        current=int(found.get("allocated_bytes.all.current", 0)),
        peak=int(found.get("allocated_bytes.all.peak", 0)),
        reserved=int(found.get("reserved_bytes.all.current", 0)),
        reserved_peak=int(found.get("reserved_bytes.all.peak", 0)),
        retries=int(found.get("num_alloc_retries", 0)),
    )


def forget_peaks(device: AnyDevice) -> None:
    """Reset the allocator's peaks to what is allocated now."""
    reset = _function(device, "reset_peak_memory_stats") if is_accelerator(device) else None
    if reset is not None:
        reset(torch.device(device))


def free_bytes(device: AnyDevice) -> int | None:
    """Return the free memory of a device according to its driver; ``None`` if unknown."""
    info = _function(device, "mem_get_info") if is_accelerator(device) else None
    return None if info is None else int(info(torch.device(device))[0])


def total_bytes(device: AnyDevice) -> int | None:
    """Return the total memory of a device; ``None`` if unknown."""
    info = _function(device, "mem_get_info") if is_accelerator(device) else None
    return None if info is None else int(info(torch.device(device))[1])


def release(device: AnyDevice) -> None:
    """Free unused memory: first reference cycles, which may hold tensors, then the allocator's cache."""
    gc.collect()
    empty = _function(device, "empty_cache") if is_accelerator(device) else None
    if empty is not None:
        empty()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out, on any device or on the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY_SIGNS)


# ------------------------------------------------------------------------------------------------- random generators


def random_states() -> tuple[torch.Tensor, ...]:
    """Return the states of the random generators of all accelerators that this process uses."""
    module = _initialized_module()
    if module is None:
        return ()
    every = getattr(module, "get_rng_state_all", None)
    return tuple(every()) if every is not None else (module.get_rng_state(),)


def restore_random_states(states: Sequence[torch.Tensor]) -> None:
    """Set the random generators of all accelerators to states from :func:`random_states`."""
    module = _initialized_module() if states else None
    if module is None:
        return
    every = getattr(module, "set_rng_state_all", None)
    if every is not None:
        every(list(states))
    else:
        module.set_rng_state(states[0])


def _initialized_module() -> Any:
    """Return the accelerator's module; ``None`` before this process uses it, since a query would create a context."""
    found = torch.accelerator.current_accelerator(check_available=True)
    module = None if found is None else torch.get_device_module(found)
    began = getattr(module, "is_initialized", None)
    return module if module is not None and (began is None or began()) else None


# ------------------------------------------------------------------------------------------------ what "fp32" computes


def settings(device: AnyDevice) -> dict[str, Any]:
    """Return torch's settings that affect how an accelerator computes; nothing on a CPU."""
    if not is_accelerator(device):
        return {}
    return {
        "kind": torch.device(device).type,
        "fp32": fp32_arithmetic(device),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "convolutions": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
        "allocator": [os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")],
    }


def fp32_arithmetic(device: AnyDevice) -> dict[str, str]:
    """Return how products of fp32 numbers are computed on a device, by kind: ``fp32``, ``tf32`` or ``bf16``.

    Torch's default on NVIDIA GPUs is TF32, with 10 bits of mantissa, for convolutions only.
    """
    if torch.device(device).type == "cuda":
        switches: dict[str, Any] = {
            "matrix products": torch.backends.cuda.matmul,
            "convolutions": getattr(torch.backends.cudnn, "conv", None),
        }
    elif is_accelerator(device):
        return {"matrix products": _FP32, "convolutions": _FP32}
    else:
        onednn: Any = torch.backends.mkldnn
        switches = {"matrix products": onednn.matmul, "convolutions": onednn.conv}
    return {kind: _arithmetic(switch) for kind, switch in switches.items()}


def gpu_arithmetic() -> dict[str, str]:
    """Return :func:`fp32_arithmetic` for NVIDIA GPUs under torch's current settings, even if there is no GPU."""
    return fp32_arithmetic("cuda")


def _arithmetic(switch: Any) -> str:
    overall: Any = torch.backends
    for one in (switch, overall):
        try:
            chosen = getattr(one, "fp32_precision", "none")
        except RuntimeError:
            # An older switch was set, which torch does not allow to be mixed with this one.
            return _TF32 if getattr(one, "allow_tf32", False) else _FP32
        if chosen != "none":
            return _FP32 if chosen == "ieee" else str(chosen)
    return _FP32


def arithmetic_shown(fp32: Mapping[str, str]) -> str:
    """Format the result of :func:`fp32_arithmetic`, with convolutions only if they differ from matrix products."""
    products, convolutions = fp32["matrix products"], fp32["convolutions"]
    return products if products == convolutions else f"{products}, convolutions in {convolutions}"


@functools.cache
def lacks_float8(device: AnyDevice) -> str:
    """Return why a device has no fast products of 8-bit floating-point numbers; empty if it has.

    Source: PyTorch's conditions for ``torch._scaled_mm``: NVIDIA GPUs since Ada and Hopper. AMD's have other formats.
    """
    found = torch.device(device)
    if found.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return f"there are no fast products of 8-bit floating-point numbers on {found.type}"
    major, minor = torch.cuda.get_device_capability(found)
    if (major, minor) >= _FLOAT8_CAPABILITY:
        return ""
    return f"an NVIDIA GPU of compute capability {major}.{minor} has no fast products of 8-bit floating-point numbers"


def has_tf32(device: AnyDevice) -> bool:
    """Return whether a device can compute fp32 products in TF32: NVIDIA GPUs since Ampere can."""
    found = torch.device(device)
    if found.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(found) >= _TF32_CAPABILITY


def require_fp32_choice(choice: str | None, device: AnyDevice, *, where: str) -> None:
    """Refuse a choice between TF32 and fp32 on a device without TF32; ``None`` means no choice.

    Raises:
        InputError: naming the device and the devices that have TF32.
    """
    if choice is not None and not has_tf32(device):
        raise InputError(
            f"+{choice} chooses whether fp32 is computed in TF32, which {device_name(device)} cannot do",
            where=where,
            allowed="an NVIDIA GPU of compute capability 8.0 or higher; elsewhere without it",
        )


@contextmanager
def fp32_computed_in(choice: str | None) -> Iterator[None]:
    """Compute products of fp32 numbers, including convolutions, in one format while the body runs.

    Args:
        choice: ``fp32`` or ``tf32``; ``None`` leaves torch's settings as they are.
    """
    if choice is None:
        yield
        return
    cudnn: Any = torch.backends.cudnn
    older: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn)
    newer: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    allowed = [_readable(switch, "allow_tf32") for switch in older]
    precisions = [_readable(switch, "fp32_precision") for switch in newer]
    # Parts of torch read the older switches, and raise if they contradict the newer ones.
    try:
        for switch in older:
            switch.allow_tf32 = choice == _TF32
        for switch in newer:
            switch.fp32_precision = _FP32_CHOICES[choice]
        yield
    finally:
        for switch, was_allowed in zip(older, allowed, strict=True):
            if was_allowed is not None:
                switch.allow_tf32 = was_allowed
        for switch, precision in zip(newer, precisions, strict=True):
            if precision is not None:
                switch.fp32_precision = precision


def _readable(switch: Any, name: str) -> Any:
    """Return the value of one of torch's switches; ``None`` if the other kind of switch was set."""
    try:
        return getattr(switch, name)
    except RuntimeError:
        return None


def _function(device: AnyDevice, name: str) -> Any:
    """Return a function of a device's module; ``None`` if it has none of that name."""
    try:
        return getattr(torch.get_device_module(torch.device(device)), name, None)
    except RuntimeError:
        return None

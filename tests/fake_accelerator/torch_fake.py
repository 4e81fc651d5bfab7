"""The module `torch.fake`: the functions of torch.cuda for the fake accelerator. Every call is counted."""

from __future__ import annotations

import ctypes
import functools
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import library

_STATS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
_POOLS = ("all", "small_pool", "large_pool")
_METRICS = ("current", "peak", "allocated", "freed")
_COUNTS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")
_NAMES = (*(f"{s}.{p}.{m}" for s in _STATS for p in _POOLS for m in _METRICS), *_COUNTS)

#: Capabilities of the device; the controls change them.
lacking: frozenset[str] = frozenset()

_forked = False


def _in_child() -> None:
    global _forked
    _forked = is_initialized()


os.register_at_fork(after_in_child=_in_child)


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count the calls of a function that the library itself does not count."""

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        library.lib().fake_count(function.__name__.encode())
        return function(*args, **kwargs)

    return counted


def _index(of: Any) -> int:
    """Return the index of a device; there is only one."""
    index = of if isinstance(of, int) else torch.device(of).index if of is not None else 0
    if index not in (None, 0, -1):
        raise RuntimeError(f"fake error: invalid device ordinal {index}")
    return 0


# ---- the device


@_counted
def is_available() -> bool:
    return library.is_present()


@_counted
def device_count() -> int:
    return int(library.is_present())


@_counted
def is_initialized() -> bool:
    return bool(library.lib().fake_initialized())


def _is_in_bad_fork() -> bool:
    return _forked


def _lazy_init() -> None:
    if not library.is_present():
        raise RuntimeError("fake error: no device is present")
    if _forked:
        raise RuntimeError("Cannot re-initialize the fake device in forked subprocess")
    library.lib().fake_use()


init = _lazy_init


def __getattr__(name: str) -> Any:
    # torch.utils.checkpoint saves the generator state only if this is true.
    if name == "_initialized":
        return bool(library.lib().fake_initialized())
    raise AttributeError(f"torch.fake has no attribute {name!r}")


@_counted
def current_device() -> int:
    _lazy_init()
    return 0


@_counted
def set_device(device: Any) -> None:
    _index(device)


class device:
    """Context in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


device_of = device


@dataclass(frozen=True)
class _Properties:
    name: str
    total_memory: int
    multi_processor_count: int = 1
    major: int = 1
    minor: int = 0


@_counted
def get_device_name(device: Any = None) -> str:
    _index(device)
    return "Fake accelerator"


@_counted
def get_device_properties(device: Any = None) -> _Properties:
    _index(device)
    _lazy_init()
    return _Properties(name="Fake accelerator", total_memory=_room(count=False)[1])


def get_amp_supported_dtype() -> list[torch.dtype]:
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return [dtype for name, dtype in dtypes.items() if name not in lacking] + [torch.float32]


@_counted
def is_bf16_supported() -> bool:
    return "bf16" not in lacking


# ---- time


def synchronize(device: Any = None) -> None:
    _index(device)
    _lazy_init()
    if not library.lib().fake_synchronize():
        # Raise the library's own error at a point where Python can catch it.
        torch._C._accelerator_synchronizeDevice(0)


class Event:
    """Position in the device's queue; a wrapper, because torch's own event class cannot be subclassed."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        return torch.Event("fake", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


class Stream:
    """Stream of the device, based on torch's own class; all streams share one queue."""

    def __new__(cls, device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device("fake", _index(device)), priority=priority)


def current_stream(device: Any = None) -> torch.Stream:
    return torch._C._accelerator_getStream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    _index(device)
    return torch.Stream(stream_id=0, device_index=0, device_type=torch._C._autograd.DeviceType.PrivateUse1.value)


def set_stream(stream: torch.Stream) -> None:
    torch._C._accelerator_setStream(stream)


class stream:
    """Context in which a stream is the current one."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: list[torch.Stream] = []

    def __enter__(self) -> None:
        self._before.append(current_stream())
        if self.stream is not None:
            set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        set_stream(self._before.pop())


# ---- memory


def _stats(*, count: bool) -> list[int]:
    values = (ctypes.c_int64 * len(_NAMES))()
    read = library.lib().fake_memory_stats if count else library.lib().fake_peek_stats
    read(ctypes.addressof(values))
    return list(values)


def _stat(name: str) -> int:
    return _stats(count=False)[_NAMES.index(name)]


def _room(*, count: bool) -> tuple[int, int]:
    values = (ctypes.c_int64 * 2)()
    read = library.lib().fake_memory_info if count else library.lib().fake_peek_info
    read(ctypes.addressof(values))
    return values[0], values[1]


def memory_stats(device: Any = None) -> OrderedDict[str, int]:
    _index(device)
    stats = OrderedDict(zip(_NAMES, _stats(count=True), strict=True))
    if "peak statistics" in lacking:
        stats = OrderedDict((name, value) for name, value in stats.items() if not name.endswith(".peak"))
    return stats


@_counted
def memory_allocated(device: Any = None) -> int:
    _index(device)
    return _stat("allocated_bytes.all.current")


@_counted
def max_memory_allocated(device: Any = None) -> int:
    _index(device)
    return _stat("allocated_bytes.all.peak")


@_counted
def memory_reserved(device: Any = None) -> int:
    _index(device)
    return _stat("reserved_bytes.all.current")


@_counted
def max_memory_reserved(device: Any = None) -> int:
    _index(device)
    return _stat("reserved_bytes.all.peak")


def reset_peak_memory_stats(device: Any = None) -> None:
    _index(device)
    library.lib().fake_reset_peaks()


def reset_accumulated_memory_stats(device: Any = None) -> None:
    _index(device)
    library.lib().fake_reset_accumulated()


def empty_cache() -> None:
    library.lib().fake_empty_cache()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    _index(device)
    return _room(count=True)


# ---- random numbers

default_generators = (torch.ops.fake_accelerator.default_generator(),)


@_counted
def manual_seed(seed: int) -> None:
    default_generators[0].manual_seed(int(seed))


@_counted
def manual_seed_all(seed: int) -> None:
    default_generators[0].manual_seed(int(seed))


@_counted
def seed() -> None:
    default_generators[0].seed()


seed_all = seed


@_counted
def initial_seed() -> int:
    return default_generators[0].initial_seed()


@_counted
def get_rng_state(device: Any = "fake") -> torch.Tensor:
    _index(device)
    return default_generators[0].get_state()


@_counted
def get_rng_state_all() -> list[torch.Tensor]:
    return [default_generators[0].get_state()]


@_counted
def set_rng_state(new_state: torch.Tensor, device: Any = "fake") -> None:
    _index(device)
    default_generators[0].set_state(new_state)


@_counted
def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    (state,) = new_states
    default_generators[0].set_state(state)

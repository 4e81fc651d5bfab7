"""Controls of the fake accelerator: presence, memory, time, noise, failures and call counts."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import library, torch_fake

MIB = 2**20
#: Functions that read memory statistics of the device; a hot path calls none of them.
STATISTICS = (
    "memory_stats",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "reset_peak_memory_stats",
    "mem_get_info",
)
_LACKS = {
    "peak statistics": (1, ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats")),
    "events": (2, ("Event",)),
    "bf16": (4, ()),
    "fp16": (8, ()),
    "memory info": (16, ("mem_get_info",)),
    "statistics": (32, STATISTICS[:-1]),
}
_SMALL_KIB = 2048
_DEFAULTS = {
    "present": False,
    "capacity": 0,
    "others": 0,
    "fail_at": 0,
    "small_segments": _SMALL_KIB,
    "noise": False,
    "vanished": False,
}
_set: dict[str, Any] = {}


class _Calls(Mapping[str, int]):
    """Number of calls of each function of the device, by its name in torch.fake.

    Also counted: "kernels", "copies", "item", "allocations", "Event.record", "Event.query", "Event.synchronize" and
    "Event.elapsed_time". Calls through torch.accelerator count too.
    """

    def __getitem__(self, name: str) -> int:
        return library.lib().fake_counted(name.encode())

    def __iter__(self) -> Iterator[str]:
        size = library.lib().fake_count_names(None, 0)
        text = ctypes.create_string_buffer(size)
        library.lib().fake_count_names(text, size)
        return iter(text.value.decode().split())

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return repr(dict(self))

    def clear(self) -> None:
        """Reset all counts."""
        library.lib().fake_clear_counts()

    def statistics(self) -> int:
        """Return how often memory statistics were read or reset."""
        return sum(self[name] for name in STATISTICS)


calls = _Calls()


def present(on: bool = True) -> None:
    """Make the device present or absent; while it is absent, torch has no accelerator."""
    _set["present"] = on
    library.set_present(on)


# ---- memory


def capacity(num_bytes: int = 0) -> None:
    """Set the device's memory; 0 for the default of 16 GiB."""
    _set["capacity"] = num_bytes
    library.lib().fake_capacity(num_bytes)


def others(num_bytes: int = 0) -> None:
    """Pretend that another process holds a part of the device's memory."""
    _set["others"] = num_bytes
    library.lib().fake_others(num_bytes)


def fail_at(allocation: int = 1) -> None:
    """Make the n-th allocation from now on run out of memory, once; 0 for none."""
    _set["fail_at"] = allocation
    library.lib().fake_fail_at(allocation)


def small_segments(kib: int = _SMALL_KIB) -> None:
    """Set the size of the allocator's small segments; all its other sizes scale with it.

    Blocks of up to half this size share small segments; blocks of up to five times this size share segments of ten
    times this size, as with CUDA's 2 MiB.

    Raises:
        RuntimeError: If tensors are alive on the device, because their blocks have the old size.
    """
    _collect()
    if not library.lib().fake_small_segment(kib * 1024):
        raise RuntimeError("small_segments needs an empty device: tensors are alive on it")
    _set["small_segments"] = kib


def stats() -> dict[str, int]:
    """Return torch.fake.memory_stats() without counting the call."""
    return dict(zip(torch_fake._NAMES, torch_fake._stats(count=False), strict=True))


# ---- time


def clock() -> float:
    """Return the host's virtual time in seconds, to be used instead of `time.perf_counter`.

    Launching a kernel takes almost no host time; only a host that waits for the device sees its duration.
    """
    return library.lib().fake_clock() / 1e9


def host_work(seconds: float) -> None:
    """Let the host work for a while, in parallel with the device."""
    library.lib().fake_host_work(round(seconds * 1e9))


def speed(*, launch_s: float = 5e-7, kernel_s: float = 1e-5, byte_s: float = 1e-9, flop_s: float = 1e-11) -> None:
    """Set the seconds of a kernel: for its launch on the host, and for its bytes or operations on the device.

    An operation of a matrix product takes half as long in 16 bits.
    """
    library.lib().fake_speed(round(launch_s * 1e9), round(kernel_s * 1e9), byte_s * 1e9, flop_s * 1e9)


# ---- faults


def noise(on: bool = True) -> None:
    """Make gradients of products, convolutions and embeddings vary by one unit in the last place between calls.

    This has no effect under `torch.use_deterministic_algorithms(True)`.
    """
    _set["noise"] = on
    library.lib().fake_noise(on)


def vanish(on: bool = True) -> None:
    """Make every kernel, copy and synchronisation raise "fake error: device lost"."""
    _set["vanished"] = on
    library.lib().fake_lost(on)


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Remove capabilities from the device.

    Args:
        names: Any of "peak statistics", "statistics" (all of them), "events", "bf16", "fp16" and "memory info".
    """
    before = torch_fake.lacking
    functions = [f for name in names for f in _LACKS[name][1] if hasattr(torch_fake, f)]
    taken = {f: getattr(torch_fake, f) for f in functions}
    _lack(before | set(names))
    for function in taken:
        delattr(torch_fake, function)
    try:
        yield
    finally:
        for function, value in taken.items():
            setattr(torch_fake, function, value)
        _lack(before)


def _lack(names: frozenset[str]) -> None:
    torch_fake.lacking = frozenset(names)
    library.lib().fake_lack(sum(_LACKS[name][0] for name in names))


# ---- all controls


def _collect() -> None:
    """Free device memory that only reference cycles or ending threads keep alive; some need a second collection."""
    for attempt in range(8):
        if stats()["allocated_bytes.all.current"]:
            gc.collect()
            # Autograd's thread of a device may still hold the last tensors.
            time.sleep(0.05 * (attempt > 1))


def switched() -> dict[str, Any]:
    """Return the controls that differ from their defaults."""
    changed = {name: value for name, value in _set.items() if value != _DEFAULTS[name]}
    return changed | ({"without": sorted(torch_fake.lacking)} if torch_fake.lacking else {})


def reset() -> None:
    """Reset all controls but the presence, release cached memory and reset all counts."""
    vanish(False)
    noise(False)
    fail_at(0)
    others(0)
    capacity(0)
    speed()
    _collect()
    torch_fake.empty_cache()
    with contextlib.suppress(RuntimeError):
        small_segments()
    torch_fake.reset_peak_memory_stats()
    torch_fake.reset_accumulated_memory_stats()
    calls.clear()

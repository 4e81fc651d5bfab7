"""What a test sets and reads of the fake accelerator: presence, memory, time, noise, failures, and what was called."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import library, torch_fake

MIB = 2**20
#: Functions that read statistics of the device's memory; a hot path calls none of them.
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
    """How often each function of the device was called, by its name in torch.fake.

    Beside those: "kernels", "copies", "item", "allocations", "Event.record", "Event.query", "Event.synchronize" and
    "Event.elapsed_time". Calls that come by torch.accelerator count too.
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
        """Count anew."""
        library.lib().fake_clear_counts()

    def statistics(self) -> int:
        """Return how often statistics of the memory were read or reset."""
        return sum(self[name] for name in STATISTICS)


calls = _Calls()


def present(on: bool = True) -> None:
    """Let the device be there; while it is not, torch has no accelerator."""
    _set["present"] = on
    library.set_present(on)


# ---- memory


def capacity(num_bytes: int = 0) -> None:
    """Set the device's memory; 0 for the default of 16 GiB."""
    _set["capacity"] = num_bytes
    library.lib().fake_capacity(num_bytes)


def others(num_bytes: int = 0) -> None:
    """Let another process hold a part of the device's memory."""
    _set["others"] = num_bytes
    library.lib().fake_others(num_bytes)


def fail_at(allocation: int = 1) -> None:
    """Let the n-th allocation from now run out of memory, once; 0 for none."""
    _set["fail_at"] = allocation
    library.lib().fake_fail_at(allocation)


def small_segments(kib: int = _SMALL_KIB) -> None:
    """Set the size of the allocator's small segments, from which all its sizes follow as CUDA's follow from 2 MiB.

    Blocks up to half of it share small segments, those up to five times of it segments of ten times its size.

    Raises:
        RuntimeError: If tensors are alive on the device, whose blocks are cut by the old size.
    """
    _collect()
    if not library.lib().fake_small_segment(kib * 1024):
        raise RuntimeError("small_segments needs an empty device: tensors are alive on it")
    _set["small_segments"] = kib


def stats() -> dict[str, int]:
    """Return torch.fake.memory_stats() without counting it as a call."""
    return dict(zip(torch_fake._NAMES, torch_fake._stats(count=False), strict=True))


# ---- time


def clock() -> float:
    """Return the host's virtual time in seconds: in place of `time.perf_counter`.

    Launching a kernel costs the host next to nothing; its work is seen by who waits for the device.
    """
    return library.lib().fake_clock() / 1e9


def host_work(seconds: float) -> None:
    """Let the host work for a while, beside the device."""
    library.lib().fake_host_work(round(seconds * 1e9))


def speed(*, launch_s: float = 5e-7, kernel_s: float = 1e-5, byte_s: float = 1e-9, flop_s: float = 1e-11) -> None:
    """Set what a kernel costs: the host for its launch; the device for it, and for its bytes or its operations.

    An operation of a product takes half as long in 16 bits.
    """
    library.lib().fake_speed(round(launch_s * 1e9), round(kernel_s * 1e9), byte_s * 1e9, flop_s * 1e9)


# ---- what goes wrong


def noise(on: bool = True) -> None:
    """Let gradients of products, convolutions and embeddings differ by one unit in the last place from call to call.

    Not under `torch.use_deterministic_algorithms(True)`.
    """
    _set["noise"] = on
    library.lib().fake_noise(on)


def vanish(on: bool = True) -> None:
    """Let every kernel, copy and synchronisation raise "fake error: device lost"."""
    _set["vanished"] = on
    library.lib().fake_lost(on)


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Take capabilities away from the device.

    Args:
        names: Of "peak statistics", "statistics" (all of them), "events", "bf16", "fp16" and "memory info".
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


# ---- all of it


def _collect() -> None:
    """Free what only cycles keep on the device."""
    if stats()["allocated_bytes.all.current"]:
        gc.collect()


def switched() -> dict[str, Any]:
    """Return the knobs that are not as they were in the beginning."""
    changed = {name: value for name, value in _set.items() if value != _DEFAULTS[name]}
    return changed | ({"without": sorted(torch_fake.lacking)} if torch_fake.lacking else {})


def reset() -> None:
    """Set all knobs but the presence back, release what is cached and count anew."""
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

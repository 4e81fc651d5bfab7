"""Python interface of the compiled device, and its registration with torch."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char_p, c_double, c_int, c_int64, c_void_p
from pathlib import Path

import torch

_TYPES = {
    "fake_register": (None, []),
    "fake_present": (None, [c_int]),
    "fake_lost": (None, [c_int]),
    "fake_noise": (None, [c_int]),
    "fake_lack": (None, [c_int]),
    "fake_synchronize": (c_int, []),
    "fake_count": (None, [c_char_p]),
    "fake_counted": (c_int64, [c_char_p]),
    "fake_clear_counts": (None, []),
    "fake_count_names": (c_int64, [c_char_p, c_int64]),
    "fake_clock": (c_int64, []),
    "fake_host_work": (None, [c_int64]),
    "fake_speed": (None, [c_int64, c_int64, c_double, c_double]),
    "fake_memory_stats": (None, [c_void_p]),
    "fake_peek_stats": (None, [c_void_p]),
    "fake_memory_info": (None, [c_void_p]),
    "fake_peek_info": (None, [c_void_p]),
    "fake_reset_peaks": (None, []),
    "fake_reset_accumulated": (None, []),
    "fake_empty_cache": (None, []),
    "fake_use": (None, []),
    "fake_initialized": (c_int, []),
    "fake_capacity": (None, [c_int64]),
    "fake_others": (None, [c_int64]),
    "fake_fail_at": (None, [c_int64]),
    "fake_small_segment": (c_int, [c_int64]),
}

_opened: list[ctypes.CDLL] = []
_is_present = False


def loaded() -> bool:
    """Tell whether the device is registered in this process."""
    return bool(_opened)


def lib() -> ctypes.CDLL:
    """Return the device's functions."""
    return _opened[0]


def register(path: Path) -> None:
    """Register the device with torch, absent."""
    instead = torch._C._accelerator_getAccelerator()
    opened = ctypes.CDLL(str(path))
    for name, (result, arguments) in _TYPES.items():
        getattr(opened, name).restype = result
        getattr(opened, name).argtypes = arguments
    _opened.append(opened)
    torch.utils.rename_privateuse1_backend("fake")
    opened.fake_register()
    from . import torch_fake

    torch._register_device_module("fake", torch_fake)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _answer_while_absent(instead)


def set_present(on: bool) -> None:
    """Make the device appear or vanish in torch's API."""
    global _is_present
    _is_present = on
    lib().fake_present(on)


def is_present() -> bool:
    """Tell whether torch's API reports the device."""
    return _is_present


def _answer_while_absent(instead: torch.device | None) -> None:
    """Let torch report its previous accelerator while the fake one is absent.

    torch treats any registered device as the accelerator, present or not.
    """
    ask = torch._C._accelerator_getAccelerator

    @functools.wraps(ask)
    def answer() -> torch.device | None:
        return ask() if _is_present else instead

    torch._C._accelerator_getAccelerator = answer

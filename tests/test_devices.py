"""Tests of the default device."""

from __future__ import annotations

from autotune.mechanics.devices import device_kind, device_name


def test_device_of_this_machine_is_named() -> None:
    assert device_kind().isalpha()
    assert device_name().strip()

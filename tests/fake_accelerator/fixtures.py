"""The fixture that gives a test the fake accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import fake_accelerator


@pytest.fixture
def accelerator() -> Iterator[ModuleType]:
    """Switch the fake accelerator on for a test, and return its controls."""
    if (why := fake_accelerator.reason()) is not None:
        pytest.skip(why)
    fake = fake_accelerator.load()
    fake.reset()
    fake.present(True)
    yield fake
    fake.reset()
    fake.present(False)
    assert fake.switched() == {}
    assert not torch.accelerator.is_available()

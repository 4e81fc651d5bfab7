"""Settle what every test relies on: one thread, and properties without deadlines."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import settings

# Times differ by machine; what is asserted never depends on them.
settings.register_profile("autotune", deadline=None)
settings.load_profile("autotune")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Sum in one order on every machine, and leave the cores to others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    # Whatever a test interrupted, nothing of ours may leave the collector off.
    assert gc.isenabled()

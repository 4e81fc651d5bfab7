"""A job that records what happens inside its own training, whatever program trains it."""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path

import tiny_job
from torch import nn
from watching import Watcher

from autotune import Job

UNITS = ("blocks.0", "blocks.1", "blocks.2", "head")


def plain() -> nn.Module:
    """Return the network without dropout, so that training draws no random numbers."""
    network = tiny_job.Network()
    for block in network.blocks:
        block.dropout.p = 0.0
    return network


def watched() -> nn.Module:
    network = plain()
    watcher = Watcher(network, UNITS)
    # atexit: the end of the exported script is the only place to write the record.
    atexit.register(lambda: Path(os.environ["WATCHED"]).write_text(json.dumps(watcher.seen())))
    return network


def job() -> Job:
    return tiny_job.make(model=watched if "WATCHED" in os.environ else plain, clip_norm=0.7, max_steps=12)


def adaptive() -> Job:
    return tiny_job.make(
        model=watched if "WATCHED" in os.environ else plain, batching="adaptive", lr_rule="sqrt", max_steps=12
    )

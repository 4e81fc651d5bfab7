"""Tests of faults on one rank of an attached run: all ranks end as they would unattached."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import TESTS
from zoo_ranks import MODELS, STEPS, Case

MOMENTS = ("forward", "backward", "update")
# The ways in which one rank leaves, for each model.
LEAVING = dict(zip(MODELS, ("detach", "stop", "variable", "detach", "stop"), strict=True))


def run(cases: list[Case], folder: Path) -> list[list[dict[str, Any]]]:
    """Run cases, and return how each rank of each case ended."""
    (folder / "cases.json").write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(TESTS / "zoo_ranks.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "ended.json").read_text())  # type: ignore[no-any-return]


def cases_of(model: str) -> Iterator[Case]:
    """Yield cases of a model: unattached, with a slow rank, with one that leaves, and with each rank killed."""
    choice = random.Random(model)

    def faulty(fault: str, rank: int, *, attached: bool = True) -> Case:
        step, moment = choice.randrange(STEPS - 2), choice.choice(MOMENTS)
        return Case(model=model, attached=attached, fault=fault, rank=rank, step=step, moment=moment)

    yield Case(model=model, attached=False)
    yield faulty("slow", choice.randrange(2))
    # Without a run folder there is no file to stop the tuner.
    yield faulty(LEAVING[model], 0 if LEAVING[model] == "stop" else choice.randrange(2))
    yield faulty("killed", choice.randrange(2), attached=False)
    yield from (faulty("killed", rank) for rank in (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_fault_on_one_rank_changes_nothing_in_a_run(model: str, tmp_path: Path) -> None:
    cases = list(cases_of(model))
    found = run(cases, tmp_path)
    alone, survived = found[0], []
    for case, ended in zip(cases, found, strict=True):
        if case.fault == "killed":
            assert ended[case.rank]["code"] == -signal.SIGKILL
            survived.append(ended[1 - case.rank])
            continue
        assert [one["code"] for one in ended] == [0, 0], (case, ended)
        assert [one["bits"] for one in ended] == [one["bits"] for one in alone], case
        assert ended[case.rank]["injected"] == case.attached
        if case.attached:
            # If one rank leaves, both do.
            assert all((one["why"] is None) == (case.fault == "slow") for one in ended), (case, ended)
    without, *attached = survived
    assert without["code"] == 1
    for one in attached:
        assert (one["code"], one["error"]) == (without["code"], without["error"])
        # A blocking agreement would time out only after hours.
        assert one["after_s"] < 10 * max(without["after_s"], 1.0)

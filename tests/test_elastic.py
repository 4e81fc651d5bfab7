"""Tests of training on ranks whose number changes: by new starts, and by killed ranks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sharded_rank import make
from small_jobs import gpt_job

from autotune import EngineOptions, TorchEngine
from autotune.campaign.elastic_run import ElasticOptions, fastest, snapshots
from autotune.cost_model.solver import smallest
from autotune.errors import BudgetError, InputError
from autotune.mesh import Mesh
from autotune.profiling.profiler import ProfilerOptions, profile

STEPS, EVERY = 120, 5
JOB = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from sharded_rank import make
job = make(max_steps={STEPS})
"""
# A job whose units keep 300 MiB on each of two ranks. Once a file exists, their device has room for a third of it.
SMALL_DEVICE = """
import pathlib, weakref
import torch
from sharded_rank import make
from torch import nn

SAMPLE, ROOM = 1 << 17, 100 * 2**20
alive = []
class Folds(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SAMPLE))
    def forward(self, x):
        x = x * self.scale
        for _ in range(20):
            x = x.abs()
            alive.append(weakref.ref(x))
            alive[:] = [one for one in alive if one() is not None]
            if len(alive) * x.nbytes > ROOM and pathlib.Path("small").exists():
                raise torch.OutOfMemoryError("the device has 100 MiB")
        return x
def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, SAMPLE, generator=generator)
job = make(
    name="folds", model=lambda: nn.Sequential(*(Folds() for _ in range(8))), batches=batches, count=len, units=None,
    accumulation_choices=(1,),
    loss=lambda model, batch: model(batch).square().mean(), max_steps=20,
    evaluate=lambda model: float(model(next(batches(99))).detach().square().mean()),
)
"""


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "elastic.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(folder: Path) -> int:
    return max((row["steps"] for row in rows(folder) if row["event"] == "trained"), default=0)


@contextlib.contextmanager
def launched(folder: Path, ranks: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start ranks; no process of theirs outlives the body."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("--max-restarts", "99", "-m", "autotune", "elastic", "job.py:job", "--folder", "run", "--json"),
        *("--save-every", str(EVERY), *options),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # A pipe that nobody reads would fill up and stop the launcher.
    with (
        (folder / "told").open("w") as told,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=told, text=True
        ) as started,
    ):
        try:
            yield started
        finally:
            started.send_signal(signal.SIGTERM)
            try:
                started.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                started.kill()


def wait_for(started: subprocess.Popen[str], folder: Path, steps: int, starts: int = 1) -> None:
    def starts_of() -> int:
        return sum(row["event"] == "started" for row in rows(folder))

    deadline = time.monotonic() + 240
    while (steps_of(folder) < steps or starts_of() < starts) and started.poll() is None:
        assert time.monotonic() < deadline, rows(folder)[-3:]
        time.sleep(0.1)


def result(started: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    out, _ = started.communicate(timeout=800)
    assert started.returncode == 0, (folder / "told").read_text()[-2000:]
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1]) if out.count("\n") < 2 else json.loads(out)
    return found


def undisturbed() -> tuple[list[float], float]:
    """Return the losses of the same windows in one process without plans, and the metric."""
    engine = TorchEngine(make(max_steps=STEPS), options=EngineOptions(statistics_every=None))
    losses = [engine.run(EVERY).loss for _ in range(STEPS // EVERY)]
    return [loss for loss in losses if loss is not None], engine.evaluate()


def assert_same_run(folder: Path, found: dict[str, Any]) -> None:
    losses, metric = undisturbed()
    told = {row["steps"]: row["loss"] for row in rows(folder) if row["event"] == "trained"}
    assert [told[EVERY * (number + 1)] for number in range(len(losses))] == pytest.approx(losses, rel=1e-5)
    assert found["metric"] == pytest.approx(metric, rel=1e-5)
    assert found["steps"] == STEPS


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose working folder is a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
    return found


def workers_of(started: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    return [int(child) for child in children]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_run_on_two_four_three_and_two_ranks_is_the_undisturbed_one(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    for ranks, until in ((2, 30), (4, 60), (3, 90)):
        with launched(tmp_path, ranks) as started:
            wait_for(started, tmp_path, until)
    with launched(tmp_path, 2) as started:
        found = result(started, tmp_path)
    assert_same_run(tmp_path, found)
    begun = [row for row in rows(tmp_path) if row["event"] == "started"]
    assert [row["ranks"] for row in begun] == [2, 4, 3, 2]
    assert [row["mesh"] for row in begun] == ["shard=2", "shard=4", "shard=3", "shard=2"]
    # Each start loses at most the steps since the last snapshot.
    seen = [row["steps"] for row in rows(tmp_path) if row["event"] == "trained"]
    assert sorted(set(seen)) == list(range(EVERY, STEPS + 1, EVERY))
    assert len(snapshots(tmp_path / "run")) == 2
    assert processes_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_ranks_cost_the_steps_since_the_last_snapshot(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    kills, chance = int(os.environ.get("AUTOTUNE_TEST_KILLS", "2")), random.Random(3)
    with launched(tmp_path, 2) as started:
        for number in range(kills):
            wait_for(started, tmp_path, EVERY + number * (STEPS - 2 * EVERY) // kills, starts=number + 1)
            time.sleep(chance.random() * 0.5)
            if started.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(workers_of(started)), signal.SIGKILL)
        found = result(started, tmp_path)
    assert_same_run(tmp_path, found)
    lost = [later["steps"] for later in rows(tmp_path) if later["event"] == "started"]
    assert len(lost) == kills + 1
    assert processes_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_where_memory_runs_out_all_ranks_go_on_under_a_leaner_plan(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB.split("from")[0] + SMALL_DEVICE)
    with launched(tmp_path, 2) as started:
        wait_for(started, tmp_path, EVERY)
        (tmp_path / "small").touch()
        found = result(started, tmp_path)
    begun = [row["plan"]["storage"] for row in rows(tmp_path) if row["event"] == "started"]
    kept = [sum(not storage.endswith("recompute") for storage in plan.values()) for plan in begun]
    assert found["steps"] == 20
    # Each start keeps less, until the plan fits.
    assert kept[0] == 8
    assert kept[-1] <= 2
    assert kept == sorted(kept, reverse=True)
    assert processes_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_cannot_be_trained_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    for options, said in (
        (("--memory-budget", "1KiB"), "but the smallest plan"),
        (("--memory-budget", "60%"), "memory budget is '60%' (allowed: a size, such as 20GiB)"),
        (("--mesh", "pp=2"), "mesh is 'pp=2' (allowed: shard, dp, all)"),
    ):
        command = [sys.executable, "-m", "autotune", "elastic", "job.py:job", "--folder", "run", *options]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 2, ended.stderr
        assert said in ended.stderr
        assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_error_that_no_new_start_removes_stops_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    with launched(tmp_path, 2, "--memory-budget", "1KiB") as started:
        started.communicate(timeout=300)
    assert started.returncode != 0
    assert 1 <= (tmp_path / "told").read_text().count("but the smallest plan") <= 2
    assert processes_in(tmp_path) == []


def test_the_fastest_layout_that_fits_is_chosen_and_leaner_ones_after_memory_ran_out() -> None:
    measured = profile(gpt_job(), device_name="here", options=ProfilerOptions.lean())
    slower = measured.__class__.from_json(measured.to_json(), where="copy")
    meshes = [(Mesh(shard=2), measured), (Mesh(dp=2), slower)]
    mesh, free = fastest(meshes, None, [])
    assert mesh == Mesh(shard=2)
    least = smallest(measured).peak_bytes
    _, leaner = fastest(meshes, None, [float(free.peak_bytes)])
    assert least < free.peak_bytes
    assert leaner.peak_bytes <= max(0.8 * free.peak_bytes, 1.01 * least)
    # Then the leanest plan is tried, and nothing after that.
    _, leanest = fastest(meshes, None, [1.1 * least])
    assert leanest.peak_bytes <= 1.01 * least
    with pytest.raises(BudgetError, match="but the smallest plan"):
        fastest(meshes, None, [float(least)])
    for failed in ([], [1.1 * least]):
        with pytest.raises(BudgetError, match="but the smallest plan"):
            fastest(meshes, 1, failed)
    with pytest.raises(InputError, match="mesh is 'tp'"):
        ElasticOptions(mesh="tp")
    assert [str(one) for one in ElasticOptions(mesh="all").meshes(4)] == ["dp=4", "dp=2,shard=2", "shard=4"]


def test_unfinished_snapshots_do_not_count(tmp_path: Path) -> None:
    for name in ("state-000000010", "state-000000020.part", "state-000000005", "state-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "state-000000030").touch()
    assert [path.name for path in snapshots(tmp_path)] == ["state-000000010", "state-000000005"]

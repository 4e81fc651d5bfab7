"""Tests on a real two-node Ray cluster on this machine, with a node that is killed during a run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import failing_job
import leftovers
import pytest
from known_problem import distinct_plans
from test_train import LONG, recipe_file

from autotune import ClusterOptions, InputError, commands
from autotune.engines.cluster_pool import cluster_pool
from autotune.engines.pool_engine import PoolEngine
from autotune.engines.ray_cluster import places
from autotune.engines.torch_engine import EngineOptions
from autotune.measurement import Failure
from autotune.records.run_directory import RunDirectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any((Path(p) / "ray").is_dir() for p in sys.path), reason="ray is not installed"),
]
TESTS = Path(__file__).parent
TINY = str(TESTS / "tiny_job.py")
OPTIONS = EngineOptions(discard_steps=1)
PROGRAM = [sys.executable, "-m", "autotune.cli.main"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a cluster of two nodes, with one core each."""
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "3")
    monkeypatch.setenv("RAY_health_check_initial_delay_ms", "0")
    from ray.cluster_utils import Cluster

    one = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**one, "include_dashboard": False})
    cluster.add_node(**one)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def processes() -> set[str]:
    """Return the running processes of this project's engines and of Ray."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "autotune.engines.worker_main" in words or "raylet" in words:
                found.add(f"{path.parent.name} {words[:80]}")
    return found


def windows(engine: PoolEngine, count: int) -> list[Any]:
    plans = distinct_plans(engine.space, count)
    for plan in plans:
        engine.prepare(plan, 3)
    found = []
    for plan in plans:
        engine.apply(plan)
        found.append(engine.run(3))
    return found


def test_killed_node_loses_no_window(nodes: Any) -> None:
    engine = cluster_pool(ClusterOptions(address=nodes.address), TINY, seed=0, measuring=OPTIONS)
    assert engine.workers == 2
    second = nodes.list_all_nodes()[-1]
    killer = threading.Timer(1.0, lambda: nodes.remove_node(second, allow_graceful=False))
    killer.start()
    try:
        found = windows(engine, 80)
    finally:
        killer.join()
    assert engine.workers == 1
    assert [window.failure for window in found] == [None] * 80
    assert all(window.seconds_per_step > 0 and window.peak_bytes > 0 for window in found)
    # The call still returns if the other worker is lost as well.
    engine.apply(engine.space.leanest())
    assert engine.run(3).failure is None
    engine.close()


def test_each_worker_has_its_own_cores() -> None:
    node = {"Alive": True, "NodeManagerHostname": "here", "Resources": {"CPU": 4.0}}
    three = [{**node, "NodeID": "a"}, {**node, "NodeID": "b"}, {**node, "NodeID": "c", "Alive": False}]
    found = [(place.node, place.cores) for place in places(three, ClusterOptions(address="auto", cores=2))]
    assert found == [("a", (0, 1)), ("a", (2, 3)), ("b", (4, 5)), ("b", (6, 7))]
    devices = [{**node, "NodeID": "d", "Resources": {"CPU": 8.0, "GPU": 2.0}}]
    found = [(place.cores, place.gpus) for place in places(devices, ClusterOptions(address="auto"))]
    assert found == [((0, 1, 2, 3), 1), ((4, 5, 6, 7), 1)]


def test_job_that_kills_its_process_fails_its_window_and_keeps_the_worker(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv(failing_job.FAILURE, "kill")
    monkeypatch.setenv(failing_job.AT, "5")
    nodes = request.getfixturevalue("nodes")
    engine = cluster_pool(
        ClusterOptions(address=nodes.address), str(TESTS / "failing_job.py"), seed=0, measuring=OPTIONS
    )
    # Each child's fifth step is its last.
    found = windows(engine, 6)
    assert engine.workers == 2
    engine.close()
    failures = [window.failure for window in found]
    assert failures.count(Failure.CRASHED) >= 2
    assert set(failures) == {None, Failure.CRASHED}
    assert all("SIGKILL" in window.failure_detail for window in found if window.failure)


def test_job_that_no_worker_can_load_is_one_line(nodes: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        cluster_pool(ClusterOptions(address=nodes.address), str(tmp_path / "nowhere.py"), seed=0, measuring=OPTIONS)


OWN = """
import os, signal, sys
import leftovers
from autotune import ClusterOptions
from autotune.engines.cluster_pool import cluster_pool
from autotune.engines.torch_engine import EngineOptions

engine = cluster_pool(ClusterOptions(address="local:1"), sys.argv[1], seed=0, measuring=EngineOptions(discard_steps=1))
assert engine.run(3).failure is None
here = os.getpid()
print(sorted(leftovers.listening({here, *leftovers.descendants(here)})), flush=True)
if sys.argv[2] == "kill":
    os.kill(here, signal.SIGKILL)
engine.close()
"""


@pytest.mark.parametrize("end", ["close", "kill"])
def test_local_cluster_listens_on_loopback_and_leaves_nothing(end: str, tmp_path: Path) -> None:
    before = {path.name for path in Path("/tmp").glob("autotune-scratch-*")}
    # Files in the working directory must not replace libraries of its workers.
    for name in ("csv", "json", "numpy", "torch", "pydantic", "gymnasium"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    done = subprocess.run(
        [sys.executable, "-P", "-c", OWN, TINY, end],
        env={**ENVIRONMENT, leftovers.MARK: str(tmp_path), "TMPDIR": "/tmp"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if end == "close" else -signal.SIGKILL), done.stderr
    assert done.stdout == "['127.0.0.1']\n"
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    leftovers.wait_until(
        lambda: {path.name for path in Path("/tmp").glob("autotune-scratch-*")} <= before, "a folder is left"
    )
    # Ray's agents take a minute to notice that the rest of the cluster is gone.
    leftovers.wait_until(lambda: not leftovers.processes(str(tmp_path)), "a process lives on", timeout_s=150)


def test_unreachable_cluster_is_one_line(tmp_path: Path) -> None:
    command = ["tune", TINY, "--method", "random", "--runs-dir", str(tmp_path), "--cluster"]
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "auto"):
        done = subprocess.run(
            [*PROGRAM, *command, address], env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        said = [line for line in done.stderr.splitlines() if line.startswith("autotune: ")]
        assert (done.returncode, len(said)) == (2, 1), done.stderr
        assert "the cluster does not answer" in said[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["random", "optuna"])
def test_killed_tuning_on_workers_is_resumed(method: str, tmp_path: Path) -> None:
    before = processes()
    command = ["tune", TINY, "--method", method, "--steps", "120", "--cluster", "local:2", "--runs-dir", str(tmp_path)]
    with subprocess.Popen([*PROGRAM, *command], env=ENVIRONMENT, stderr=subprocess.DEVNULL) as begun:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            journals = list(tmp_path.glob("*-tune-*/journal.jsonl"))
            if journals and len(journals[0].read_text().splitlines()) > 8:
                break
            time.sleep(0.05)
        begun.send_signal(signal.SIGKILL)
    (folder,) = (path.parent for path in journals)
    done = subprocess.run(
        [*PROGRAM, "resume", str(folder), "--job", TINY, "--cluster", "local:2", "--json"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    trials = RunDirectory(folder).lines("trials.jsonl")
    searched = [json.dumps(trial["plan"], sort_keys=True) for trial in trials if not trial["final"]]
    assert len(set(searched)) == len(searched) >= 15
    assert document["measured"]["cost"] > 0
    if method == "random":
        serial = commands.tune(TINY, method, steps=120, runs_dir=tmp_path / "serial")
        rows = RunDirectory(Path(serial["run"])).lines("trials.jsonl")
        assert searched == [json.dumps(trial["plan"], sort_keys=True) for trial in rows if not trial["final"]]
    until = time.monotonic() + 60
    while processes() - before and time.monotonic() < until:
        time.sleep(0.5)
    assert not processes() - before


def test_training_on_a_cluster_gives_the_same_weights_as_locally(
    nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = recipe_file(tmp_path, LONG)
    here = commands.train(commands.TrainRequest(recipe=recipe), runs_dir=tmp_path / "here")
    second = nodes.list_all_nodes()[-1]
    found: dict[str, Any] = {}

    def lose_a_node() -> None:
        """Remove a node once both seeds are training."""
        until = time.monotonic() + 600
        while time.monotonic() < until and len(list((tmp_path / "there").glob("*/seed-*.checkpoint"))) < 2:
            time.sleep(0.05)
        found["under_way"] = len(list((tmp_path / "there").glob("*/seed-*.checkpoint")))
        nodes.remove_node(second, allow_graceful=False)

    losing = threading.Thread(target=lose_a_node)
    losing.start()
    request = commands.TrainRequest(recipe=recipe, cluster=ClusterOptions(address=nodes.address))
    there = commands.train(request, runs_dir=tmp_path / "there")
    losing.join()
    assert found["under_way"] == 2
    assert "continues on another machine" in caplog.text
    assert there["won_percent_mean"] == here["won_percent_mean"]
    for seed in (4, 9):
        (own,), (other,) = (list((tmp_path / name).glob(f"*/seed-{seed}.safetensors")) for name in ("here", "there"))
        assert own.read_bytes() == other.read_bytes()

"""Settle what every test relies on: one thread, the useful precisions, and properties without deadlines."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from fake_accelerator.fixtures import accelerator  # noqa: F401
from hypothesis import settings

from autotune.mechanics import known_precisions, processor_wait
from autotune.records import to_mlflow

# Tests are of the CPU, whose sums repeat bit for bit, and of a simulated accelerator; a real one is hidden unless this
# variable is set.
if "AUTOTUNE_TEST_ACCELERATOR" not in os.environ:
    os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")

# Machines differ in what they compute fast. Every process of a test inherits this; tests of the measurement remove it.
_FAST = "fp32,bf16,fp16" if torch.accelerator.is_available() else "fp32,bf16"
os.environ.setdefault(known_precisions.PRECISIONS_VARIABLE, _FAST)

# Threads that wait for each other keep the cores busy: with two, a child process takes up to three times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# To learn which vector instructions work, torch's compiler would compile ten programs; code without them will do.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Other tests run beside each one, so that a busy machine is accepted; tests of this remove it.
os.environ.setdefault(processor_wait.BUSY_VARIABLE, "1")

# Continuous integration has time for a quarter of the slow tests each day, and a sixth of the zoo's, which are many and
# alike; `make test-all` runs all of them. Worker processes inherit the day, so that midnight does not divide them.
_DAY = int(os.environ.setdefault("SLOW_DAY", str(datetime.now(UTC).toordinal())))
# On a slow machine it has not even that: slow tests that have not begun by then are left to another day.
_MOST_MINUTES = 60
_ZOO = ("test_zoo.py", "test_zoo_faults.py", "test_zoo_traces.py")

# Times differ by machine; what is asserted never depends on them.
settings.register_profile("autotune", deadline=None)
settings.load_profile("autotune")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest tests first, and leave out the slow tests of other days, unless tests are named by themselves."""
    _leave_to_slow(items)
    items.sort(key=_is_short)
    if "SLOW_ALL" in os.environ or any("::" in argument for argument in config.args):
        return
    others = {item for item in items if item.get_closest_marker("slow") and not _is_due(item)}
    if others:
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


def _leave_to_slow(items: list[pytest.Item]) -> None:
    """Mark as slow all but the first few parameters of a test that is marked with their number."""
    seen: Counter[str] = Counter()
    for item in items:
        some = item.get_closest_marker("some")
        if some and not item.get_closest_marker("slow"):
            name = item.nodeid.partition("[")[0]
            seen[name] += 1
            if seen[name] > some.args[0]:
                item.add_marker(pytest.mark.slow)


def _is_short(item: pytest.Item) -> bool:
    limits = [mark.args[0] for mark in item.iter_markers("timeout") if mark.args]
    return max(limits, default=0) < 1000


def _is_due(item: pytest.Item) -> bool:
    days = 6 if item.path.name in _ZOO else 4
    return zlib.crc32(item.name.encode()) % days == _DAY % days


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    begun = os.environ.get("CI_BEGUN")
    if begun and item.get_closest_marker("slow") and time.time() - float(begun) > 60 * _MOST_MINUTES:
        pytest.skip(f"this machine is slow: {_MOST_MINUTES} minutes have passed")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Sum in one order on every machine, and leave the cores to others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    # Whatever a test interrupted, nothing of ours may leave the collector off.
    assert gc.isenabled()


@pytest.fixture(autouse=True, scope="module")
def _collect_only_what_the_module_makes() -> None:
    """Leave imported libraries out of each later garbage collection: with them, one takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _tables_made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let MLflow make its tables once in this process, and copy them into further databases: they take seconds."""
    made, make = tmp_path_factory.mktemp("tables") / "mlflow.db", to_mlflow._make_tables

    def copy(database: Path) -> None:
        if not made.exists():
            make(made)
        shutil.copyfile(made, database)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(to_mlflow, "_make_tables", copy)
        yield


@pytest.fixture
def measuring_precisions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Let a test measure which precisions this machine computes fast; return a function to measure again."""
    monkeypatch.delenv(known_precisions.PRECISIONS_VARIABLE, raising=False)
    known_precisions.forget()
    yield known_precisions.forget
    known_precisions.forget()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the campaigns that reports are tested on, which all workers share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "campaigns"
    folder.mkdir(exist_ok=True)
    return folder


def _made_once(runs: Path, name: str, make: Callable[[Path], Path]) -> Path:
    """Return the run directory that the first worker to ask for it makes."""
    known = runs.with_name(f"campaign-{name}")
    with runs.with_name(f"{known.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not known.exists():
            known.write_text(str(make(runs)))
    return Path(known.read_text())


@pytest.fixture(scope="session")
def compared(runs: Path) -> Path:
    """Return the run directory of a comparison; nothing may be changed in it."""
    import campaigns

    return _made_once(runs, "compared", campaigns.compare_all)


@pytest.fixture(scope="session")
def tuned(runs: Path, compared: Path) -> Path:
    """Return the run directory of a tuning with a profile; nothing may be changed in it."""
    import campaigns

    return _made_once(runs, "tuned", campaigns.tune_one)

"""Tests of damaged and forged documents: each is rejected in one line or does no harm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import documents
import pytest
import record
import uses
from effort import EFFORT

HERE = Path(__file__).resolve().parent
# Forbidden outcomes. The example of a finding gives the number of the mutant and the place in the package.
HARM = ("foreign", "breach", "several lines", "long", "slow")
SHORT = 15


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Return a folder outside pytest's own, in memory if possible, because every write waits for the disk."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    # The worker runs as an unprivileged user and must reach its own folder in it.
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def put_to_use(scratch: Path, names: list[str], *, seed: int, count: int, timeout_s: float) -> dict[str, Any]:
    """Try mutants in a separate process, and return its findings."""
    folder = scratch / f"worker-{seed}"
    folder.mkdir()
    paths = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "worker.py"), str(folder), str(seed), str(count), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout_s, cwd=scratch)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def require_harmless(found: dict[str, Any], names: list[str]) -> Counter[str]:
    """Check the outcomes of the mutants of some uses, and return their number."""
    assert {name: said for name, said in found["pristine"].items() if said} == {}
    totals: Counter[str] = Counter()
    harm = {}
    for name in names:
        counts, examples = found["uses"][name]["counts"], found["uses"][name]["examples"]
        totals.update({key: number for key, number in counts.items() if " at " not in key})
        seen = {kind: examples[kind] for kind in HARM if counts.get(kind)}
        if seen:
            harm[name] = seen
    assert harm == {}, json.dumps(harm, indent=2)
    assert totals["mutants"] == totals["refused"] + totals["accepted"] + totals["trained"]
    return totals


# A third of the uses that take a few milliseconds; all run in `make test-slow`.
QUICK = [name for name, use in uses.USES.items() if use.share >= 0.1][::3]


def test_a_few_mutants_of_every_document_do_no_harm(scratch: Path) -> None:
    found = put_to_use(scratch, QUICK, seed=0, count=SHORT, timeout_s=250)
    totals = require_harmless(found, QUICK)
    assert totals["accepted"] > 16


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_mutants_of_every_document_do_no_harm(scratch: Path) -> None:
    names = list(uses.USES)
    halves = [names[::2], names[1::2]]
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(put_to_use, scratch, half, seed=seed, count=int(2_000 * EFFORT), timeout_s=3000)
            for seed, half in enumerate(halves, 1)
        ]
        totals = sum((require_harmless(run.result(), half) for run, half in zip(runs, halves, strict=True)), Counter())
    print(dict(totals))  # noqa: T201 - shown by `pytest -s`, for who wants the counts
    assert totals["mutants"] >= 40_000 * EFFORT
    assert totals["accepted"] >= 8_000 * EFFORT


def test_same_seed_gives_the_same_mutants() -> None:
    data = (record.SPECIMENS / "tune" / "config.json").read_bytes()
    first, again = documents.mutants(data, "json", 3), documents.mutants(data, "json", 3)
    drawn = [next(first) for _ in range(50)]
    assert drawn == [next(again) for _ in range(50)]
    assert len(set(drawn)) > 40
    other = documents.mutants(data, "json", 4)
    assert drawn != [next(other) for _ in range(50)]


def test_specimens_are_small_and_do_not_identify_the_recording_machine() -> None:
    files = [path for path in record.SPECIMENS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    for path in files:
        if path.suffix != ".safetensors":
            text = path.read_text()
            assert str(Path.home()) + "/" not in text
            assert "/tmp" not in text, path


def test_guard_reports_forbidden_actions_and_blocks_writes(scratch: Path) -> None:
    """The worker's monitor works: it is told of everything that a mutant could do."""
    code = (
        "import sys, os, socket, subprocess; from pathlib import Path; import worker\n"
        "scratch = Path(sys.argv[1]); worker._enter(scratch); watch = worker.Watch(); watch.begin(scratch)\n"
        "open(scratch / 'elsewhere' / 'secret.txt').close()\n"
        "try: open(scratch.parent / 'new.txt', 'w')\n"
        "except PermissionError: print('refused')\n"
        "try: socket.create_connection(('127.0.0.1', 9), 1)\n"
        "except OSError: pass\n"
        "subprocess.run(['true'])\n"
        "sys.path.append(str(scratch / 'elsewhere'))\n"
        "try: import fuzz_bait\n"
        "except SystemExit: print('ran')\n"
        "print(watch.breaches)\n"
    )
    (scratch / "own").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), str(HERE)])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(scratch / "own")], capture_output=True, text=True, env=environment
    )
    assert done.stdout.startswith("refused\nran\n"), done.stderr
    for breach in ("open of", "open for writing outside", "socket.", "subprocess.Popen", "import of fuzz_bait"):
        assert breach in done.stdout
    assert not (scratch / "new.txt").exists()

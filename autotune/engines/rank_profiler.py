"""Profile a job on several ranks: each is a process of its own, started by ``torchrun``, and profiles its share.

All ranks take the same steps in the same order; the first one's profile is kept, with the most that any rank holds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.engines.isolated_engine import RankOptions
from autotune.engines.processes import (
    RAISED,
    command,
    die_with_parent,
    last_words,
    leave,
    python_path,
    rank_that_raised,
)
from autotune.engines.profiler import ProfilerOptions, profile
from autotune.engines.watched import WatchedRanks
from autotune.errors import InputError, JobError
from autotune.files import read_json, write_json
from autotune.mechanics.devices import device_kind
from autotune.physics.profile import Profile

_ASKED, _DONE, _PROFILE, _REFUSED = "asked.json", "done.json", "profile.json", "refused.json"
# Seconds between two looks at how far the ranks are, and those in which they may end by themselves.
_POLL_S, _GRACE_S = 0.5, 5.0


def profile_on_ranks(
    job: str,
    ranks: RankOptions,
    *,
    device_name: str,
    fingerprint: str,
    options: ProfilerOptions | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Profile:
    """Profile a job as several ranks train it together, through DeepSpeed.

    Args:
        job: the job's reference; a job itself crosses no process border.
        ranks: how many, at which ZeRO stage.
        device_name: what the device is called in the profile.
        fingerprint: the profile's.
        options: how much it may cost.
        on_progress: is told of the share that is done.

    Raises:
        InputError: if DeepSpeed is missing, or its configuration at odds with the job.
        JobError: if a rank does not survive it.
    """
    with tempfile.TemporaryDirectory(prefix="autotune-ranks-") as name:
        folder = Path(name)
        asked = {
            "job": job,
            "ranks": asdict(ranks),
            "device": device_kind(ranks.count),
            "device_name": device_name,
            "fingerprint": fingerprint,
            "options": asdict(options or ProfilerOptions()),
            "path": [entry for entry in sys.path if entry],
        }
        write_json(folder / _ASKED, asked)
        output = folder / "output.txt"
        code = _run(folder, ranks.count, output, on_progress or (lambda _: None))
        if (folder / _REFUSED).exists():
            raise InputError.from_json(read_json(folder / _REFUSED))
        if code or not (folder / _PROFILE).exists():
            raised = rank_that_raised(output)
            how = f"exit code {code}{last_words(output)}" if raised is None else f"{raised[0]}: {raised[1]}"
            raise JobError(f"profiling it on {ranks.count} ranks ends with {how}", where=job)
        return Profile.from_json(read_json(folder / _PROFILE), where=job)


def _run(folder: Path, count: int, output: Path, on_progress: Callable[[float], None]) -> int:
    """Run the ranks to their end, and return the launcher's exit code."""
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [*command("autotune.engines.rank_profiler", count), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_S)
            with contextlib.suppress(OSError, ValueError):
                on_progress(float(json.loads((folder / _DONE).read_text())))
    finally:
        # The ranks lead groups of their own, and end with their launcher.
        for end in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, end)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)


def main(arguments: list[str]) -> None:
    """Be a rank: profile what the folder that is the first argument asks for."""
    die_with_parent()
    folder, rank = Path(arguments[0]), int(os.environ["RANK"])
    try:
        found = _profiled(read_json(folder / _ASKED), folder, rank)
    except InputError as error:
        if rank == 0 and not isinstance(error, JobError):
            write_json(folder / _REFUSED, error.to_json())
        _say(rank, error)
        leave(1)
    except Exception as error:  # noqa: BLE001 - whatever the job raises, the parent names
        _say(rank, error)
        leave(1)
    if rank == 0:
        write_json(folder / _PROFILE, found.to_json())
    leave(0)


def _profiled(asked: dict[str, Any], folder: Path, rank: int) -> Profile:
    from autotune.catalog import load_job

    for entry in reversed(asked["path"]):
        if entry not in sys.path:
            sys.path.insert(0, entry)

    def on_progress(share: float) -> None:
        if rank == 0:
            (folder / _DONE).write_text(json.dumps(share))

    ranks = asked["ranks"]
    return profile(
        load_job(asked["job"]),
        device_name=asked["device_name"],
        fingerprint=asked["fingerprint"],
        device=asked["device"],
        options=ProfilerOptions(**asked["options"]),
        on_progress=on_progress,
        make_engine=functools.partial(WatchedRanks, zero_stage=ranks["zero_stage"], config=ranks["config"]),
    )


def _say(rank: int, error: Exception) -> None:
    from autotune.engines.inspection import classify

    line = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"{RAISED} {rank}: {classify(error)}: {line}", file=sys.stderr)  # noqa: T201 - the parent reads it


if __name__ == "__main__":
    main(sys.argv[1:])

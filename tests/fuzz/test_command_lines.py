"""Tests of hostile command lines: each succeeds or fails with one line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from effort import EFFORT

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are watched as Linux does it")

PROGRAM = Path(__file__).with_name("command_lines.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run_lines(scratch: Path, count: int, *options: str, parts: int = 1) -> list[dict[str, Any]]:
    """Run command lines in the given number of processes, and return the results."""
    started = []
    for part in range(parts):
        numbers = {"--count": count, "--parts": parts, "--part": part}
        line = [scratch / str(part), *options, *(str(word) for pair in numbers.items() for word in pair)]
        with (scratch / f"{part}.out").open("w") as out, (scratch / f"{part}.err").open("w") as err:
            started.append(subprocess.Popen([sys.executable, PROGRAM, *line], stdout=out, stderr=err, env=ENVIRONMENT))
    for part, process in enumerate(started):
        assert process.wait() in (0, 1), (scratch / f"{part}.err").read_text()[-2000:]
    return [json.loads(row) for part in range(parts) for row in (scratch / f"{part}.out").read_text().splitlines()]


def judge(results: list[dict[str, Any]], count: int) -> None:
    wrong = [json.dumps(result) for result in results if result["wrong"]]
    assert not wrong, "\n".join(wrong)
    assert len(results) == count
    ended = {result["ended"] for result in results}
    # Some must be rejected and some accepted; otherwise only the first check would be tested.
    assert {"2", "working"} <= ended <= {"0", "1", "2", "working"}
    assert sum(result["ended"] == "2" for result in results) > count / 2


def test_each_hostile_command_line_succeeds_or_fails_with_one_line(tmp_path: Path) -> None:
    judge(run_lines(tmp_path, 30, "--seed", "2"), 30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_hostile_command_lines_succeed_or_fail_with_one_line(tmp_path: Path) -> None:
    count = int(1500 * EFFORT)
    judge(run_lines(tmp_path, count, "--runs", "--seed", "1", parts=2), count)


def test_every_option_of_every_verb_gets_hostile_values(tmp_path: Path) -> None:
    import command_lines

    places = command_lines.Places(root=tmp_path, paths=["hostile"], unreadable=[], valid={})
    lines = command_lines.command_lines(0, places)
    known = command_lines.verbs()
    given: set[tuple[tuple[str, ...], str]] = set()
    for _ in range(100 * len(known)):
        words = next(lines)
        words = words[words[0] == "--verbose" :]
        verb = next(verb for verb in known if tuple(words[: len(verb)]) == verb)
        given |= {(verb, word.partition("=")[0]) for word in words if word.startswith("--")}
    wanted = {(verb, option.flags[0]) for verb, options in known.items() for option in options if option.flags}
    assert wanted <= given


def test_same_seed_gives_the_same_command_lines(tmp_path: Path) -> None:
    import command_lines

    places = command_lines.Places(root=tmp_path, paths=["hostile"], unreadable=[], valid={})
    once, again, other = (command_lines.command_lines(seed, places) for seed in (0, 0, 1))
    made = [[next(lines) for _ in range(50)] for lines in (once, again, other)]
    assert made[0] == made[1] != made[2]

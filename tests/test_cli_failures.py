"""Tests of the command line's output, and of its messages for errors of the operating system and of Python."""

import errno
import io
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.cli import console as shared
from autotune.cli.main import app, run
from autotune.cli.plain_console import PlainConsole

JOB = Path(__file__).parent / "tiny_job.py"
PROGRAM = [sys.executable, "-m", "autotune.cli.main"]
# Without the part that only runs as a program.
RUN = [sys.executable, "-c", "import sys; from autotune.cli.main import run; sys.exit(run(sys.argv[1:]))"]
LINES = [["--help"], *(pytest.param(line, marks=pytest.mark.slow) for line in (["doctor"], ["doctor", "--json"]))]
HOSTILE = "[bold]x[/bold] [/b] :smile: \x1b[31mred \u202egpj"
SHOWN = "[bold]x[/bold] [/b] :smile: \\x1b[31mred \\u202egpj"


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("autotune 0.")


def test_output_contains_no_markup_and_no_terminal_escapes() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    table = shared.table(title=HOSTILE, caption=HOSTILE, width=90)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    console.print(HOSTILE)
    console.print(table)
    with shared.Bars(console) as bars:
        bars.stage(HOSTILE, 1)
    assert stream.getvalue().count(SHOWN) == 6
    assert all(character.isprintable() or character == "\n" for character in stream.getvalue())


def test_progress_bar_shows_titles_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    stream = io.StringIO()
    with shared.Bars(PlainConsole(stream)) as bars:
        bars.stage(HOSTILE, 2)
        bars.advance(1, HOSTILE)
    assert stream.getvalue().count(SHOWN) >= 1
    assert "\x1b[31mred" not in stream.getvalue()
    assert "\u202e" not in stream.getvalue()


@pytest.mark.parametrize("name", ["[/b]", "[bold]x[/bold]", ":smile:"])
def test_path_that_looks_like_markup_is_printed_literally(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["doctor", "--runs-dir", name]) == 0
    assert name in capsys.readouterr().out


def test_log_messages_are_escaped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    assert run(["doctor"]) == 0
    logging.getLogger("autotune").warning("a name: %s", HOSTILE)
    assert f"WARNING: a name: {SHOWN}" in capsys.readouterr().err


@pytest.fixture
def failing() -> Iterator[Callable[[Exception], None]]:
    """Add a verb to the command line that raises the given exception."""
    verbs = list(app.registered_commands)

    def add(error: Exception) -> None:
        @app.command("failing")
        def verb() -> None:
            raise error

    yield add
    app.registered_commands[:] = verbs


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "some/file"), 1, "some/file: No space left on device"),
        (OSError(errno.EROFS, "Read-only file system", "a", None, "b"), 1, "a: b: Read-only file system"),
        (OSError(errno.EACCES, "Permission denied", "\x1b[31mred"), 1, "\\x1b[31mred: Permission denied"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "n" * 300), 2, "n: File name too long"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "Broken pipe"),
        (OSError("no words"), 1, "OSError: no words"),
        (MemoryError(), 1, "out of memory"),
        (RecursionError("maximum recursion depth exceeded"), 1, "maximum recursion depth exceeded"),
        (OverflowError("too large"), 1, "OverflowError: too large"),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), 1, "surrogates not allowed"),
    ],
    ids=lambda part: repr(part)[:40],
)
def test_operating_system_error_in_a_verb_is_one_line(
    error: Exception,
    code: int,
    said: str,
    failing: Callable[[Exception], None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Typer replaces them where a pipe breaks.
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    failing(error)
    assert run(["failing"]) == code
    captured = capfd.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("autotune: ")
    assert said in captured.err


def test_internal_error_shows_its_traceback(failing: Callable[[Exception], None]) -> None:
    failing(KeyError("a defect"))
    with pytest.raises(KeyError, match="a defect"):
        run(["failing"])


def test_unwritable_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"version": 1, "accumulation_steps": 1, "precision": {}, "storage": {}}')
    line = ["export", "plan.json", "--job", str(JOB), "--to", "json"]
    answer = subprocess.run(
        [*RUN, *line],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)),
    )
    assert (answer.returncode, answer.stderr) == (1, "autotune: File too large\n")


@pytest.mark.parametrize("line", LINES, ids=["--help", "doctor", "doctor --json"])
def test_closed_output_pipe_is_not_an_error(line: list[str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    answer = subprocess.run([*PROGRAM, *line], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    os.close(writer)
    assert (answer.returncode, answer.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
@pytest.mark.parametrize("line", LINES, ids=["--help", "doctor", "doctor --json"])
def test_full_disk_behind_stdout_is_one_line(line: list[str], tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run([*PROGRAM, *line], stdout=full, stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    assert (answer.returncode, answer.stderr) == (1, b"autotune: No space left on device\n")


@pytest.mark.parametrize("line", [["--help"], ["doctor", "--json"]], ids=" ".join)
def test_closed_standard_streams_are_not_an_error(line: list[str], tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *PROGRAM, *line]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (["--version"], 0, "autotune 0."),
        (["--help"], 0, "Usage: autotune"),
        (["doctor"], 2, "working folder"),
        (["tune", "charlm"], 2, "working folder"),
        (["plan", str(JOB), "--device", "h200"], 2, "working folder"),
    ],
)
def test_missing_working_directory_is_one_line(line: list[str], code: int, said: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    leave = "import os, sys; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"
    answer = subprocess.run(
        [sys.executable, "-c", leave, str(gone), *RUN, *line], capture_output=True, text=True, check=False
    )
    assert answer.returncode == code, answer.stderr
    assert said in answer.stdout + answer.stderr
    assert answer.stderr.count("\n") == (code != 0)

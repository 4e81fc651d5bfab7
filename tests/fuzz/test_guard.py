"""Tests of the guard that restricts fuzzing processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="rights are given up as Linux does it")

BEGINS = """
import os, pathlib, socket, sqlite3, sys
import guard
inside, outside = map(pathlib.Path, sys.argv[1:3])
guard.install([*guard.installation(), *guard.SYSTEM], [inside], report=lambda line: os.write(1, f"{line}\\n".encode()),
              unreadable=[inside / "unreadable"])
"""


def said(code: str, folder: Path) -> tuple[list[str], str]:
    """Run code under a guard, and return the reports and Python's final message."""
    inside, outside = folder / "inside", folder / "outside"
    for made in (inside, outside):
        made.mkdir()
        (made / "file").write_text("text")
    (inside / "unreadable").write_text("text")
    (inside / "link").symlink_to(outside / "file")
    os.mkfifo(inside / "pipe")
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    answer = subprocess.run(
        [sys.executable, "-c", BEGINS + code, inside, outside],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    return answer.stdout.splitlines(), answer.stderr


@pytest.mark.parametrize(
    "code",
    [
        "(outside / 'file').write_text('other')",
        "os.open(outside / 'new', os.O_CREAT)",
        "(outside / 'new').mkdir()",
        "(outside / 'file').unlink()",
        "(inside / 'link').write_text('other')",
        "(outside / 'file').chmod(0o600)",
        "(inside / 'file').rename(outside / 'new')",
        "(outside / 'new').symlink_to(inside)",
        "os.truncate(outside / 'file', 0)",
        "sqlite3.connect(outside / 'new')",
    ],
)
def test_files_outside_the_allowed_folders_cannot_be_changed(code: str, tmp_path: Path) -> None:
    reported, ended = said(code, tmp_path)
    assert "PermissionError" in ended
    assert len(reported) == 1
    assert "for writing outside" in reported[0]
    assert [(path.name, path.read_text()) for path in (tmp_path / "outside").iterdir()] == [("file", "text")]


@pytest.mark.parametrize(
    "code", ["(outside / 'file').read_text()", "(inside / 'link').read_text()", "os.listdir(outside)"]
)
def test_reading_outside_the_allowed_folders_is_reported(code: str, tmp_path: Path) -> None:
    reported, ended = said(code, tmp_path)
    assert ended == ""
    assert len(reported) == 1
    assert "for reading outside" in reported[0]


def test_opening_a_path_that_could_block_is_reported(tmp_path: Path) -> None:
    code = (
        "os.close(os.open(inside / 'pipe', os.O_RDWR))\nos.close(os.open(inside / 'pipe', os.O_RDONLY | os.O_NONBLOCK))"
    )
    assert said(code, tmp_path) == ([f"opened a pipe: {str(tmp_path / 'inside' / 'pipe')!r}"], "")


def test_unreadable_path_raises_permission_error(tmp_path: Path) -> None:
    reported, ended = said("(inside / 'unreadable').read_text()", tmp_path)
    assert reported == []
    assert "PermissionError: [Errno 13] Permission denied" in ended


def test_network_connections_are_blocked(tmp_path: Path) -> None:
    reported, ended = said("socket.create_connection(('192.0.2.1', 80))", tmp_path)
    assert "ConnectionRefusedError" in ended
    assert reported == ["network: ('192.0.2.1', 0)"]


def test_allowed_folders_can_be_used_freely(tmp_path: Path) -> None:
    code = """
(inside / 'link').unlink()
(inside / 'new').mkdir()
(inside / 'new' / 'file').write_text((inside / 'file').read_text())
sqlite3.connect(inside / 'database').close()
import statistics, zoneinfo, mimetypes
mimetypes.init()
"""
    assert said(code, tmp_path) == ([], "")


@pytest.mark.skipif(os.getuid() != 0, reason="only root has rights to give up")
def test_privileges_are_dropped_permanently(tmp_path: Path) -> None:
    code = """
import guard, os, pathlib, sys
guard.drop_rights()
for act in (lambda: os.setuid(0), lambda: pathlib.Path(sys.argv[1], "new").touch()):
    try:
        act()
    except PermissionError:
        print("refused")
print(os.getuid(), pathlib.Path(os.__file__).is_file())
"""
    tmp_path.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    answer = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, env=environment, check=True
    )
    assert answer.stdout == "refused\nrefused\n65534 True\n"

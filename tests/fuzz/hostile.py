"""Hostile values, files and folders."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

# The password in every URL, which no output may show.
SECRET = "hunter2"
HUGE_BYTES = 20 * 2**30
_WIDE = "\N{FULLWIDTH DIGIT ONE}\N{FULLWIDTH DIGIT TWO}"

# fmt: off
NUMBERS = [
    "0", "-1", "-0", "00", "+3", "1", "2", "7", " 5", "5 ", "1_000", "99999999999", str(2**31 - 1), str(2**31),
    str(2**32), str(2**63 - 1), str(2**63), str(2**64), str(10**30), str(-(10**30)),
]
NOT_NUMBERS = [
    "nan", "NaN", "inf", "-inf", "1e400", "1e308", "1e3", "2.5", "1e-300", "1,5", "0x10", _WIDE, "\xb2", "\u0663", "",
    "--", "9" * 5000, "1" * 400 + ".5", "true", "None",
]
URLS = [
    f"postgresql://user:{SECRET}@127.0.0.1:1/studies",
    f"postgresql+psycopg://user:{SECRET}@127.0.0.1:1/studies",
    f"postgresql+psycopg2://user:{SECRET}@127.0.0.1:1/studies",
    f"postgresql://127.0.0.1:1/studies?user=user&password={SECRET}",
    f"postgresql://user:{SECRET}@127.0.0.1:99999/studies",
    f"postgresql://user:{SECRET}@[::1/studies",
    f"postgresql://user:{SECRET}@127.0.0.1:port/studies",
    f"mysql://root:{SECRET}@127.0.0.1/studies",
    f"redis://:{SECRET}@127.0.0.1:1/0",
    f"http://user:{SECRET}@127.0.0.1:1/",
    f"ray://user:{SECRET}@127.0.0.1:1",
    "ray://127.0.0.1:1", "127.0.0.1:1", "127.0.0.1:99999", "ray://[::1]:1", "sqlite://", "sqlite:///./x.db",
    "postgresql://", "file:///etc/passwd", "://", "local:0", "local:\xb2", "local:-1", "local:" + "9" * 30, "local:",
    "local:1", "auto:1",
]
TEXTS = [
    "", " ", "-", "--", "---", "\0", "a\0b", "\ud800", "\udcff", "\udc80/x", "A" * 300, "A" * 5000, "\u0436" * 300,
    "A" * 120_000, "\u202egpj.exe", "\u200f", "\u2066x", "[bold]x[/bold]", "[/b]", "[", "[link=file:///x]x[/link]",
    ":smile:", "%s%s%n", "{0.__class__}", "{task.description}", "${HOME}", "$(touch pwned)", "`touch pwned`",
    "; touch pwned", "~", "~/x", "a\nb", "a\rb", "a\r\nautotune: all is well", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07",
    "\x9b31m", "\x7f", "\u2028", "\ufeff", "\U0001f600", "\xe9", "'", '"', "\\", "\\x1b", "a/b", "../../..", "/", "//",
    ".", "..", "/..", "./.", "org/model", "C:\\x", "a?b", "a#b", "a%20b", "a:b", "a:b:c", ":", ":x", "x:", "::", ".:x",
    "..:x", "a..b:c", "1:2", "con", "nul", "*", "?", "baseline", "paper", "ppo", "exact", "magic", "charlm", "digits",
    "none", "null", "all", ",", ",,", "baseline,", "baseline,baseline", "paper,,exact", "+", "+lion", "charlm+lion=nan",
    "charlm+lion=1e400", "charlm+lion=", "charlm+lion+adamw", "charlm+compile+compile", "charlm+\x1b",
    "exact+lion=9e999", "100%", "0%", "-5%", "1e9%", "9" * 400 + "%", "9" * 400 + "GiB", "9" * 30 + "GiB", "0B", "0.4B",
    "1B", "1KiB", "20GiB", _WIDE + "GiB", "1e3GiB", "nanGiB", "GiB", "20 gib", "1,0,0", "1,0", "nan,1,1", "inf,1,1",
    "1e308,1e308,1e308", "-1,1,1", "0,0,0", "5:70%", "1:70%", "5:100%", "5:0%", "5:70%:told", "5:70%:told:told",
    f"{10**30}:70%", "\xb2:70%", f"5:{'9' * 400}%", "0.3", "400", "5001", "-400", "6h", "0h", "1e9h", "9" * 400 + "d",
    _WIDE + "h", "1d12h", "h", "6h6h", "2025-03-01T18:00:00Z", "2025-03-01", "0000-01-01T00:00Z",
    "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "10000-01-01T00:00Z", "-001-01-01T00:00Z",
    "2025-02-30T00:00Z", "2025-03-01T18:00:00+99:00", "deepspeed", "torch", "onnx", "python", "cuda", "cpu", "h200",
    "meta", "table1", "error-analysis",
]
_NAMES = [
    "plain", "[bold]x[/bold]", "[/b]", "\x1b[31mred\x1b[0m", 'a"b', "a'b", "new\nline", "a\rb", "B" * 255,
    "\u0436" * 127, "$(touch pwned)", "%s%n", "{0}", "\u202egpj.exe", " space ", "-dash", "--json", "a?b", "a#b",
    "a%20b", "a:b", "a,b", "a=b", "a+lion", "a&b<c>", "\udcff", "\xe9", "\U0001f600", "...",
]
# fmt: on
_DOCUMENTS = {
    "empty": b"",
    "binary": bytes(range(256)) * 16,
    "not-utf8": b'{"version": "\xff"}',
    "nul": b'{"version": 1}\0',
    "list": b"[]",
    "number": b"1",
    "object": b"{}",
    "nan": b'{"version": NaN}',
    "twice": b'{"version": 1, "version": 1}',
    "deep": b"[" * 200_000,
    "digits": b'{"version": ' + b"9" * 5000 + b"}",
    "escapes": b'{"\\u001b[31m": "\\ud800", "[/b]": "\\n"}',
    "newer": b'{"version": 10, "accumulation_steps": 1, "precision": {}, "storage": {}}',
    "year0.csv": b"time,g\n0000-01-01T00:00Z,100\n0000-01-01T01:00Z,90\n",
    "year1.csv": b"time,g\n0001-01-01T00:00:00+14:00,100\n0001-01-01T01:00:00+14:00,90\n",
    "year9999.csv": b"time,g\n9999-12-31T22:00:00-14:00,100\n9999-12-31T23:00:00-14:00,90\n",
    "year10000.csv": b"time,g\n10000-01-01T00:00Z,100\n10000-01-01T01:00Z,90\n",
    "minus.csv": b"time,g\n-001-01-01T00:00Z,100\n-001-01-01T01:00Z,90\n",
    "field.csv": b"time,g\n2025-03-01T00:00Z," + b"1" * 200_000 + b"\n2025-03-01T01:00Z,90\n",
    "quote.csv": b'"2025-03-01T00:00Z,100\n2025-03-01T01:00Z,90\n',
    "escape.csv": b"\x1b[31m,\x1b[0m\n\x1b[31m,90\n",
    "nan.csv": b"2025-03-01T00:00Z,nan\n2025-03-01T01:00Z,90\n",
    "nul.csv": b"2025-03-01T00:00Z,1\x0000\n2025-03-01T01:00Z,90\n",
    "one.csv": b"2025-03-01T00:00Z,100\n",
    "gap.csv": b"2025-03-01T00:00Z,100\n2025-03-01T01:00Z,90\n2025-03-01T09:00Z,90\n",
}
_SUFFIXES = ("", ".json", ".py", ".toml")


def make(folder: Path) -> tuple[list[str], list[Path]]:
    """Fill a new folder with hostile files, folders, and things that are neither.

    Returns:
        The paths, including missing ones; and those of them that must not be read.
    """
    folder.mkdir()
    paths = [str(path) for path in _made(folder)]
    # Impossible file names, and places that do not exist or belong to others.
    paths += [str(folder / ("C" * 300)), "D" * 300, str(folder / ("deep/" * 1000)), str(folder / "plain" / "below")]
    paths += [str(folder / "missing" / "below"), "relative", "", ".", "..", "/", "//", "../..", "a/../../..", "~"]
    paths += ["/nonexistent", "/nonexistent/below", "/proc/self", "/sys", "/etc", "/usr", "\0", "\ud800"]
    unreadable = [folder / "unreadable", folder / "unreadable.json", folder / "unreadable-folder"]
    for path in unreadable:
        path.chmod(0)
    return paths, unreadable


def _made(folder: Path) -> Iterator[Path]:
    for name in _NAMES:
        file, inner = folder / name, folder / "folders" / name
        # Some names consist of a folder and a file in it.
        file.parent.mkdir(exist_ok=True)
        file.touch()
        inner.mkdir(parents=True)
        yield from (file, inner)
    for name, content in _DOCUMENTS.items():
        path = folder / (name if "." in name else f"{name}.json")
        path.write_bytes(content)
        yield path
    for suffix in _SUFFIXES:
        yield from (folder / f"{name}{suffix}" for name in _special(folder, suffix))
    for name, mode in (("read-only", 0o555), ("unreadable-folder", 0o755)):
        (folder / name).mkdir(mode=mode)
        yield from (folder / name, folder / name / "below")
    yield from _runs(folder)


def _special(folder: Path, suffix: str) -> list[str]:
    """Make one entry of each kind, and return their names without the suffix."""
    os.mkfifo(folder / f"fifo{suffix}")
    (folder / f"dangling{suffix}").symlink_to(folder / "nowhere")
    (folder / f"loop{suffix}").symlink_to(folder / f"loop{suffix}")
    (folder / f"link-to-pipe{suffix}").symlink_to(folder / "fifo")
    (folder / f"folder{suffix}").mkdir()
    (folder / f"unreadable{suffix}").write_text("{}")
    with (folder / f"huge{suffix}").open("wb") as file:
        file.truncate(HUGE_BYTES)
    # The path of a socket must be short, wherever the folder is.
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(folder):
        server.bind(f"socket{suffix}")
    made = ["fifo", "dangling", "loop", "link-to-pipe", "folder", "unreadable", "huge", "socket"]
    # Private device nodes, because a program that replaces one must not touch the machine's.
    for name, minor in (("null", 3), ("zero", 5), ("full", 7)):
        with contextlib.suppress(PermissionError):
            os.mknod(folder / f"{name}{suffix}", stat.S_IFCHR | 0o666, os.makedev(1, minor))
            (folder / f"{name}{suffix}").chmod(0o666)
            made.append(name)
    return made


def _runs(folder: Path) -> Iterator[Path]:
    """Make run folders with invalid documents."""
    for name, entry in (("run-of-a-pipe", "fifo"), ("run-of-a-folder", "folder"), ("run-of-nothing", "empty.json")):
        run = folder / name
        run.mkdir()
        for document in ("config.json", "plan.json", "decisions.jsonl"):
            (run / document).symlink_to(folder / entry)
        yield run

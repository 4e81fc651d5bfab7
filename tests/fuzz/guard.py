"""Restrict a process that handles hostile input to a few folders, and report every other access.

An audit hook cannot be removed, and it sees what Python opens but not what C libraries do. A process that may be root
should therefore also call :func:`drop_rights`.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

NOBODY = 65534
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# System files that libraries read.
SYSTEM = (
    "/proc",
    "/sys",
    "/dev/null",
    "/dev/urandom",
    "/dev/random",
    "/dev/tty",
    "/dev/shm",
    "/etc/apache",
    "/etc/fonts",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/httpd",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/os-release",
    "/etc/passwd",
    "/etc/resolv.conf",
    "/etc/ssl",
    "/etc/timezone",
    "/usr/lib",
    "/usr/local/etc",
    "/usr/local/lib",
    "/usr/share",
)
# Events that change paths, with the positions of the paths among the arguments.
_CHANGES = {
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.link": (1,),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.setxattr": (0,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.utime": (0,),
}
# These events change a folder entry itself, not the target of a link.
_ENTRIES = ("os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink")
_LISTS = ("os.listdir", "os.scandir")


def installation() -> list[str]:
    """Return the folders that Python, its libraries and the package are read from."""
    import autotune

    package = Path(autotune.__file__).resolve().parent
    found = [sys.prefix, sys.base_prefix, sys.exec_prefix, *(entry for entry in sys.path if entry)]
    return [*found, *(str(package.parent / name) for name in ("autotune", "envs", "policies", "tests"))]


def install(
    allowed_read: Iterable[str | Path],
    allowed_write: Iterable[str | Path],
    *,
    report: Callable[[str], None],
    unreadable: Iterable[str | Path] = (),
) -> None:
    """Block changes outside some folders, and report blocked changes and reads outside others.

    Args:
        allowed_read: folders and files that may be read, in addition to those that may be written.
        allowed_write: folders that may be written.
        report: called with one line about each violation, inside the hook, so it must not open anything.
        unreadable: folders and files in ``allowed_write`` that are refused as the system refuses them to a user without
            the right, for a process that has it.
    """
    write = _roots(allowed_write)
    read = _roots(allowed_read) + write
    denied = _roots(unreadable)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            _opened(path, flags or 0)
        elif event in _CHANGES:
            for position in _CHANGES[event]:
                _changed(arguments[position], event)
        elif event in _LISTS:
            _looked_at(arguments[0], event)
        elif event == "sqlite3.connect":
            database = str(arguments[0])
            if not database.startswith((":memory:", "file:")) and database:
                _changed(database, event)
        elif event == "socket.connect":
            _connected(arguments[1])
        elif event == "socket.getaddrinfo":
            _connected((arguments[0], 0))

    def _opened(path: object, flags: int) -> None:
        if flags & _WRITES and path != os.devnull:
            _changed(path, "open")
        else:
            _looked_at(path, "open")
        kind = _kind(path)
        if kind is not None and not flags & os.O_NONBLOCK and _is_inside(real_path(path), write):
            report(f"opened {kind}: {path!r}")

    def _looked_at(path: object, event: str) -> None:
        real = real_path(path)
        if real is None:
            return
        if denied and _is_inside(real, denied):
            raise PermissionError(13, "Permission denied", path)
        if not _is_inside(real, read) and os.path.lexists(real):
            report(f"{event} for reading outside: {real}")

    def _changed(path: object, event: str) -> None:
        real = _entry(path) if event in _ENTRIES else real_path(path)
        if real is not None and not _is_inside(real, write):
            report(f"{event} for writing outside: {real}")
            raise PermissionError(13, "outside of the scratch folder", path)

    def _connected(address: object) -> None:
        host = address[0] if isinstance(address, tuple) and address else address
        if (
            isinstance(host, str)
            and host.strip("[]") not in ("127.0.0.1", "::1", "localhost", "")
            and not host.startswith("/")
        ):
            report(f"network: {address!r}")
            raise ConnectionRefusedError(111, "outside of this machine")

    sys.addaudithook(hook)


def drop_rights() -> bool:
    """Drop root privileges permanently; return whether the process can still read all files.

    That privilege is kept if an unprivileged user could not even read the Python library.
    """
    if os.getuid() != 0:
        return False
    keep = not _others_can_read(Path(os.__file__))
    libc = ctypes.CDLL(None, use_errno=True)
    if keep:
        _call(libc.prctl(8, 1, 0, 0, 0))  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    if keep:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
        mask = 1 << 2  # CAP_DAC_READ_SEARCH
        _call(libc.capset(header, (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)))
    _call(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    return keep


def leave_network() -> bool:
    """Move this process and its children into their own network; return whether that succeeded."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.unshare(0x40000000) == 0)  # CLONE_NEWNET


def _call(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), "the rights of this process cannot be given up")


def _others_can_read(file: Path) -> bool:
    if not file.stat().st_mode & stat.S_IROTH:
        return False
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in file.resolve().parents)


def _roots(paths: Iterable[str | Path]) -> tuple[str, ...]:
    return tuple({os.path.realpath(path) for path in paths})


def _is_inside(path: str | None, roots: tuple[str, ...]) -> bool:
    return path is None or any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def real_path(path: object) -> str | None:
    """Return the target of a path; ``None`` for an open file or an impossible name."""
    if path is None:
        path = "."
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    try:
        return os.path.realpath(os.fsdecode(path))
    except (OSError, ValueError):
        return None


def _entry(path: object) -> str | None:
    """Return the folder entry that the last part of a path names."""
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    folder, name = os.path.split(os.fsdecode(path).rstrip("/"))
    real = real_path(folder or ".")
    return None if real is None else f"{real.rstrip('/')}/{name}"


def _kind(path: object) -> str | None:
    """Return the kind of a path's target if opening it could block."""
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    try:
        mode = Path(os.fsdecode(path)).stat().st_mode
    except (OSError, ValueError):
        return None
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else None

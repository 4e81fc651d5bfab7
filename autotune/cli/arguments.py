"""Checks of command-line arguments before any subcommand runs: arguments are text, and paths can be used.

The contents of files are not checked here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import typer

from autotune.errors import InputError, RunDirectoryError


def require_text(arguments: Sequence[str]) -> None:
    """Refuse arguments that cannot be stored in a file name, a document or a database.

    Raises:
        InputError: if an argument contains a NUL, or bytes that are not UTF-8.
    """
    for number, argument in enumerate(arguments, 1):
        if "\0" in argument or not _is_unicode(argument):
            raise InputError(f"is {argument!r}", where=f"argument {number}", allowed="UTF-8 text without NUL")


def require_working_folder() -> None:
    """Refuse to work in a folder that no longer exists: there, C libraries end the process with their own messages.

    Raises:
        InputError: if the working folder does not exist.
    """
    try:
        Path.cwd()
    except OSError as error:
        problem = f"the working folder cannot be used ({error.strerror})"
        raise InputError(problem, allowed="a folder that exists") from error


def input_path(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Check the path of an input; a Typer callback."""
    if path is not None:
        require_readable(path, where=_named(parameter, path))
    return path


def output_file(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Check the path of a file that will be written; a Typer callback."""
    if path is not None:
        where = _named(parameter, path)
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG
        except OSError as error:
            raise RunDirectoryError(f"cannot be written ({error.strerror})", where=where) from error
        if not stat.S_ISREG(mode):
            raise RunDirectoryError("is not a regular file", where=where, allowed="a regular file, or a new name")
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise RunDirectoryError("cannot be written", where=where, allowed="a file in a writable folder")
    return path


def output_folder(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Check the path of a folder that will be made or written to; a Typer callback."""
    from autotune.records.run_directory import require_writable

    if path is not None:
        require_writable(path, where=_named(parameter, path))
    return path


def require_readable(path: Path, *, where: str) -> None:
    """Refuse a path to something other than a readable file or folder.

    A path that does not exist is accepted: the subcommand knows what it expects there.

    Args:
        path: the path.
        where: name of the path in errors.

    Raises:
        InputError: if the path is refused.
    """
    allowed = "a file or a folder"
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=where, allowed=allowed) from error
    # Opening a pipe would wait for its writer, and some devices never end.
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise InputError("is neither a file nor a folder", where=where, allowed=allowed)
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        raise InputError("cannot be read (permission denied)", where=where, allowed=allowed)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named(parameter: typer.CallbackParam, path: Path) -> str:
    """Return a path as errors show it, preceded by its option if it has one."""
    option = parameter.opts[0] if parameter.opts else ""
    return f"{option} {path}" if option.startswith("-") else str(path)

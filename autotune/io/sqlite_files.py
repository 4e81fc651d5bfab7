"""Refuse an SQLite database that would make SQLite touch other files.

A folder may come from other people, and SQLite trusts the files next to a database: after a transaction over several
databases, a journal may name a second file, which SQLite deletes when it rolls the transaction back. Autotune never
writes two databases in one transaction.
"""

from __future__ import annotations

import os
from pathlib import Path

from autotune.errors import InputError
from autotune.io.files import require_replaceable

# Suffixes of the files that SQLite keeps next to a database.
BESIDE = ("-journal", "-wal", "-shm")
# End of a journal that names a second file.
_NAMES_ANOTHER = bytes.fromhex("d9d505f920a163d7")


def require_own(database: Path) -> None:
    """Refuse a database if it, or a file next to it, refers to another file; the files need not exist.

    Raises:
        InputError: naming the file that is not regular, names another one, or cannot be read.
    """
    for path in (database, *(database.with_name(database.name + suffix) for suffix in BESIDE)):
        try:
            require_replaceable(path)
            if path.exists() and _tail(path) == _NAMES_ANOTHER:
                allowed = "a journal of this database alone, or none"
                raise InputError("names another file, which SQLite would delete", where=str(path), allowed=allowed)
        except OSError as error:
            raise InputError(f"cannot be read ({error.strerror})", where=str(path), allowed="a file") from error


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - len(_NAMES_ANOTHER)))
        return file.read()

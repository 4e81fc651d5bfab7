"""Storage of Optuna's studies: in a run's own folder, or in a database that several machines can reach."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import extras
from autotune.errors import InputError, first_line
from autotune.io.addresses import scrubbed, sqlite_address, without_secrets

STORAGE_FILE = "optuna.db"
# Seconds within which a database must accept a connection.
TIMEOUT_S = 10
_DRIVER = "postgresql+psycopg"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyStore:
    """A database, and the prefix of the studies in it that belong to one run.

    Attributes:
        url: address in SQLAlchemy's form.
        prefix: prefix of the names of the run's studies.
        where: the database, for error messages.
    """

    url: str
    prefix: str
    where: str

    @classmethod
    def of(cls, place: Path | StudyStore) -> StudyStore:
        """Return the store of a run's folder, or the store itself."""
        if isinstance(place, StudyStore):
            return place
        path = place / STORAGE_FILE
        return cls(url=sqlite_address(path), prefix="", where=str(path))

    @classmethod
    def shared(cls, url: str, run: str) -> StudyStore:
        """Return the store of a run in a database whose address :func:`checked` returned."""
        return cls(url=url, prefix=f"{run} ", where=without_secrets(url))

    @property
    def engine_options(self) -> dict[str, Any]:
        """Return the options of SQLAlchemy's engine."""
        return _options(self.url)


def checked(url: str, where: str = "--storage") -> str:
    """Return the address of a database in SQLAlchemy's form, after checking that the database answers.

    Args:
        url: ``postgresql://user@host:port/database``; the password may also be in ``PGPASSWORD``.
        where: the source of the address, for error messages.

    Raises:
        InputError: if the address is invalid or MLflow's, the driver is missing, or nothing answers within ten seconds.
    """
    import sqlalchemy

    allowed = "postgresql://user@host:port/database"
    scheme, _, rest = url.partition("://")
    if scheme not in ("postgresql", "postgres", _DRIVER) or not rest:
        raise InputError(f"is {without_secrets(url)!r}", where=where, allowed=allowed)
    if _place(url) == _place(os.environ.get("MLFLOW_TRACKING_URI", "")):
        # Optuna and MLflow both keep the version of their tables in a table of the same name.
        raise InputError(f"{without_secrets(url)} is MLflow's database", where=where, allowed="a different database")
    found = f"{_DRIVER}://{rest}"
    try:
        sqlalchemy.make_url(found)
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:
        # The library's message may quote a password.
        raise InputError(f"{without_secrets(url)} cannot be read", where=where, allowed=allowed) from error
    try:
        engine = sqlalchemy.create_engine(found, **_options(found))
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text("select 1"))
        engine.dispose()
    except ModuleNotFoundError as error:
        raise extras.missing("psycopg", where=where) from error
    except (sqlalchemy.exc.SQLAlchemyError, ValueError) as error:
        reason = scrubbed(first_line(getattr(error, "orig", None) or error), url, found)
        shown = without_secrets(url)
        raise InputError(f"{shown} does not answer ({reason})", where=where, allowed="a reachable database") from error
    return found


def _place(url: str) -> tuple[str | None, int | None, str | None]:
    """Return host, port and database."""
    import sqlalchemy

    try:
        found = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        # A port that is not a number, or an address in another library's form.
        return None, None, url
    return found.host, found.port, found.database


def _options(url: str) -> dict[str, Any]:
    if not url.startswith("postgresql"):
        return {}
    return {"pool_pre_ping": True, "connect_args": {"connect_timeout": TIMEOUT_S}}

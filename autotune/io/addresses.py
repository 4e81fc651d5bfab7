"""Show addresses of databases and servers, and messages of libraries about them, without secrets.

Only parts of an address that are known to be harmless are shown: libraries accept passwords in many places. An address
of unknown form is not shown at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote_plus

from autotune.errors import InputError

HIDDEN = "***"
_USER = re.compile(r"[\w.\-]{1,64}")
_HOST = re.compile(r"[\w.\-,]*(\[[0-9a-fA-F:.]*\])?(:\d{0,5})?")
_PATH = re.compile(r"[\w.\-/ ]*")
_SCHEME = re.compile(
    r"(postgres(ql)?|mysql|mariadb|mssql|oracle|sqlite|https?|ray|databricks(-uc)?|file|s3|gs)(\+[a-z0-9_]{1,20})?"
)
# Schemes whose user may be a token; in addresses of databases it is a plain name.
_NAMELESS = ("http", "https", "databricks", "databricks-uc")
# Options of an address whose values are not secret.
_OPEN_OPTIONS = frozenset({"host", "port", "dbname", "database", "sslmode", "connect_timeout", "uri", "mode"})
# Environment variables in which libraries look for secrets of the same servers.
_SECRET_VARIABLES = ("PGPASSWORD", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "DATABRICKS_TOKEN")


def without_secrets(address: str) -> str:
    """Return an address without passwords, tokens and values of unknown options.

    Args:
        address: a URL for SQLAlchemy, MLflow or libpq, or a path.
    """
    scheme, mark, rest = address.partition("://")
    if not mark:
        # A path, or a form that only some libraries understand.
        return address if _PATH.fullmatch(address) else HIDDEN
    if not _SCHEME.fullmatch(scheme):
        return HIDDEN
    authority, path, options = _parts(rest)
    if "@" in rest[len(authority) :]:
        # Where the password ends depends on the library: it may contain a slash, a question mark or a hash.
        return f"{scheme}://{HIDDEN}"
    user, at, host = authority.rpartition("@")
    name = user.partition(":")[0]
    shown_name = name if _USER.fullmatch(name) and scheme not in _NAMELESS else HIDDEN
    return "".join(
        (
            f"{scheme}://{shown_name if at else ''}{at}",
            host if _HOST.fullmatch(host) else HIDDEN,
            path if _PATH.fullmatch(path) else f"/{HIDDEN}",
            "?" if options else "",
            "&".join(_option(option) for option in options.split("&") if option),
        )
    )


def scrubbed(text: str, *addresses: str) -> str:
    """Remove from a message the secrets in addresses and in environment variables.

    Args:
        text: message of a library.
        addresses: the addresses that the library was given.
    """
    for address in addresses:
        text = text.replace(address, without_secrets(address))
    secrets = {secret for address in addresses for secret in _secrets(address)}
    secrets |= {value for name in _SECRET_VARIABLES if (value := os.environ.get(name))}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def sqlite_address(path: Path) -> str:
    """Return the address of an SQLite file for SQLAlchemy and MLflow.

    Raises:
        InputError: if this version of SQLAlchemy cannot express the path.
    """
    text = str(path.absolute())
    if "?" not in text and "%" not in text:
        return f"sqlite:///{text}"
    import sqlalchemy

    # Versions differ in how they read a quoted path.
    for address in (sqlalchemy.URL.create("sqlite", database=text).render_as_string(), f"sqlite:///{quote(text)}"):
        if sqlalchemy.make_url(address).database == text:
            return address
    raise InputError("the path contains a question mark or a percent sign", where=text, allowed="a path without them")


def _parts(rest: str) -> tuple[str, str, str]:
    """Split the part after the scheme into user and host, path, and options."""
    before, _, options = rest.partition("#")[0].partition("?")
    authority, slash, path = before.partition("/")
    return authority, slash + path, options


def _option(option: str) -> str:
    """Return an option of an address, with its value only if it is not secret."""
    key, named, value = option.partition("=")
    # Without a value, the option may be the end of a password that contains an ampersand.
    if not named or not _USER.fullmatch(key):
        return HIDDEN
    harmless = key in _OPEN_OPTIONS and re.fullmatch(r"[\w.\-/,]{0,100}", value)
    return f"{key}={value if harmless else HIDDEN}"


def _secrets(address: str) -> Iterator[str]:
    """Yield each hidden part of an address, quoted and unquoted."""
    scheme, mark, rest = address.partition("://")
    parts: list[str] = []
    if not mark:
        parts += [] if _PATH.fullmatch(address) else re.findall(r"=\s*('[^']*'|[^\s;&]+)", address)
    else:
        # Libraries differ in where the password ends.
        parts += [*re.findall(r"^[^:/]*:([^@]*)@", rest), *re.findall(r"^[^:/]*:(.*)@", rest)]
        if scheme in _NAMELESS and "@" in rest:
            parts.append(rest.partition("@")[0].partition(":")[0])
        for options in (_parts(rest)[2], rest.partition("?")[2]):
            named = (one.partition("=") for one in options.split("&"))
            parts += [value for key, _, value in named if key not in _OPEN_OPTIONS]
    for part in parts:
        yield from {part, unquote_plus(part), quote(unquote_plus(part), safe="")} - {""}

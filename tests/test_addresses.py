"""Tests that no address shows its secrets, in any form that a library accepts."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
import sqlalchemy
from hypothesis import example, given
from hypothesis import strategies as st

from autotune.io.addresses import HIDDEN, scrubbed, sqlite_address, without_secrets

# Long and unusual enough not to occur in the output by chance.
SECRETS = st.text(st.sampled_from("aZ9:@/?#&=%+ ;,'[]{}\\$é"), min_size=1, max_size=8).map(lambda text: f"Qx{text}xQ")
SCHEMES = st.sampled_from(
    ["postgresql", "postgres", "postgresql+psycopg", "mysql+pymysql", "http", "https", "ray", "databricks", "sqlite"]
)
HOSTS = st.sampled_from(["host", "db.example.org:5432", "[::1]:5432", "127.0.0.1", "", "a,b:1"])
QUOTES = st.sampled_from([quote, quote_plus, lambda text: quote(text, safe=""), str])
KEYS = st.sampled_from(
    ["password", "passwd", "sslpassword", "token", "access_token", "odbc_connect", "options", "service", "PWD", "x"]
)


@st.composite
def addresses(draw: st.DrawFn) -> str:
    """Return an address with a secret in it."""
    secret, scheme, host, as_written = draw(SECRETS), draw(SCHEMES), draw(HOSTS), draw(QUOTES)
    written = as_written(secret)
    user = draw(st.sampled_from(["me", "", "me%40corp"]))
    forms = [
        f"{scheme}://{user}:{written}@{host}/db",
        f"{scheme}://{user}:{written}@{host}",
        f"{scheme}://{user}:{written}@{host}/db?sslmode=require",
        f"{scheme}://{user}@{host}/db?{draw(KEYS)}={written}",
        f"{scheme}:///db?host=h&user=me&{draw(KEYS)}={written}&connect_timeout=3",
        f"{scheme}://{host}/db?{draw(KEYS)}={written}#part",
        f"https://{written}@{host}/api",
        f"https://{written}:x-oauth-basic@{host}",
        f"host=h user=me password={written}",
        f"mssql+pyodbc:///?odbc_connect={quote_plus('DRIVER=x;PWD=' + secret)}",
        f"{written}://host/db",
    ]
    return draw(st.sampled_from(forms))


@given(addresses())
@example("postgresql://me:Qx/a@bxQ@host/db")
@example("postgresql://me:Qx?a@bxQ@host/db?x=1")
@example("postgresql://me:Qx#xQ@host/db")
def test_no_secret_is_shown_in_any_address_format(address: str) -> None:
    shown = without_secrets(address)
    assert "Qx" not in shown
    assert "xQ" not in shown
    assert without_secrets(shown) == shown


WELL_FORMED = [
    "postgresql://me:{}@host/db",
    "https://me:{}@host",
    "https://{}@host",
    "postgresql:///db?host=h&user=me&password={}",
    "postgresql://host/db?sslpassword={}&sslmode=require",
]


@given(st.sampled_from(WELL_FORMED), SECRETS)
def test_secrets_are_removed_from_library_messages_about_an_address(form: str, secret: str) -> None:
    address = form.format(quote(secret, safe=""))
    for said in (secret, quote(secret, safe=""), address):
        assert "Qx" not in scrubbed(f"could not reach {said}, sorry", address)


@pytest.mark.parametrize("password", ["a/b", "a?b", "a@b", "a#b", "a:b", "a b"])
def test_unquoted_passwords_are_removed_from_library_messages(password: str) -> None:
    said = scrubbed(f"password {password} is wrong", f"postgresql://me:{password}@host/db")
    assert password not in said
    assert said.endswith(f"{HIDDEN} is wrong")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://me:secret@db.example.org:5432/studies", "postgresql://me@db.example.org:5432/studies"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("postgresql:///db?host=/tmp&password=secret", f"postgresql:///db?host=/tmp&password={HIDDEN}"),
        ("postgresql://host/db?sslmode=require", "postgresql://host/db?sslmode=require"),
        ("postgresql://me:a/b@host/db", f"postgresql://{HIDDEN}"),
        ("https://token@mlflow.example.org/path", f"https://{HIDDEN}@mlflow.example.org/path"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("http://host:secret", f"http://{HIDDEN}"),
        ("sqlite:////runs/mlflow.db", "sqlite:////runs/mlflow.db"),
        ("runs/mlflow.db", "runs/mlflow.db"),
        ("host=x password=secret", HIDDEN),
    ],
)
def test_harmless_parts_of_an_address_stay_readable(address: str, shown: str) -> None:
    assert without_secrets(address) == shown


def test_secrets_from_environment_variables_are_removed_from_library_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "from outside")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "tokens")
    assert scrubbed("no: from outside, tokens") == f"no: {HIDDEN}, {HIDDEN}"


@pytest.mark.parametrize("name", ["plain", "a b", "a?b", "a%20b", "a#b", "ä?%"])
def test_sqlite_file_is_found_whatever_its_path(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    engine = sqlalchemy.create_engine(sqlite_address(folder / "a.db"))
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("create table t (x)"))
    engine.dispose()
    assert [path.name for path in folder.iterdir()] == ["a.db"]
    with sqlite3.connect(folder / "a.db") as found:
        assert found.execute("select name from sqlite_master").fetchall() == [("t",)]
    found.close()

"""Start and stop a real PostgreSQL server for tests, on loopback and in its own folder."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_USER = "postgres"


def binary(name: str) -> str | None:
    """Return the path of a server program; ``None`` if it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


def account() -> str | None:
    """Return the user that the server runs as, because it refuses to run as root."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return _USER if _USER in known else "nobody"


def available() -> bool:
    """Tell whether a server can be started."""
    return binary("initdb") is not None and binary("pg_ctl") is not None


@contextmanager
def server() -> Iterator[Server]:
    """Yield a running server, and stop it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-postgres-"))
    found = Server(folder)
    try:
        found.make()
        found.start()
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder, ignore_errors=True)


class Server:
    """A PostgreSQL server whose data are in one folder.

    Args:
        folder: folder of its data.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = int(free.getsockname()[1])
        self.url = f"postgresql://{_USER}@127.0.0.1:{self._port}/postgres"

    def make(self) -> None:
        """Create its folder."""
        owner = account()
        if owner is not None:
            shutil.chown(self._folder, owner)
        self._run("initdb", "-D", str(self._folder / "data"), "-U", _USER, "-A", "trust", "-E", "UTF8", "--no-sync")

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self._folder}"
        self._run(
            "pg_ctl", "-D", str(self._folder / "data"), "-o", options, "-l", str(self._folder / "log"), "-w", "start"
        )

    def database(self, name: str) -> str:
        """Make another database and return its address."""
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self._port), "-U", _USER, name)
        return self.url.removesuffix("postgres") + name

    def stop(self) -> None:
        """Stop the server at once."""
        if (self._folder / "data" / "postmaster.pid").exists():
            self._run("pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", "stop")

    def _run(self, name: str, *arguments: str) -> None:
        program = binary(name)
        assert program is not None
        done = subprocess.run(
            [program, *arguments],
            user=account(),
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout

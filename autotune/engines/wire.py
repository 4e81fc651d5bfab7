"""Pass JSON documents and open files between two processes, and reject anything else that arrives."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from typing import Any

from autotune.errors import EngineError, a_kind

_HEAD = struct.Struct(">4sQ")
_MARK = b"ATN1"
_FILE = b"F"
_LIMIT_BYTES = 64 * 2**20


class GarbledError(EngineError):
    """Something other than a document or a file arrived."""


class Wire:
    """A socket that carries documents and open files.

    Args:
        connection: one end of a stream socket, which the wire closes.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, document: dict[str, Any]) -> None:
        """Send one document; numbers that are not finite are allowed.

        Raises:
            OSError: if the other side is gone.
        """
        payload = json.dumps(document).encode()
        self._connection.settimeout(None)
        self._connection.sendall(_HEAD.pack(_MARK, len(payload)) + payload)

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the next document.

        Args:
            timeout_s: seconds to wait for the whole document; ``None`` waits without limit.

        Raises:
            TimeoutError: if the document did not arrive in time.
            EOFError: if the other side is gone.
            GarbledError: if something else arrived.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        mark, size = _HEAD.unpack(self._take(_HEAD.size, until))
        if mark != _MARK or size > _LIMIT_BYTES:
            raise GarbledError("received something that is not a document")
        try:
            # Less strict than for files: a measurement's gradient may be infinite.
            document = json.loads(self._take(size, until))
        except (ValueError, RecursionError) as error:
            raise GarbledError(f"received something that is not a document: {error}") from error
        if not isinstance(document, dict):
            raise GarbledError(f"received {a_kind(document)}, which is not a document")
        return document

    def ready(self, timeout_s: float) -> bool:
        """Wait, and tell whether a document, or the end of the connection, arrived within the timeout."""
        self._connection.settimeout(timeout_s)
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return True

    def send_file(self, descriptor: int) -> None:
        """Send an open file; it stays open here.

        Raises:
            OSError: if the other side is gone.
        """
        self._connection.settimeout(None)
        socket.send_fds(self._connection, [_FILE], [descriptor])

    def receive_file(self) -> int:
        """Return the descriptor of the next file that the other side sends.

        Raises:
            EOFError: if the other side is gone.
            GarbledError: if something else arrived.
        """
        self._connection.settimeout(None)
        mark, descriptors, _, _ = socket.recv_fds(self._connection, len(_FILE), 1)
        if not mark:
            raise EOFError
        if mark != _FILE or not descriptors:
            raise GarbledError("received something that is not a file")
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def _take(self, size: int, until: float | None) -> bytes:
        taken = bytearray()
        while len(taken) < size:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            try:
                part = self._connection.recv(min(size - len(taken), 2**20))
            except ConnectionError as error:
                raise EOFError from error
            if not part:
                raise EOFError
            taken += part
        return bytes(taken)

"""Pass JSON documents, and open files, between two processes, so that whatever else arrives is told from them."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from typing import Any

from autotune.errors import EngineError

_HEAD = struct.Struct(">4sQ")
_MARK = b"ATN1"
_FILE = b"F"
_LIMIT_BYTES = 64 * 2**20


class GarbledError(EngineError):
    """What arrived is no document of ours."""


class Wire:
    """Send and receive documents over a socket.

    Args:
        connection: one end of a stream socket; it is the wire's to close.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, document: dict[str, Any]) -> None:
        """Send one document; a number that is not finite travels as one.

        Raises:
            OSError: if nobody listens.
        """
        payload = json.dumps(document).encode()
        self._connection.settimeout(None)
        self._connection.sendall(_HEAD.pack(_MARK, len(payload)) + payload)

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the next document.

        Args:
            timeout_s: seconds to wait for the whole of it; ``None`` waits for good.

        Raises:
            TimeoutError: if it did not come in time.
            EOFError: if the other side is gone.
            GarbledError: if what came is no document.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        mark, size = _HEAD.unpack(self._take(_HEAD.size, until))
        if mark != _MARK or size > _LIMIT_BYTES:
            raise GarbledError("what arrived is no document")
        try:
            # Not as strict as files are read: a gradient that overflowed is a measurement, too.
            document = json.loads(self._take(size, until))
        except (ValueError, RecursionError) as error:
            raise GarbledError(f"what arrived is no document: {error}") from error
        if not isinstance(document, dict):
            raise GarbledError(f"what arrived is a {type(document).__name__}, no document")
        return document

    def ready(self, timeout_s: float) -> bool:
        """Wait so many seconds at most, and tell whether there is something to receive, if only the end."""
        self._connection.settimeout(timeout_s)
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return True

    def send_file(self, descriptor: int) -> None:
        """Hand over an open file; it stays open here.

        Raises:
            OSError: if nobody listens.
        """
        self._connection.settimeout(None)
        socket.send_fds(self._connection, [_FILE], [descriptor])

    def receive_file(self) -> int:
        """Return the descriptor of the file that the other side hands over next.

        Raises:
            EOFError: if the other side is gone.
            GarbledError: if what came is no file.
        """
        self._connection.settimeout(None)
        mark, descriptors, _, _ = socket.recv_fds(self._connection, len(_FILE), 1)
        if not mark:
            raise EOFError
        if mark != _FILE or not descriptors:
            raise GarbledError("what arrived is no file")
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

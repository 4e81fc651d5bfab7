"""Read a pickle that holds plain types and arrays of bytes, and nothing that runs.

A pickle is a program. Here every name in it but those of numpy's array is refused, and those stand for records that
hold what they are given: neither numpy nor anything else is called with what the file says.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.errors import JobError

_ALLOWED = "a pickle of plain types and arrays of unsigned bytes"


class _Kind:
    """Stand for ``numpy.dtype``: hold its name."""

    def __init__(self, name: Any = "", *_: Any) -> None:
        self.name = name.decode("ascii", "replace") if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and alignment, which single bytes do not have."""


class _Array:
    """Stand for ``numpy.ndarray``: hold its shape, kind and bytes."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def read(self) -> NDArray[np.uint8]:
        """Return the array.

        Raises:
            ValueError: if it is not one of unsigned bytes, in C order and complete.
        """
        _, shape, kind, fortran, content = self.state
        if kind.name not in ("u1", "uint8", "|u1") or fortran or not isinstance(content, bytes):
            raise ValueError("an array is not one of unsigned bytes in C order")
        if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) != len(content):
            raise ValueError(f"an array of shape {shape} has {len(content)} bytes")
        return np.frombuffer(content, dtype=np.uint8).reshape(shape)


class _Reconstruct:
    """Stand for what makes an empty array, to be filled later."""

    def __new__(cls, *_: Any) -> Any:
        """Return a record in place of the array."""
        return _Array()


class _Encode:
    """Stand for ``_codecs.encode``, as which Python 3 writes bytes for Python 2."""

    def __new__(cls, text: str, encoding: str = "") -> Any:
        """Return the text's bytes."""
        if encoding != "latin1":
            raise ValueError(f"text is encoded as {encoding!r}")
        return text.encode("latin1")


_NAMES: dict[tuple[str, str], type] = {
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _Encode,
}


class _Unpickler(pickle.Unpickler):
    """Find the records above under numpy's names, and no other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the record of a name.

        Raises:
            UnpicklingError: for every other name.
        """
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _NAMES[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse what lies outside the file."""
        raise pickle.UnpicklingError("it asks for something outside the file")


def load_plain_pickle(path: Path, *, limit_bytes: int) -> dict[str, Any]:
    """Return the dictionary that a pickle holds; arrays of bytes in it are numpy's.

    Args:
        path: the file.
        limit_bytes: what it may be large.

    Raises:
        JobError: if it cannot be read, is larger, or holds anything else; nothing that it names has run.
    """
    try:
        if path.stat().st_size > limit_bytes:
            raise JobError(f"is larger than {limit_bytes} bytes", where=str(path), allowed=_ALLOWED)
        found = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except JobError:
        raise
    except Exception as error:
        # What hostile bytes make the unpickler raise is any exception at all.
        raise JobError(f"cannot be read ({error})", where=str(path), allowed=_ALLOWED) from error
    if not isinstance(found, dict):
        raise JobError(f"holds a {type(found).__name__}", where=str(path), allowed=_ALLOWED)
    try:
        return {
            key.decode("ascii", "replace") if isinstance(key, bytes) else str(key): (
                value.read() if isinstance(value, _Array) else value
            )
            for key, value in found.items()
        }
    except Exception as error:
        raise JobError(f"is damaged ({error})", where=str(path), allowed=_ALLOWED) from error

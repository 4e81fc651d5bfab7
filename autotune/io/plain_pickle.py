"""Read a pickle of plain types and arrays of bytes without running any code from it.

A pickle is a program for Python's unpickler, which calls the functions that the program names. This module interprets
the few harmless instructions itself and records calls instead of making them: no function that a file names is called,
and no state is kept between files.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.errors import InputError, JobError, a_kind
from autotune.io.files import read_bytes

_ALLOWED = "a pickle of plain types and arrays of unsigned bytes"
# A published batch of 10,000 images has about 30,000 instructions; each can create an object much larger than itself.
_MOST_INSTRUCTIONS = 2**18
_LONGEST_REASON = 120


class _Called:
    """The name of a function or class; it is never imported."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Kind:
    """Placeholder of a ``numpy.dtype``; single bytes have no byte order or alignment."""

    def __init__(self, name: Any) -> None:
        self.name = name.decode("ascii", "replace") if isinstance(name, bytes) else name


class _Array:
    """Placeholder of a ``numpy.ndarray`` with its unparsed state."""

    def __init__(self) -> None:
        self.state: Any = None

    def read(self) -> NDArray[np.uint8]:
        """Return the array.

        Raises:
            ValueError: if it is not a complete array of unsigned bytes in C order.
        """
        _, shape, kind, fortran, content = self.state
        plain = isinstance(kind, _Kind) and kind.name in ("u1", "uint8", "|u1")
        if not plain or fortran is not False or not isinstance(content, bytes):
            raise ValueError("an array is not one of unsigned bytes in C order")
        sizes = isinstance(shape, tuple) and len(shape) <= 8 and all(_is_size(size, len(content)) for size in shape)
        if not sizes or math.prod(shape) != len(content):
            raise ValueError(f"an array of another shape has {len(content)} bytes")
        return np.frombuffer(content, dtype=np.uint8).reshape(shape)


_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
# The call by which Python 3 writes bytes for Python 2.
_ENCODE = "_codecs encode"
_NAMES = (*_RECONSTRUCT, "numpy ndarray", "numpy dtype", _ENCODE)
# Instructions whose argument is the value.
_PLAIN = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
_TEXT = ("SHORT_BINUNICODE", "BINUNICODE")
_BYTES_OF_PYTHON_2 = ("SHORT_BINSTRING", "BINSTRING")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


class _Program:
    """Interpreter of a pickle's instructions.

    Args:
        content: the pickle.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        # The same text could be encoded many times: the total is limited to the size of the file.
        self._left_to_encode = len(content)
        self._effects: dict[str, Callable[[], None]] = {
            "PROTO": lambda: None,
            "FRAME": lambda: None,
            "MARK": lambda: self._marks.append(len(self._stack)),
            "EMPTY_TUPLE": lambda: self._stack.append(()),
            "EMPTY_LIST": lambda: self._stack.append([]),
            "EMPTY_DICT": lambda: self._stack.append({}),
            "TUPLE": lambda: self._stack.append(tuple(self._since_mark())),
            "TUPLE1": lambda: self._stack.append(tuple(self._last(1))),
            "TUPLE2": lambda: self._stack.append(tuple(self._last(2))),
            "TUPLE3": lambda: self._stack.append(tuple(self._last(3))),
            "APPEND": lambda: self._extend(self._last(1)),
            "APPENDS": lambda: self._extend(self._since_mark()),
            "SETITEM": lambda: self._update(self._last(2)),
            "SETITEMS": lambda: self._update(self._since_mark()),
            "MEMOIZE": lambda: self._keep(len(self._memo)),
            "STACK_GLOBAL": lambda: self._name("{} {}".format(*self._last(2))),
            "REDUCE": self._call,
            "BUILD": self._tell,
        }

    def result(self) -> Any:
        """Return the result of the program.

        Raises:
            ValueError: for an instruction that is not allowed or does not fit the stack.
        """
        for count, (instruction, argument, _) in enumerate(pickletools.genops(self._content)):
            if count >= _MOST_INSTRUCTIONS:
                raise ValueError(f"it has more than {_MOST_INSTRUCTIONS} instructions")
            if instruction.name == "STOP":
                break
            self._follow(instruction.name, argument)
        (found,) = self._stack
        return found

    def _follow(self, name: str, argument: Any) -> None:
        if name in _PLAIN or name in _TEXT:
            self._stack.append(argument)
        elif name in _BYTES_OF_PYTHON_2:
            self._stack.append(argument.encode("latin1"))
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._keep(argument)
        elif name in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name == "GLOBAL":
            self._name(argument)
        elif name in self._effects:
            self._effects[name]()
        elif name in ("PERSID", "BINPERSID"):
            raise ValueError("it refers to something outside the file")
        else:
            raise ValueError(f"it has the instruction {name}")

    def _last(self, count: int) -> list[Any]:
        """Pop the last items from the stack."""
        if len(self._stack) < count:
            raise ValueError("it pops more than the stack has")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _since_mark(self) -> list[Any]:
        mark = self._marks.pop()
        taken = self._stack[mark:]
        del self._stack[mark:]
        return taken

    def _keep(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ValueError("it appends to something that is not a list")
        self._stack[-1].extend(items)

    def _update(self, items: list[Any]) -> None:
        keys = items[::2]
        if type(self._stack[-1]) is not dict or len(items) % 2 or not all(type(key) in (bytes, str) for key in keys):
            raise ValueError("a dictionary item is not a name and a value")
        self._stack[-1].update(zip(keys, items[1::2], strict=True))

    def _name(self, name: str) -> None:
        if name not in _NAMES:
            raise ValueError(f"it names {name.replace(' ', '.')}")
        self._stack.append(_Called(name))

    def _call(self) -> None:
        """Push the result of a call, without making the call."""
        called, arguments = self._last(2)
        if not isinstance(called, _Called) or type(arguments) is not tuple:
            raise ValueError("it calls something that is not a function")
        if called.name in _RECONSTRUCT:
            # An empty array, to be filled later.
            self._stack.append(_Array())
        elif called.name == "numpy dtype" and arguments:
            self._stack.append(_Kind(arguments[0]))
        elif called.name == _ENCODE:
            self._stack.append(self._encoded(*arguments))
        else:
            raise ValueError(f"it calls {called.name.replace(' ', '.')}")

    def _encoded(self, text: object, encoding: object) -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise ValueError("text is encoded in another way than latin1")
        self._left_to_encode -= len(text)
        if self._left_to_encode < 0:
            raise ValueError("it encodes more than its size")
        return text.encode("latin1")

    def _tell(self) -> None:
        (state,) = self._last(1)
        told = self._stack[-1]
        if isinstance(told, _Array) and type(state) is tuple and len(state) == 5:
            told.state = state
        elif not isinstance(told, _Kind):
            raise ValueError("it sets the state of an object without one")


def _is_size(size: object, most: int) -> bool:
    return type(size) is int and 0 <= size <= most


def _shown(error: Exception) -> str:
    """Format a reason, which may quote the file, as a short line."""
    said = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
    return said if said.isprintable() else ascii(said)


def load_plain_pickle(path: Path, *, limit_bytes: int) -> dict[str, Any]:
    """Return the dictionary in a pickle, with arrays of bytes as numpy arrays.

    Args:
        path: the file.
        limit_bytes: the largest allowed size.

    Raises:
        JobError: if the file cannot be read, is too large, or contains anything else; no code from it has run.
    """
    where = str(path)
    try:
        content = read_bytes(path, limit_bytes=limit_bytes)
    except InputError as error:
        raise JobError(error.problem, where=where, allowed=_ALLOWED) from error
    try:
        found = _Program(content).result()
    except Exception as error:
        # The standard library parses the instructions; hostile bytes can make it raise any exception.
        raise JobError(f"cannot be read ({_shown(error)})", where=where, allowed=_ALLOWED) from error
    if not isinstance(found, dict):
        raise JobError(f"contains {a_kind(found)}", where=where, allowed=_ALLOWED)
    try:
        return {
            key.decode("ascii", "replace") if isinstance(key, bytes) else key: (
                value.read() if isinstance(value, _Array) else value
            )
            for key, value in found.items()
        }
    except Exception as error:
        raise JobError(f"is damaged ({_shown(error)})", where=where, allowed=_ALLOWED) from error

"""Validate documents: strict types, no unknown keys, numbers within bounds.

A kind of document is a dataclass made by :func:`document`, or one with ``__pydantic_config__ = STRICT``. Every problem
becomes one :class:`InputError` that names the file, the key, its value and what is allowed. ``autotune.io.files`` reads
the files.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Interval

from autotune.errors import InputError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

# The required `__pydantic_config__` of a kind of document.
STRICT = {"strict": True, "extra": "forbid"}

# Bounds of numbers in documents: sums and products of such numbers stay finite.
Count = Annotated[int, Interval(ge=0, le=2**53)]
# Accepted by the random generators of all libraries, with room for derived seeds.
LARGEST_SEED = 2**31 - 1
Seed = Annotated[int, Interval(ge=0, le=LARGEST_SEED)]
Bytes = Annotated[int, Interval(ge=0, le=2**60)]
# Difference of two sizes in bytes.
Level = Annotated[int, Interval(ge=-(2**60), le=2**60)]
Seconds = Annotated[float, Interval(ge=0, le=1e12)]
Quantity = Annotated[float, Interval(ge=-1e30, le=1e30)]
NotNegative = Annotated[float, Interval(ge=0, le=1e30)]
# Ratios of two times.
LEAST_RATIO = 1e-30
Ratio = Annotated[float, Interval(ge=LEAST_RATIO, le=1 / LEAST_RATIO)]
Positive = Annotated[float, Interval(gt=0, le=1e30)]

# What is allowed instead of a wrong value, by pydantic's name of the problem.
_ALLOWED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true, false",
    "dict_type": "an object",
    "mapping_type": "an object",
    "dataclass_type": "an object",
    "list_type": "a list",
    "tuple_type": "a list",
    "none_required": "null",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
}
# Characters of a wrong value that an error quotes.
_QUOTED = 80

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def document(kind: type[_T]) -> type[_T]:
    """Turn a class into a kind of document: a frozen dataclass whose fields are the document's keys."""
    if "__pydantic_config__" not in vars(kind):
        kind.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
    return dataclass(frozen=True, slots=True, kw_only=True)(kind)


def validated(
    kind: type[_T],
    document: object,
    *,
    where: str,
    version: int | None = None,
    error: type[InputError] = InputError,
) -> _T:
    """Convert a document to an object of its kind.

    Args:
        kind: the type; see the module's docstring.
        document: a JSON value, as returned by :func:`autotune.io.files.parse_json`.
        where: the file and the place in it, for errors.
        version: the required ``version`` of the document; ``None`` if the kind has none.
        error: class of the raised error.

    Raises:
        InputError: of the class ``error``, naming the first wrong key or value and what is allowed.
    """
    values = _versioned(document, version, where, error) if version is not None else document
    from pydantic import ValidationError

    try:
        # Validated as JSON, strict types accept a list for a tuple and text for a member of an enumeration.
        return cast("_T", _adapter(cast("Any", kind)).validate_json(json.dumps(values), strict=True))
    except ValidationError as problems:
        problem, allowed = _first(kind, problems)
        raise error(problem, where=where, allowed=allowed) from problems
    except (TypeError, ValueError, RecursionError) as odd:
        raise error(f"is not JSON ({odd})", where=where, allowed="JSON values") from odd


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _versioned(document: object, version: int, where: str, error: type[InputError]) -> dict[str, object]:
    """Check a document's version, and return the document without it."""
    if not isinstance(document, Mapping):
        raise error(f"is {shown(document)}", where=where, allowed="an object")
    values = dict(document)
    found = values.pop("version", None)
    if type(found) is not int or found != version:
        raise error(f"version is {shown(found)}", where=where, allowed=str(version))
    return values


def _first(kind: Any, problems: ValidationError) -> tuple[str, str | list[str]]:
    """Return the first problem and what is allowed instead."""
    found = problems.errors(include_url=False)[0]
    context = found.get("ctx") or {}
    own = context.get("error")
    if isinstance(own, InputError):
        return own.problem, own.allowed
    place, named = _place(found["loc"]), found["type"]
    if named in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key {place!r}", _known(kind, found["loc"][:-1])
    if named in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{place} is missing", "a value"
    message = str(found["msg"]).removeprefix("Input should be ")
    allowed = _ALLOWED[named].format(**context) if named in _ALLOWED else message
    expected = str(context.get("expected", "")).replace("'", "").replace(" or ", ", ")
    return f"{place} is {shown(found['input'])}".strip(), expected or allowed


def _place(location: Sequence[int | str]) -> str:
    """Format a place in a document, as in ``arms[0].plan``; shortened, since keys may be long."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:_QUOTED]}" for part in location]
    return "".join(parts).removeprefix(".")[: 3 * _QUOTED]


def _known(kind: Any, location: Sequence[int | str]) -> list[str]:
    """Return the keys of the object at a place in a kind of document."""
    for part in location:
        if is_dataclass(kind):
            kind = get_type_hints(kind).get(str(part))
        else:
            # The type of the elements of a list or an object.
            kind = next((each for each in reversed(get_args(kind)) if each is not ...), None)
        if get_origin(kind) is UnionType:
            kind = get_args(kind)[0]
    return sorted(item.name for item in fields(kind) if item.init) if is_dataclass(kind) else []


def shown(value: object) -> str:
    """Format a value for an error, shortened, with text in quotes."""
    text = repr(value)
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED - 3]}..."

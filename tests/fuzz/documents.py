"""Seeded mutations of documents: bytes, JSON values and lines. ``uses`` loads the mutants."""

from __future__ import annotations

import copy
import json
import random
import tomllib
from collections.abc import Callable, Iterator
from typing import Any, Literal

from record import resealed

from autotune.io.files import sealed

Form = Literal["json", "lines", "toml", "text", "bytes"]

# The worker inserts the path of a folder here that no verb may open.
ELSEWHERE = "@elsewhere@"
# A module next to the runs that reports if it is imported.
BAIT = "fuzz_bait"
# Documents below this size are truncated at every byte.
SMALL_BYTES = 2048

# Texts of values in a document; Python's own writer could not write some of them.
_RAW_NUMBERS = (
    *("0", "-0.0", "1", "-1", "2", "3", "0.5", "1.5", "-0.5", "true", "false"),
    *("5e-324", "1e-300", "1e-12", "1e9", "1e15", "1e16", "1e20", "1e100", "1e308", "-1e308", "1.7976931348623157e308"),
    *("1e999", "-1e999", "NaN", "Infinity", "-Infinity", "1" + "0" * 400, "-" + "9" * 400, "1" * 5000),
    *("9007199254740992", "9007199254740993", "1152921504606846976", "9223372036854775807", "-9223372036854775808"),
    *("9223372036854775808", "18446744073709551616", "2147483648", "4294967296", "1000000", "65536"),
)
_RAW_TEXTS = (
    *('""', '" "', '"x"', '"null"', '"12"', '"\\u0000"', '"\\ud800"', '"a\\udfffb"', '"\\u001b[31mred"', '"a\\nb"'),
    *('"\\u202etxt.exe"', '"\\r\\n"', '"[/b]"', '"[bold]x"', '"<script>alert(1)</script>"', '"é漢😀"', '"%s%n{0}"'),
    *(f'"{"x" * 9_999}"', f'"{"y" * 100_000}"', f'"{"/a" * 2_500}"'),
    *('"../../../../etc/passwd"', '"/etc/shadow"', '"/dev/zero"', '"/dev/stdin"', '"/"', '"."', '".."', '"~/.ssh/id"'),
    *(f'"{ELSEWHERE}/secret.txt"', f'"{ELSEWHERE}"', '"../../elsewhere/secret.txt"', f'"{ELSEWHERE}/plan.json"'),
    *('"os:abort"', f'"{BAIT}:job"', f'"{ELSEWHERE}/{BAIT}.py:job"', '"nowhere.py:job"', f'"{BAIT}.py:job"'),
    *('"http://127.0.0.1:9/x"', '"postgresql://u:p@127.0.0.1:9/db"', '"sqlite:////etc/x"', '"ray://127.0.0.1:9"'),
    *('"file:///etc/passwd"', '"tcp://10.255.255.1:80"', '"NaN"', '"1e999"', '"1970-01-01T00:00:00Z"', '"0000"'),
)
_RAW_OTHERS = ("null", "[]", "{}", "[[]]", "[null]", '{"": 0}', "[1, 2]", '{"version": 1}', "[" * 200 + "]" * 200)
_DEEP = '{"a":' * 5_000 + "1" + "}" * 5_000
_KEYS = ("x", "", "version", "__class__", "__pydantic_config__", "\x00", "name", "run", "0", "-1", "k" * 5_000)
# Placeholder of a value that is inserted after writing.
_MARK, _TWICE = "@raw-value@", "@twice@"


def mutants(data: bytes, form: Form, seed: int) -> Iterator[bytes]:
    """Yield mutants of a document endlessly; the same for the same seed."""
    generator = random.Random(seed)
    while True:
        mutant = _mutant(data, form, generator)
        if mutant != data:
            yield mutant


def cut_off(data: bytes) -> list[bytes]:
    """Return a small document truncated at every byte; an empty list for a larger one."""
    return [data[:length] for length in range(len(data))] if len(data) < SMALL_BYTES else []


def _mutant(data: bytes, form: Form, generator: random.Random) -> bytes:
    if form == "bytes" or generator.random() < 0.2:
        return _repeated(data, _BYTES, generator)
    if form == "text":
        return _repeated(data, (*_LINES, *_BYTES, _cell, _cell, _cell, _cell), generator)
    if form == "toml":
        return _changed_toml(data, generator)
    if form == "lines":
        if generator.random() < 0.25:
            return _repeated(data, _LINES, generator)
        rows = data.splitlines(keepends=True)
        place = generator.randrange(len(rows))
        rows[place] = _json(rows[place], generator) + b"\n"
        return b"".join(rows)
    return _json(data, generator)


def _repeated(data: bytes, kinds: tuple[Callable[..., bytes], ...], generator: random.Random) -> bytes:
    for _ in range(generator.choice((1, 1, 1, 2, 4))):
        data = generator.choice(kinds)(data, generator)
    return data


# ------------------------------------------------------------------------------------------------------------- bytes


def _flip(data: bytes, generator: random.Random) -> bytes:
    if not data:
        return data
    place = generator.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << generator.randrange(8))]) + data[place + 1 :]


def _delete(data: bytes, generator: random.Random) -> bytes:
    begin = generator.randrange(len(data) + 1)
    return data[:begin] + data[begin + generator.choice((1, 2, 8, 64)) :]


def _insert(data: bytes, generator: random.Random) -> bytes:
    begin = generator.randrange(len(data) + 1)
    new = generator.choice(
        (b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b'"', b"{", b"]", b",", b"-", b"e9", b"0" * 40)
    )
    return data[:begin] + new + data[begin:]


def _double(data: bytes, generator: random.Random) -> bytes:
    begin = generator.randrange(len(data) + 1)
    end = begin + generator.choice((1, 16, 256, len(data)))
    return data[:end] + data[begin:end] + data[end:]


def _truncate(data: bytes, generator: random.Random) -> bytes:
    return data[: generator.randrange(len(data) + 1)]


_BYTES = (_flip, _delete, _insert, _double, _truncate)


# ------------------------------------------------------------------------------------------------------------- lines


def _drop_line(data: bytes, generator: random.Random) -> bytes:
    rows = data.splitlines(keepends=True)
    return b"".join(row for number, row in enumerate(rows) if number != generator.randrange(len(rows)))


def _double_line(data: bytes, generator: random.Random) -> bytes:
    rows = data.splitlines(keepends=True)
    if rows:
        rows.insert(generator.randrange(len(rows) + 1), generator.choice(rows))
    return b"".join(rows)


def _reorder(data: bytes, generator: random.Random) -> bytes:
    rows = data.splitlines(keepends=True)
    if len(rows) > 1:
        one, two = generator.sample(range(len(rows)), 2)
        rows[one], rows[two] = rows[two], rows[one]
    return b"".join(rows)


def _tear(data: bytes, generator: random.Random) -> bytes:
    rows = data.splitlines(keepends=True)
    kept = rows[: generator.randrange(len(rows) + 1)]
    return b"".join(kept) + (generator.choice(rows)[: generator.randrange(40)] if rows else b"")


_LINES = (_drop_line, _double_line, _reorder, _tear)


def _cell(data: bytes, generator: random.Random) -> bytes:
    """Change one field of a comma-separated table."""
    rows = data.split(b"\n")
    place = generator.randrange(len(rows))
    cells = rows[place].split(b",")
    cells[-1 if generator.random() < 0.5 else 0] = generator.choice((*_RAW_NUMBERS, *_RAW_TEXTS, *_DATES)).encode()
    rows[place] = b",".join(cells)
    return b"\n".join(rows)


_DATES = ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-03-01T01:00", "2026-02-30T00:00:00Z", "1e3")


# -------------------------------------------------------------------------------------------------------------- JSON


def _json(data: bytes, generator: random.Random) -> bytes:
    """Change values of a JSON document; its checksums are usually updated to match."""
    if generator.random() < 0.005:
        return _DEEP.encode()
    document, raw = _changed_values(json.loads(data), generator)
    text = json.dumps(document).replace(f'"{_TWICE}', '"')
    for value in raw:
        text = text.replace(f'"{_MARK}"', value, 1)
    return _sealed(text, generator).encode("utf-8", "surrogatepass")


def _sealed(text: str, generator: random.Random) -> str:
    """Return a record or manifest with an updated checksum: checksums detect damage, not forgery."""
    if generator.random() < 0.2:
        return text
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(document, dict) and "crc32" in document:
        return resealed(text).rstrip("\n")
    if isinstance(document, dict) and "manifest_sha256" in document:
        return json.dumps(sealed(document, "manifest_sha256"))
    return text


def _changed_values(document: Any, generator: random.Random) -> tuple[Any, list[str]]:
    """Return a document with a few changed values, and the texts of those that Python could not write."""
    document = copy.deepcopy(document)
    if not isinstance(document, dict | list):
        return document, []
    kinds = _VALUES if generator.random() < 0.5 else _GENTLE
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        holder, key = _place(document, generator)
        if key is not None:
            generator.choice(kinds)(holder, key, generator)
    raw: list[str] = []
    return _without_raw(document, raw), raw


class _Raw(str):
    """The text of a value."""


def _without_raw(value: Any, raw: list[str]) -> Any:
    """Return a value with a placeholder for each raw text, and collect the texts in writing order."""
    if isinstance(value, _Raw):
        raw.append(str(value))
        return _MARK
    if isinstance(value, dict):
        return {key: _without_raw(each, raw) for key, each in value.items()}
    return [_without_raw(each, raw) for each in value] if isinstance(value, list) else value


def _place(document: Any, generator: random.Random) -> tuple[Any, Any]:
    """Return a container of a document and a key or index in it; deeper containers are rarer."""
    holder = document
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return holder, None
        key = generator.choice(keys)
        value = holder[key]
        if not isinstance(value, dict | list) or not value or generator.random() < 0.15:
            return holder, key
        holder = value


def _replace(holder: Any, key: Any, generator: random.Random) -> None:
    holder[key] = _Raw(generator.choice(generator.choice((_RAW_NUMBERS, _RAW_TEXTS, _RAW_OTHERS))))


def _same_type(holder: Any, key: Any, generator: random.Random) -> None:
    """Replace a value by one of the same type, which is most likely to be accepted and do harm later."""
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int):
        holder[key] = generator.choice((0, 1, -1, 2, value + 1, value - 1, -value, value * 1000, 2**53, 2**60, 2**62))
    elif isinstance(value, float):
        near = (0.0, 1.0, -value, value * 1e-9, value * 1e9, 5e-324, 1e-30, 1e12, 1e15, 1e300, 1)
        holder[key] = generator.choice(near)
    elif isinstance(value, str):
        holder[key] = _Raw(generator.choice(_RAW_TEXTS))
    else:
        _replace(holder, key, generator)


def _drop(holder: Any, key: Any, generator: random.Random) -> None:
    del holder[key]


def _add(holder: Any, key: Any, generator: random.Random) -> None:
    value = _Raw(generator.choice((*_RAW_NUMBERS, *_RAW_TEXTS, *_RAW_OTHERS)))
    if isinstance(holder, dict):
        holder[generator.choice(_KEYS)] = value
    else:
        holder.insert(key, value)


def _twice(holder: Any, key: Any, generator: random.Random) -> None:
    if isinstance(holder, dict):
        holder[f"{_TWICE}{key}"] = holder[key]
    else:
        holder.insert(key, copy.deepcopy(holder[key]))


def _rename(holder: Any, key: Any, generator: random.Random) -> None:
    if isinstance(holder, dict):
        holder[generator.choice((*_KEYS, *holder))] = holder.pop(key)


def _swap(holder: Any, key: Any, generator: random.Random) -> None:
    other = generator.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[key], holder[other] = holder[other], holder[key]


def _empty(holder: Any, key: Any, generator: random.Random) -> None:
    holder[key] = type(holder[key])() if isinstance(holder[key], dict | list) else None


def _shrink(holder: Any, key: Any, generator: random.Random) -> None:
    value = holder[key]
    if isinstance(value, list) and value:
        del value[generator.randrange(len(value)) :]
    else:
        holder[key] = None


def _plausible(holder: Any, key: Any, generator: random.Random) -> None:
    """Replace a value by one that this kind of document might allow."""
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int):
        holder[key] = generator.choice((0, 1, 2, 3, value + 1, max(value - 1, 0), value // 2, value * 1000, 2**50))
    elif isinstance(value, float):
        holder[key] = generator.choice((0.0, 1.0, 0.5, 5e-324, 1e-12, value * 1e-6, value * 1e6, 1e12, 1e15, 3))
    elif isinstance(value, str):
        holder[key] = _Raw(generator.choice((*_RAW_TEXTS[:20], '"save"', '"fp32"', '"bf16"', '"fp16"', '"tiny"')))
    elif isinstance(value, list) and value:
        generator.choice((_twice_within, _shrink, _empty))(holder, key, generator)
    else:
        _empty(holder, key, generator)


def _twice_within(holder: Any, key: Any, generator: random.Random) -> None:
    holder[key].append(copy.deepcopy(generator.choice(holder[key])))


def _cousin(holder: Any, key: Any, generator: random.Random) -> None:
    """Replace a value by that of another key in the same object."""
    holder[key] = copy.deepcopy(
        holder[generator.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))]
    )


_GENTLE = (_plausible, _plausible, _plausible, _cousin, _swap, _drop)
_VALUES = (_replace, _replace, _same_type, _same_type, _same_type, _drop, _add, _twice, _rename, _swap, _empty, _shrink)


# -------------------------------------------------------------------------------------------------------------- TOML


def _changed_toml(data: bytes, generator: random.Random) -> bytes:
    document, raw = _changed_values(tomllib.loads(data.decode()), generator)
    text = _toml(document)
    for value in raw:
        text = text.replace(f'"{_MARK}"', value, 1)
    return text.encode("utf-8", "surrogatepass")


def _toml(document: dict[str, Any]) -> str:
    """Return a document as TOML, with values in JSON notation, which TOML shares except for ``null``."""
    lines, tables = [], []
    for key, value in document.items():
        if isinstance(value, dict):
            tables.append(f"[{_toml_key(key)}]")
            tables += [f"{_toml_key(each)} = {_toml_value(found)}" for each, found in value.items()]
        else:
            lines.append(f"{_toml_key(key)} = {_toml_value(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _toml_key(key: str) -> str:
    return json.dumps(key.removeprefix(_TWICE))


def _toml_value(value: Any) -> str:
    return json.dumps(value)

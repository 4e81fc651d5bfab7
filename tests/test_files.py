"""Files: strict JSON in, atomic files out."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune import InputError
from autotune.files import (
    append_json_line,
    parse_json,
    read_json,
    refuse_unknown_keys,
    write_atomic,
    write_json,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), values, max_size=4))
def test_a_document_survives_being_written_and_parsed(document):
    assert parse_json(json.dumps(document), where="x") == document


def test_a_document_survives_being_written_and_read(tmp_path: Path):
    document = {"name": "grün", "values": [1, 2.5, None, True], "deep": {"a": {"b": []}}}
    write_json(tmp_path / "a.json", document)
    assert read_json(tmp_path / "a.json") == document


def test_a_written_file_can_be_read_by_others_and_nothing_else_is_left(tmp_path: Path):
    write_atomic(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_bytes_are_written_as_they_are(tmp_path: Path):
    write_atomic(tmp_path / "a", b"\x00\xff")
    assert (tmp_path / "a").read_bytes() == b"\x00\xff"


def test_a_reader_that_holds_the_old_file_keeps_the_old_content(tmp_path: Path):
    path = tmp_path / "a"
    write_atomic(path, "old")
    with path.open() as reader:
        write_atomic(path, "new, and longer")
        assert reader.read() == "old"
    assert path.read_text() == "new, and longer"


def test_a_write_that_fails_leaves_the_old_file_and_no_temporary(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_text("x")
    # A file cannot replace a folder: the last act of writing fails.
    with pytest.raises(OSError, match="folder"):
        write_atomic(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "kept").read_text() == "x"


def test_writing_into_a_missing_folder_is_an_os_error(tmp_path: Path):
    with pytest.raises(OSError, match="No such file or directory"):
        write_atomic(tmp_path / "missing" / "a", "text")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_does_not_have_are_not_written(tmp_path: Path, number: float):
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        write_json(tmp_path / "a.json", {"x": number})
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        append_json_line(tmp_path / "a.jsonl", {"x": number})
    assert read_json(tmp_path / "a.json") == {"x": 1}


def test_records_are_appended_one_a_line(tmp_path: Path):
    for index in range(3):
        append_json_line(tmp_path / "a.jsonl", {"index": index, "text": "two\nlines"})
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2]


@pytest.mark.parametrize("whole", [b"", b'{"index": 0}\n'])
def test_a_line_that_was_cut_off_makes_room_for_the_next_record(tmp_path: Path, whole: bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(whole + b'{"index": 1, "te')
    append_json_line(path, {"index": 1})
    assert path.read_bytes() == whole + b'{"index": 1}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', r"key 'a' stands twice"),
        ('{"b": {"a": 1, "a": 1}}', r"key 'a' stands twice"),
        ('{"a": NaN}', r"the number NaN is not finite"),
        ('{"a": -Infinity}', r"the number -Infinity is not finite"),
        ('{"a": 1e999}', r"not finite"),
        ('{"a": [-1e999]}', r"not finite"),
        ("[1]", r"holds a list \(allowed: one JSON object\)"),
        ("3", r"holds a int \(allowed: one JSON object\)"),
        ("", r"is not JSON"),
        ('{"a": 1', r"is not JSON"),
        ('{"a": 1} {}', r"is not JSON"),
        ("{'a': 1}", r"is not JSON"),
        ("[" * 100_000, r"is not JSON"),
        ('{"a": ' + "1" * 5000 + "}", r"is not JSON|digits"),
        ("\ufeff{}", r"is not JSON"),
    ],
)
def test_what_is_not_strict_json_is_refused_in_one_line_that_names_the_place(text: str, message: str):
    with pytest.raises(InputError, match=message) as raised:
        parse_json(text, where="plan.json")
    assert str(raised.value).startswith("plan.json: ")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_missing_a_folder_not_text_or_too_large_is_refused_by_name(tmp_path: Path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large.json").write_text('{"a": "' + "x" * 100 + '"}')
    for name, message in (
        ("missing.json", r"cannot be read \(No such file or directory\)"),
        (".", r"cannot be read \(Is a directory\)"),
        ("bytes.json", "is not UTF-8 text"),
        ("large.json", "the file is larger than 50 bytes"),
    ):
        with pytest.raises(InputError, match=message) as raised:
            read_json(tmp_path / name, limit_bytes=50 if name == "large.json" else 64 * 2**20)
        assert str(tmp_path) in str(raised.value)


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused_with_one_input_error(text: str):
    try:
        document = parse_json(text, where="x")
    except InputError:
        return
    assert isinstance(document, dict)


def test_the_first_unknown_key_is_named_with_the_known_ones():
    with pytest.raises(InputError, match=r"^here: unknown key 'c' \(allowed: a, b\)$"):
        refuse_unknown_keys({"a": 1, "d": 1, "c": 1}, frozenset({"b", "a"}), where="here")
    refuse_unknown_keys({"a": 1}, frozenset({"a", "b"}), where="here")

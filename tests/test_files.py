"""Tests of files: strict JSON is read, and files are written atomically."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune import InputError
from autotune.io.files import (
    append_json_line,
    inside,
    parse_json,
    read_json,
    read_json_lines,
    read_text,
    require_plain,
    write_atomic,
    write_json,
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: x == 0 or abs(x) >= 1e-290)
    | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def short_path() -> Iterator[Path]:
    # The path of a socket is limited to about a hundred characters.
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@given(st.dictionaries(st.text(), values, max_size=4))
def test_document_round_trips_through_text(document):
    assert parse_json(json.dumps(document), where="x") == document


def test_document_round_trips_through_a_file(tmp_path: Path):
    document = {"name": "grün", "values": [1, 2.5, None, True], "deep": {"a": {"b": []}}}
    write_json(tmp_path / "a.json", document)
    assert read_json(tmp_path / "a.json") == document


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_written_file_follows_the_umask_and_leaves_no_temporary(tmp_path: Path, umask: int, mode: int):
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "a", "text")
        append_json_line(tmp_path / "b", {})
    finally:
        os.umask(before)
    assert (tmp_path / "a").read_text() == "text"
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"} == {mode}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_bytes_are_written_unchanged(tmp_path: Path):
    write_atomic(tmp_path / "a", b"\x00\xff")
    assert (tmp_path / "a").read_bytes() == b"\x00\xff"


def test_open_reader_keeps_the_old_content_after_a_replacement(tmp_path: Path):
    path = tmp_path / "a"
    write_atomic(path, "old")
    with path.open() as reader:
        write_atomic(path, "new, and longer")
        assert reader.read() == "old"
    assert path.read_text() == "new, and longer"


def test_failed_write_keeps_the_old_file_and_leaves_no_temporary(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_text("x")
    with pytest.raises(InputError, match="is a folder"):
        write_atomic(tmp_path / "folder", "text")
    with pytest.raises(OSError, match="File name too long"):
        write_atomic(tmp_path / ("x" * 300), "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "kept").read_text() == "x"


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    (path.parent / "elsewhere").write_text("kept")
    path.symlink_to(path.parent / "elsewhere")


def _dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root can make a device")


SPECIAL = {
    "pipe": _pipe,
    "link": _link,
    "dangling": _dangling,
    "socket": _socket,
    "device": _device,
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_replaced_or_appended_to(short_path: Path, kind: str):
    path = short_path / "target"
    SPECIAL[kind](path)
    before = os.lstat(path)
    for write in (write_atomic, write_json, append_json_line):
        with pytest.raises(InputError, match=r"target: is a \w+ \(allowed: a new file, or a regular one"):
            write(path, "{}" if write is write_atomic else {})
    assert os.lstat(path) == before
    assert {entry.name for entry in short_path.iterdir()} <= {"target", "elsewhere"}
    if kind == "link":
        assert path.read_text() == "kept"


@pytest.mark.parametrize("kind", [kind for kind in SPECIAL if kind != "link"])
def test_only_regular_files_are_read_and_a_pipe_does_not_block(short_path: Path, kind: str):
    path = short_path / "source"
    SPECIAL[kind](path)
    for read in (read_json, read_json_lines, read_text):
        with pytest.raises(InputError, match=r"source: (is a \w+|cannot be read)"):
            read(path)


def test_link_is_read_unless_it_could_lead_outside_a_folder(tmp_path: Path):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "a.json")
    assert read_json(tmp_path / "link") == {}
    with pytest.raises(InputError, match=r"link: is a link"):
        read_json(tmp_path / "link", follow=False)


def test_size_limit_is_enforced_while_reading(tmp_path: Path):
    # The system reports a size of 0.
    endless = Path("/proc/self/maps")
    if endless.is_file():
        with pytest.raises(InputError, match="the file is larger than 10 bytes"):
            read_text(endless, limit_bytes=10)
    (tmp_path / "a").write_bytes(b"x" * 11)
    with pytest.raises(InputError, match="the file is larger than 10 bytes"):
        read_text(tmp_path / "a", limit_bytes=10)
    assert read_text(tmp_path / "a", limit_bytes=11) == "x" * 11


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "missing/file", "a/b"])
def test_impossible_path_is_an_input_error(tmp_path: Path, name: str):
    (tmp_path / "a").write_text("")
    with pytest.raises(InputError, match="cannot be read"):
        read_text(tmp_path / name)


def test_torn_last_line_is_dropped_and_damaged_lines_are_named(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "\\u2028"}\n{"a": 3')
    assert read_json_lines(path) == [{"a": 1}, {"a": "\u2028"}]
    path.write_bytes(b'{"a": 1}\n{"a": \xff}\n')
    with pytest.raises(InputError, match=r"a.jsonl line 2: is not UTF-8 text at byte 6"):
        read_json_lines(path)


@pytest.mark.parametrize("name", ["..", "../x", "/etc/hosts", "a/../../x", "", ".", "a\0b", "\0"])
def test_path_outside_a_folder_is_rejected(tmp_path: Path, name: str):
    with pytest.raises(InputError, match="lies outside"):
        inside(tmp_path, name)


def test_relative_and_absolute_paths_within_a_folder_are_found(tmp_path: Path):
    assert inside(tmp_path, "a/b") == tmp_path / "a" / "b"
    assert inside(tmp_path, str(tmp_path / "a")) == tmp_path / "a"


@pytest.mark.parametrize("kind", [kind for kind in SPECIAL if kind != "folder"])
def test_folder_with_special_files_is_not_plain(short_path: Path, kind: str):
    folder = short_path / "run"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a").write_text("x")
    require_plain(folder)
    SPECIAL[kind](folder / "deep" / "odd")
    with pytest.raises(InputError, match=r"odd: is a (pipe|link|socket|device)"):
        require_plain(folder)


def test_a_temporary_file_that_vanishes_while_it_is_inspected_does_not_matter(tmp_path: Path):
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            write_json(tmp_path / "written.json", {"a": 1})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3000):
            require_plain(tmp_path)
    finally:
        ended.set()
        writer.join()


def test_writing_into_a_missing_folder_is_an_os_error(tmp_path: Path):
    with pytest.raises(OSError, match="No such file or directory"):
        write_atomic(tmp_path / "missing" / "a", "text")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_lacks_are_not_written(tmp_path: Path, number: float):
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        write_json(tmp_path / "a.json", {"x": number})
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        append_json_line(tmp_path / "a.jsonl", {"x": number})
    assert read_json(tmp_path / "a.json") == {"x": 1}


def test_records_are_appended_one_per_line(tmp_path: Path):
    for index in range(3):
        append_json_line(tmp_path / "a.jsonl", {"index": index, "text": "two\nlines"})
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2]


@pytest.mark.parametrize("whole", [b"", b'{"index": 0}\n'])
def test_record_is_appended_after_a_torn_line(tmp_path: Path, whole: bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(whole + b'{"index": 1, "te')
    append_json_line(path, {"index": 1})
    assert path.read_bytes() == whole + b'{"index": 1}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', r"key 'a' appears twice"),
        ('{"b": {"a": 1, "a": 1}}', r"key 'a' appears twice"),
        ('{"a": NaN}', r"the number NaN is not finite"),
        ('{"a": -Infinity}', r"the number -Infinity is not finite"),
        ('{"a": 1e999}', r"not finite"),
        ('{"a": [-1e999]}', r"not finite"),
        ("[1]", r"contains a list \(allowed: one JSON object\)"),
        ("3", r"contains an int \(allowed: one JSON object\)"),
        ("", r"is not JSON"),
        ('{"a": 1', r"is not JSON"),
        ('{"a": 1} {}', r"is not JSON"),
        ("{'a': 1}", r"is not JSON"),
        ("[" * 100_000, r"is not JSON"),
        ('{"a": ' + "1" * 5000 + "}", r"the number 1+ needs more than 64 bits"),
        ('{"a": ' + str(2**63) + "}", r"the number 9223372036854775808 needs more than 64 bits"),
        ('{"a": "\\ud800"}', r"contains half of a surrogate pair"),
        ('{"\\udFFf": 1}', r"contains half of a surrogate pair"),
        ("\ufeff{}", r"is not JSON"),
    ],
)
def test_invalid_json_is_rejected_in_one_line_with_its_position(text: str, message: str):
    with pytest.raises(InputError, match=message) as raised:
        parse_json(text, where="plan.json")
    assert str(raised.value).startswith("plan.json: ")
    assert "\n" not in str(raised.value)


def test_missing_folder_binary_and_oversized_files_are_rejected_by_name(tmp_path: Path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large.json").write_text('{"a": "' + "x" * 100 + '"}')
    for name, message in (
        ("missing.json", r"cannot be read \(No such file or directory\)"),
        (".", r"is a folder"),
        ("bytes.json", "is not UTF-8 text"),
        ("large.json", "the file is larger than 50 bytes"),
    ):
        with pytest.raises(InputError, match=message) as raised:
            read_json(tmp_path / name, limit_bytes=50 if name == "large.json" else 64 * 2**20)
        assert str(tmp_path) in str(raised.value)


@given(st.text(max_size=40))
def test_any_text_parses_or_gives_one_input_error(text: str):
    try:
        document = parse_json(text, where="x")
    except InputError:
        return
    assert isinstance(document, dict)

"""Tests of the restricted pickle reader: no code runs, and memory stays bounded."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import public_folders
import pytest

from autotune import JobError
from autotune.io.plain_pickle import load_plain_pickle

LIMIT = 2**26
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
KIND = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
ENCODE = b"c_codecs\nencode\nq\x00X%sq\x01X\x06\x00\x00\x00latin1q\x02"


def whole(body: bytes) -> bytes:
    return b"\x80\x02}(" + body + b"u."


def state_of(name: bytes, attribute: bytes) -> bytes:
    """Return a pickle that would set an attribute of one of our classes if the reader returned classes."""
    return b"\x80\x02c" + name + b"\n(N}U" + bytes([len(attribute)]) + attribute + b"Nstb0}."


HOSTILE: dict[str, bytes] = {
    "a memo of a billion": b"\x80\x02Nr\x00\x00\x00\x40.",
    "a memo of 2^28": b"\x80\x02Nr\x00\x00\x00\x10.",
    "a memo of 2^32": b"\x80\x02Nr\xff\xff\xff\xff.",
    "a memo of text": b"\x80\x02Np268435456\n.",
    "bytes of 2^60": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"x.",
    "bytes of 2^31": b"\x80\x02T" + struct.pack("<i", 2**31 - 1) + b"x.",
    "bytes below 0": b"\x80\x02T" + struct.pack("<i", -1) + b"x.",
    "text of 2^60": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.",
    "a frame of 2^60": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"N.",
    "a long number": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
    "a number of a million digits": b"\x80\x02L" + b"9" * 1_000_000 + b"L\n.",
    "lists without end": b"\x80\x02" + b"]" * 5_000_000 + b".",
    "marks without end": b"\x80\x02" + b"(" * 5_000_000 + b".",
    "memos without end": b"\x80\x04N" + b"\x94" * 5_000_000 + b".",
    "dictionaries without end": b"\x80\x02" + b"}" * 5_000_000 + b".",
    "a text encoded again and again": b"\x80\x02"
    + ENCODE % (struct.pack("<I", 2**22) + b"a" * 2**22)
    + b"h\x00h\x01h\x02\x86R" * 40_000
    + b".",
    "a key that takes for ever to hash": b"\x80\x02}K\x01\x85q\x00" + b"h\x00h\x00\x86q\x00" * 200 + b"K\x01s.",
    "a tuple that takes for ever to show": b"\x80\x02K\x01\x85q\x00" + b"h\x00h\x00\x86q\x00" * 200 + b".",
    "lists within lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "an instruction that is none": b"\x80\x02\xff.",
    "nothing": b"",
    "no end": b"\x80\x02}",
    "too little": b"\x80\x02a.",
    "an unknown memo": b"\x80\x02h\x05.",
    "pairs without a value": b"\x80\x02}(U\x01au.",
    "a function": b"\x80\x02cos\nsystem\n.",
    "a function by parts": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "a class": b"\x80\x02cautotune.plain_pickle\n_Program\n.",
    "an instance": b"(ios\nabort\n.",
    "a new object": b"\x80\x02cnumpy\nndarray\n)\x81.",
    "an extension": b"\x80\x02\x82\x01.",
    "a buffer": b"\x80\x05\x97.",
    "something outside": b"\x80\x02U\x01aQ.",
    "a call of an array": b"\x80\x02cnumpy\nndarray\n)R.",
    "a call of a number": b"\x80\x02K\x01)R.",
    "a call with a list": b"\x80\x02cnumpy\ndtype\n]R.",
    "a call without arguments": b"\x80\x02cnumpy\ndtype\n)R.",
    "an odd encoding": b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R.",
    "a state of a class": state_of(b"numpy\nndarray", b"read"),
    "a state of a kind": state_of(b"numpy\ndtype", b"__init__"),
    "a state of a function": state_of(b"numpy.core.multiarray\n_reconstruct", b"__new__"),
    "a state of a dictionary": b"\x80\x02}}b.",
    "an array of nothing": whole(b"U\x04data" + ARRAY),
    "an array of objects": whole(
        b"U\x04data" + ARRAY + b"(K\x01K\x01\x85" + KIND.replace(b"u1", b"O8") + b"\x89U\x01atb"
    ),
    "an array in Fortran's order": whole(b"U\x04data" + ARRAY + b"(K\x01K\x01\x85" + KIND + b"\x88U\x01atb"),
    "an array of many sizes": whole(
        b"U\x04data" + ARRAY + b"(K\x01(" + b"K\x01" * 99_999 + b"t" + KIND + b"\x89U\x01atb"
    ),
    "an array below 0": whole(b"U\x04data" + ARRAY + b"(K\x01J\xff\xff\xff\xff\x85" + KIND + b"\x89U\x01atb"),
    "an array of a huge size": whole(
        b"U\x04data" + ARRAY + b"(K\x01\x8a\xff" + b"\x7f" * 255 + b"\x85" + KIND + b"\x89U\x01atb"
    ),
    "an array of text": whole(b"U\x04data" + ARRAY + b"(K\x01K\x01\x85" + KIND + b"\x89X\x01\x00\x00\x00atb"),
    "terminal codes": b"\x80\x02c\x1b[31mred\nx\n.",
}
CHILD = """
import json, resource, sys
from pathlib import Path
from autotune import JobError
from autotune.io.plain_pickle import load_plain_pickle

names = {line.split(":")[0]: int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("Vm")}
room = names["VmSize"] * 1024 + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (room, room))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_plain_pickle(Path(sys.argv[1]), limit_bytes=2**26)
    said = "read"
except JobError as error:
    said = error.problem
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(json.dumps({"said": said, "grown": grown}))
"""


def read_in_a_child(path: Path, room: int) -> dict:
    """Read a file in a process with a limited number of bytes left."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(room)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-500:]
    return json.loads(done.stdout)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_pickle_is_one_line_and_does_not_affect_the_next_file(kind: str, tmp_path: Path) -> None:
    pixels, labels = public_folders.drawn_images(5, 0)
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(public_folders.pickle_of_python_2(pixels, labels))
    bad.write_bytes(HOSTILE[kind])
    for _ in range(2):
        with pytest.raises(JobError) as raised:
            load_plain_pickle(bad, limit_bytes=LIMIT)
        assert str(raised.value).isprintable()
        assert len(raised.value.problem) < 200
        found = load_plain_pickle(good, limit_bytes=LIMIT)
        assert np.array_equal(found["data"], pixels)
        assert found["labels"] == labels.tolist()


@pytest.mark.parametrize(
    "kind",
    [
        "a memo of 2^28",
        "bytes of 2^60",
        "lists without end",
        "memos without end",
        "dictionaries without end",
        "a text encoded again and again",
        "lists within lists",
    ],
)
def test_hostile_pickle_needs_memory_of_at_most_a_few_times_its_size(kind: str, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(HOSTILE[kind])
    room = 8 * len(HOSTILE[kind]) + 2**26
    found = read_in_a_child(tmp_path / "bad", room)
    assert "MemoryError" not in found["said"]
    assert found["grown"] < room


def test_pickle_of_published_size_needs_memory_of_a_few_times_its_size(tmp_path: Path) -> None:
    pixels, labels = public_folders.drawn_images(10_000, 0)
    content = public_folders.pickle_of_python_2(pixels, labels)
    (tmp_path / "good").write_bytes(content)
    found = read_in_a_child(tmp_path / "good", 6 * len(content))
    assert found["said"] == "read"
    assert found["grown"] < 5 * len(content)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_pickles_of_current_python_are_read(protocol: int, tmp_path: Path) -> None:
    pixels, labels = public_folders.drawn_images(5, 0)
    names = [f"{label}.png" for label in labels]
    (tmp_path / "batch").write_bytes(
        pickle.dumps({"data": pixels, b"labels": labels.tolist(), "names": names, "n": 2**40}, protocol=protocol)
    )
    found = load_plain_pickle(tmp_path / "batch", limit_bytes=LIMIT)
    assert np.array_equal(found["data"], pixels)
    assert (found["labels"], found["names"], found["n"]) == (labels.tolist(), names, 2**40)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is a pipe"),
        (os.mkdir, "is a folder"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device"),
        (lambda path: path.symlink_to("nowhere"), "cannot be read"),
        (lambda path: path.write_bytes(bytes(99)), "is larger than 98 bytes"),
        (lambda path: (path.touch(), os.truncate(path, 2**40)), "is larger than 98 bytes"),
    ],
    ids=["pipe", "folder", "device", "nowhere", "larger", "huge"],
)
def test_irregular_or_oversized_file_is_rejected_at_once(make, message: str, tmp_path: Path) -> None:
    make(tmp_path / "batch")
    with pytest.raises(JobError, match=message):
        load_plain_pickle(tmp_path / "batch", limit_bytes=98)


def test_size_limit_is_enforced_while_reading_a_file_of_unknown_size() -> None:
    # The system reports a size of 0 bytes for it.
    with pytest.raises(JobError, match="is larger than 10 bytes"):
        load_plain_pickle(Path("/proc/self/status"), limit_bytes=10)


def test_modified_bytes_are_either_rejected_or_read_as_plain_data(tmp_path: Path) -> None:
    pixels, labels = public_folders.drawn_images(1, 0)
    contents = [
        public_folders.pickle_of_python_2(pixels, labels),
        *(pickle.dumps({"data": pixels, "labels": [1]}, protocol=protocol) for protocol in (2, 4)),
    ]
    generator, path = random.Random(0), tmp_path / "batch"
    codes = [opcode.code.encode("latin1") for opcode in pickletools.opcodes]
    refused = 0
    for number in range(1500):
        content = bytearray(contents[number % 3])
        for _ in range(generator.randint(1, 3)):
            # The pixels are 3,072 bytes in the middle; the bytes around them are the pickle program.
            place = generator.choice([generator.randrange(120), len(content) - 1 - generator.randrange(40)])
            content[place : place + 1] = generator.choice([*codes, bytes([generator.randrange(256)])])
        path.write_bytes(bytes(content))
        try:
            assert isinstance(load_plain_pickle(path, limit_bytes=LIMIT), dict)
        except JobError:
            refused += 1
    assert refused > 500

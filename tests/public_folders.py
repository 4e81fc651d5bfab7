"""Tiny folders in the published formats of CIFAR-10 and WikiText-2."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

CIFAR_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
TEXT = " = Robert Boulter = \n \n Robert Boulter is an English film , television and theatre actor . \n" * 40


def drawn_images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images (count, 3072) whose mean brightness tells their label."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, count).astype(np.uint8)
    noise = generator.integers(0, 30, (count, 3072))
    return (labels[:, None] * 22 + noise).astype(np.uint8), labels


def pickle_of_python_2(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """Return a pickle as Python 2 wrote it for CIFAR-10: protocol 2, byte strings, and numpy's former names."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    content = pixels.tobytes()
    kind = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR"
    kind += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0) + b"t" + text(b"b") + b"tR"
    array += b"(" + number(1) + b"(" + number(len(pixels)) + number(3072) + b"t" + kind + b"\x89"
    array += b"T" + struct.pack("<i", len(content)) + content + b"tb"
    listed = b"](" + b"".join(number(int(label)) for label in labels) + b"e"
    entries = text(b"batch_label") + text(b"training batch 1 of 5") + text(b"labels") + listed + text(b"data") + array
    return b"\x80\x02}(" + entries + b"u."


def cifar_python(folder: Path, *, count: int = 60) -> Path:
    """Write the python version and return the folder that holds it."""
    inner = folder / "cifar-10-batches-py"
    inner.mkdir(parents=True)
    for seed, name in enumerate(CIFAR_BATCHES):
        (inner / name).write_bytes(pickle_of_python_2(*drawn_images(count, seed)))
    return folder


def cifar_binary(folder: Path, *, count: int = 60) -> Path:
    """Write the binary version and return the folder that holds it."""
    inner = folder / "cifar-10-batches-bin"
    inner.mkdir(parents=True)
    for seed, name in enumerate(CIFAR_BATCHES):
        pixels, labels = drawn_images(count, seed)
        (inner / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], axis=1).tobytes())
    return folder


def wikitext(folder: Path, ending: str = "raw") -> Path:
    """Write training and validation text and return the folder that holds them."""
    inner = folder / ("wikitext-2-raw" if ending == "raw" else "wikitext-2")
    inner.mkdir(parents=True)
    for part, text in (("train", TEXT * 3), ("valid", TEXT)):
        (inner / f"wiki.{part}.{ending}").write_text(text)
    return folder


def gpt2_vocabulary(folder: Path) -> Path:
    """Write ``vocab.json`` and ``merges.txt``: GPT-2's letters and two merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    for number, byte in enumerate(byte for byte in range(256) if byte not in letters):
        letters[byte] = chr(256 + number)
    words = [*(letters[byte] for byte in range(256)), "Ro", "Rob"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\nR o\nRo b\n")
    return folder

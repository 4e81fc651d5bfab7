"""Compilation of the fake device, once per version of its sources and of torch."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

AUTOLOAD = "autoload"
_SOURCES = Path(__file__).resolve().parent / "src"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")
_ENTRY_POINT = "[torch.backends]\nfake = fake_accelerator:autoload\n"


@functools.cache
def reason() -> str | None:
    """Return why the fake accelerator is not available in this process; None if it is."""
    if not sys.platform.startswith("linux"):
        return f"the fake accelerator is built on Linux only, not on {sys.platform}"
    if shutil.which(_compiler()[0]) is None:
        return f"the fake accelerator needs a C++ compiler, and there is no {_compiler()[0]}; CXX names another"
    if not (_torch() / "include" / "ATen").is_dir():
        return "the fake accelerator needs torch's headers, which this installation lacks"
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator() != torch.device("fake"):
        return "the fake accelerator stands in only where there is no real one"
    return None


@functools.cache
def build() -> Path:
    """Return the path of the library, compiling it if necessary.

    Raises:
        RuntimeError: If the sources do not compile.
    """
    folder = _cache() / _key()
    library = folder / "fake_accelerator.so"
    if library.exists():
        return library
    with _locked(folder.with_suffix(".lock")):
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                _compile(Path(scratch), made / library.name)
                _describe(made / AUTOLOAD)
                made.rename(folder)
    return library


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _torch() -> Path:
    return Path(torch.__file__).resolve().parent


def _cache() -> Path:
    """Return a cache folder that no other user can write to."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir())
    folder = root / f"autotune-fake-accelerator-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user; remove it or set XDG_CACHE_HOME")
    return folder


def _key() -> str:
    digest = hashlib.sha256(
        repr((torch.__version__, sys.version, _torch(), _compiler(), _FLAGS, _ENTRY_POINT)).encode()
    )
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(scratch: Path, library: Path) -> None:
    """Compile all sources as one, since reading torch's headers takes longest, and link them."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    include = [f"-I{_torch() / 'include'}"]
    everything, made = scratch / "everything.cpp", str(scratch / "everything.o")
    everything.write_text("".join(f'#include "{source}"\n' for source in sorted(_SOURCES.glob("*.cpp"))))
    _run([*_compiler(), *_FLAGS, abi, *include, "-c", str(everything), "-o", made])
    libraries = _torch() / "lib"
    link = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
    _run([*_compiler(), "-shared", made, *link, "-o", str(library)])


def _run(command: list[str]) -> None:
    """Run a command.

    Raises:
        RuntimeError: If it fails; the message contains its output.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the fake accelerator does not compile:\n{done.stdout}")


def _describe(folder: Path) -> None:
    """Write an entry point through which torch loads the device if `folder` is on the import path."""
    described = folder / "fake_accelerator-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-accelerator\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(_ENTRY_POINT)

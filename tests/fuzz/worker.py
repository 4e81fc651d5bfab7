"""Process that tries mutants: ``python worker.py SCRATCH SEED MUTANTS USE...`` prints its findings as JSON.

It cannot change anything outside its scratch folder, and reports every file it opened, every connection it made and
every process it started.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

# Seconds of CPU time that a mutant may take, and wall-clock seconds after which it is abandoned.
_SLOW_S, _GIVEN_UP_S = 5.0, 60.0
_EXAMPLES = 12
_STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.fork", "os.forkpty")
_CONNECTS = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")


class GivenUpError(Exception):
    """A mutant took far too long."""


class Findings:
    """Outcomes of the mutants of one use."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}
        self.seconds = 0.0

    def note(self, kind: str, example: str = "") -> None:
        self.counts[kind] += 1
        known = self.examples.setdefault(kind, [])
        if example and len(known) < _EXAMPLES and example not in known:
            known.append(example)

    def to_json(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "examples": self.examples, "seconds": round(self.seconds, 2)}


class Watch:
    """Monitor of forbidden actions while a mutant is tried."""

    def __init__(self) -> None:
        self.breaches: list[str] = []
        self._baits = ("fuzz_bait", "nowhere")

    def begin(self, scratch: Path) -> None:
        import guard

        read = [*guard.installation(), *guard.SYSTEM]
        guard.install(read, [scratch], report=self.breaches.append)
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS:
            self.breaches.append(f"{event}: {arguments[:2]!r}"[:200])
        elif event in _CONNECTS:
            self.breaches.append(f"{event}: {arguments[1:]!r}"[:200])
        elif event == "import" and str(arguments[0]).partition(".")[0] in self._baits:
            self.breaches.append(f"import of {arguments[0]}")
        elif event == "open" and "elsewhere" in Path(str(arguments[0])).parts:
            self.breaches.append(f"open of {arguments[0]}")


def main(scratch: Path, seed: int, count: int, names: list[str]) -> dict[str, Any]:
    """Try mutants of each use's document, and return the findings."""
    import uses

    uses.point_tables_at_tiny_jobs()
    chosen = [uses.USES[name] for name in names]
    runs = scratch / "runs"
    # Late imports and one-time reads must not be attributed to a mutant.
    pristine = {use.name: _pristine(use, runs) for use in chosen}
    watch = Watch()
    watch.begin(scratch)
    signal.signal(signal.SIGALRM, _give_up)
    found = {}
    for use in chosen:
        found[use.name] = _use(use, runs, seed, count, watch).to_json()
        sys.stderr.write(json.dumps({use.name: found[use.name]}) + "\n")
    return {"pristine": pristine, "uses": found}


def _pristine(use: Any, runs: Path) -> str:
    """Return what is wrong with a use of the recorded document; nothing should be."""
    folder = _fresh(use, runs, begin=True)
    try:
        with _quietly():
            use.run(folder, folder / use.file)
    except BaseException as error:
        return "" if use.refused else f"{type(error).__name__}: {error} {_place(error)}"
    return ""


def _use(use: Any, runs: Path, seed: int, count: int, watch: Watch) -> Findings:
    import documents

    findings = Findings()
    began = time.perf_counter()
    folder = _fresh(use, runs, begin=True)
    data = (folder / use.file).read_bytes()
    whole = max(3, round(count * use.share))
    cut = documents.cut_off(data) if count >= 1000 and use.share >= 0.5 else []
    elsewhere = str(runs.parent / "elsewhere").encode()
    for number, mutant in enumerate(
        itertools.chain(cut, itertools.islice(documents.mutants(data, use.form, seed), whole))
    ):
        folder = _fresh(use, runs)
        (folder / use.file).write_bytes(mutant.replace(documents.ELSEWHERE.encode(), elsewhere))
        _one(use, folder, findings, f"#{number}", watch)
    findings.seconds = time.perf_counter() - began
    return findings


def _one(use: Any, folder: Path, findings: Findings, label: str, watch: Watch) -> None:
    """Try one mutant and record the outcome."""
    from autotune.errors import AutotuneError

    findings.note("mutants")
    began, before = time.process_time(), len(watch.breaches)
    signal.alarm(int(_GIVEN_UP_S))
    try:
        with _quietly(findings):
            use.run(folder, folder / use.file)
        findings.note("accepted")
    except AutotuneError as error:
        findings.note("refused", str(error)[:200])
        text = str(error)
        if len(text.splitlines()) != 1 or not text.isprintable():
            findings.note("several lines", repr(text[:300]))
        if len(text) > 5_000:
            findings.note("long", f"{len(text)} characters: {text[:150]!r}")
        if not use.refused and folder.name not in text and Path(use.file).name not in text:
            findings.note("unnamed", text[:200])
    except BaseException as error:
        # A job file is a separate module with its own class.
        trained = type(error).__name__ == "Trained"
        findings.note("trained") if trained else _note_foreign(findings, label, error)
    finally:
        signal.alarm(0)
    spent = time.process_time() - began
    if spent > _SLOW_S:
        findings.note("slow", f"{label} {spent:.1f} s")
    for breach in watch.breaches[before:]:
        findings.note("breach", f"{label} {breach}")


def _note_foreign(findings: Findings, label: str, error: BaseException) -> None:
    findings.note("foreign", f"{label} {type(error).__name__}: {str(error)[:160]!r} {_place(error)}")
    findings.note(f"foreign at {_place(error)}")


@contextlib.contextmanager
def _quietly(findings: Findings | None = None) -> Any:
    import numpy as np

    out = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(out), np.errstate():
        warnings.simplefilter("always")
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    for one in caught if findings is not None else ():
        if issubclass(one.category, RuntimeWarning) and findings is not None:
            findings.note("warned", f"{one.message} {Path(one.filename).name}:{one.lineno}")


def _place(error: BaseException) -> str:
    """Return the place in the package that raised the exception."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}autotune{os.sep}" in frame.filename]
    last = (own or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def _fresh(use: Any, runs: Path, *, begin: bool = False) -> Path:
    """Return the recorded folder of a use without the mutated document; at the beginning, including it."""
    import uses

    kept = runs.parent / "laid-out" / use.name.replace(" ", "-").replace(":", "")
    folder = runs / use.folder
    if not kept.exists():
        shutil.rmtree(runs, ignore_errors=True)
        runs.mkdir()
        # Paths in the documents refer to the folder of runs.
        uses.laid_out(use, runs)
        shutil.copytree(runs, kept)
    elif begin or _names(runs) != _names(kept):
        # Commands that write in a run leave a lock file there.
        shutil.rmtree(runs)
        shutil.copytree(kept, runs)
    return folder


def _names(folder: Path) -> set[str]:
    return {
        f"{entry.name}/{name}"
        for entry in os.scandir(folder)
        for name in ([each.name for each in Path(entry).iterdir()] if entry.is_dir() else ("",))
    }


def _give_up(*_: object) -> None:
    raise GivenUpError("took too long")


def _enter(scratch: Path) -> None:
    """Enter the scratch folder and make libraries store their files there."""
    for name in ("home", "temporary", "elsewhere"):
        (scratch / name).mkdir()
    (scratch / "elsewhere" / "secret.txt").write_text("nobody may open this")
    (scratch / "elsewhere" / "fuzz_bait.py").write_text("raise SystemExit('was run')")
    (scratch / "elsewhere" / "plan.json").write_text("{}")
    home = str(scratch / "home")
    os.environ.update(HOME=home, MPLCONFIGDIR=home, XDG_CACHE_HOME=home, MLFLOW_TRACKING_URI="nowhere:")
    os.environ["TMPDIR"] = str(scratch / "temporary")
    # A package may have asked for it already.
    tempfile.tempdir = None
    sys.dont_write_bytecode = True
    os.chdir(scratch)


def _leave_root(scratch: Path) -> None:
    """Switch to the user "nobody", with its own scratch folder, if this process is privileged."""
    import guard

    if os.getuid() == 0:
        for path in (scratch, *scratch.rglob("*")):
            os.chown(path, guard.NOBODY, guard.NOBODY)
    guard.drop_rights()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    _enter(place)
    _leave_root(place)
    import logging

    logging.disable(logging.CRITICAL)
    print(json.dumps(main(place, int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))  # noqa: T201
    sys.stdout.flush()
    # Threads of libraries may wait forever.
    os._exit(0)

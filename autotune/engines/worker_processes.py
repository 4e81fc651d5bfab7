"""Start worker processes of this package, exchange documents with them, and classify how they end.

Documents go over sockets that the workers inherit, and printed output goes to a file without a name. Nothing is left
in any folder, however this process or a worker ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from autotune.engines import supervisor
from autotune.engines.rendezvous import listening_socket, rank_environment
from autotune.engines.wire import GarbledError, Wire
from autotune.errors import EngineError, InputError, one_line
from autotune.measurement import Failure
from autotune.mechanics import known_precisions

_PACKAGE = Path(__file__).resolve().parents[2]
# File in which the kernel counts the processes that it killed because memory ran out.
_MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")
# Bytes at the end of the workers' output that are searched for their last line.
_LOOKED_AT = 2**16
# Characters of that line, and of an exception, that a failure quotes.
_QUOTED, _TOLD = 300, 2000
# Seconds in which workers must end after a request, or after one of them ended.
_ENDING_S = 5.0


class WorkersError(EngineError):
    """The workers did not answer.

    Args:
        failure: the kind of failure.
        detail: one line about the failure.
        killed: whether a signal ended one of them, as another program may have sent.
    """

    def __init__(self, failure: Failure, detail: str, *, killed: bool = False) -> None:
        super().__init__(" ".join(detail.split()))
        self.failure = failure
        self.killed = killed


class Workers:
    """Processes that run a module until this object is closed: the ranks of a process group, or one process.

    The workers never search the working directory for libraries. They end together, at the latest with this process,
    and all processes that they started end with them.

    Args:
        module: the module, which calls :func:`opened` first.
        opening: the first document that every worker receives.
        ranks: number of ranks; ``None`` for one process outside any process group.
        environment: additional environment variables of the workers.
    """

    def __init__(
        self,
        module: str,
        opening: Mapping[str, Any],
        *,
        ranks: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._killed_before = _kills()
        self._ranks = ranks
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            self._output = ours.enter_context(tempfile.TemporaryFile())
            pairs = [socket.socketpair() for _ in range(1 + (ranks or 1))]
            for own, other in pairs:
                ours.enter_context(own)
                theirs.enter_context(other)
            handed = [[other.fileno() for _, other in pairs[1:]]]
            shared: Mapping[str, str] = {}
            if ranks is not None:
                store = theirs.enter_context(listening_socket())
                handed.append([store.fileno()])
                shared = rank_environment(ranks, store)
            numbers = [",".join(map(str, part)) for part in handed]
            self.process = subprocess.Popen(
                [sys.executable, "-P", supervisor.__file__, module, *numbers],
                stdin=pairs[0][1].fileno(),
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[number for part in handed for number in part],
                start_new_session=True,
                env={**os.environ, **shared, **(environment or {}), "PYTHONPATH": python_path()},
            )
            self._control = pairs[0][0]
            self._wires = [Wire(own) for own, _ in pairs[1:]]
            self._open = ours.pop_all()
        # The workers also search this process's module path for jobs, after their own.
        path = [entry for entry in sys.path if entry]
        self.send({**opening, "path": path, "excluded": known_precisions.to_json()})

    def send(self, document: dict[str, Any]) -> None:
        """Send a document to every worker; :meth:`answer` reports workers that are gone."""
        for wire in self._wires:
            with contextlib.suppress(OSError):
                wire.send(document)

    def send_files(self, descriptors: list[int]) -> None:
        """Pass an open file to every worker."""
        for wire, descriptor in zip(self._wires, descriptors, strict=True):
            with contextlib.suppress(OSError):
                wire.send_file(descriptor)

    def ready(self, timeout_s: float) -> bool:
        """Wait for the first worker, and tell whether it sent something within the timeout."""
        return self._wires[0].ready(timeout_s)

    def printed(self) -> int:
        """Return the number of bytes that the workers have printed so far."""
        return os.fstat(self._output.fileno()).st_size

    def first(self, timeout_s: float) -> dict[str, Any]:
        """Return the next document of the first worker; arguments and exceptions as for :meth:`answer`."""
        return self._received(self._wires[:1], timeout_s)[0]

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next document of the first worker, once every worker has sent one.

        Args:
            timeout_s: seconds to wait.

        Raises:
            InputError: if a worker refuses its input.
            WorkersError: if a worker raised, ended, or did not answer in time. Both errors end all workers.
        """
        return self._received(self._wires, timeout_s)[0]

    def close(self) -> None:
        """End the workers and all processes that they started."""
        self._control.close()
        try:
            self.process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        finally:
            self._open.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _received(self, wires: list[Wire], timeout_s: float) -> list[dict[str, Any]]:
        until, found = time.monotonic() + timeout_s, list[dict[str, Any]]()
        try:
            for wire in wires:
                found.append(wire.receive(_left(until)))
        except TimeoutError:
            self.close()
            raise WorkersError(Failure.TIMEOUT, f"no answer within {timeout_s:.0f} s") from None
        except GarbledError as error:
            self.close()
            raise WorkersError(Failure.CRASHED, str(error)) from None
        except (EOFError, OSError):
            pass
        if len(found) < len(wires) or any("failure" in document for document in found):
            try:
                raise self._cause(found)
            finally:
                self.close()
        # What the first worker has found counts for all later workers.
        known_precisions.keep_all(found[0].pop("excluded", {}))
        return found

    def _cause(self, said: list[dict[str, Any]]) -> EngineError | InputError:
        """Return the first failure; the others follow from it."""
        said = [document for document in [*said, *self._rest()] if "failure" in document]
        failures = sorted(said, key=lambda document: float(document["at"]))
        refused = next((document["refused"] for document in failures if document["refused"]), None)
        if refused is not None:
            return InputError.from_json(refused)
        number, code = self._first_end()
        # A worker that was killed, or ended silently, causes the exceptions of the others.
        if failures and (number is None or number in [document["rank"] for document in failures]):
            first = failures[0]
            return WorkersError(Failure(first["failure"]), f"{self._who(first['rank'])}{first['raised']}")
        return self._ended(self._who(number), code)

    def _ended(self, who: str, code: int | None) -> WorkersError:
        """Return the error for the exit code of the first worker to end."""
        killed = _kills()
        if code == -signal.SIGKILL and None not in (self._killed_before, killed) and self._killed_before != killed:
            return WorkersError(Failure.OUT_OF_MEMORY, f"{who}the system killed it because memory ran out")
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"ended by {_signal_name(-code)}"
        else:
            how = f"ended with exit code {code}"
        return WorkersError(Failure.CRASHED, f"{who}{how}{self._last_words()}", killed=code is not None and code < 0)

    def _who(self, number: int | None) -> str:
        """Return the prefix of a sentence about one of several workers."""
        return "" if self._ranks is None or number is None else f"rank {number}: "

    def _rest(self) -> list[dict[str, Any]]:
        """Return the last documents of workers that have ended."""
        until, found = time.monotonic() + _ENDING_S, list[dict[str, Any]]()
        for wire in self._wires:
            # A timeout is an OSError.
            with contextlib.suppress(EOFError, OSError, GarbledError):
                while True:
                    found.append(wire.receive(_left(until)))
        return found

    def _first_end(self) -> tuple[int | None, int | None]:
        """Return the number of the first worker to end, and its exit code, as far as they are known."""
        self._control.settimeout(_ENDING_S)
        with contextlib.suppress(OSError, ValueError):
            number, code = map(int, self._control.recv(64).split())
            return number, code
        with contextlib.suppress(subprocess.TimeoutExpired):
            return None, self.process.wait(_ENDING_S)
        return None, None

    def _last_words(self) -> str:
        """Return a colon and the last line that the workers printed; empty if they printed none."""
        said = os.pread(self._output.fileno(), _LOOKED_AT, max(self.printed() - _LOOKED_AT, 0))
        # A line of one repeated character is a separator.
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if len(set(line.strip())) > 1]
        return f": {lines[-1][-_QUOTED:]}" if lines else ""


def opened() -> tuple[Wire, dict[str, Any], int]:
    """Return a worker's wire to its caller, its first document, and its number among the workers."""
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))
    opening = wire.receive()
    # Appended, because modules next to a job must not replace libraries.
    sys.path.extend(entry for entry in opening.pop("path") if entry not in sys.path)
    known_precisions.keep_all(opening.pop("excluded"))
    return wire, opening, int(sys.argv[2])


def send_answer(wire: Wire, key: str, found: Any) -> None:
    """Send an answer to a worker's caller, together with the precisions that the worker has found useless.

    Args:
        wire: wire to the caller.
        key: key of the answer.
        found: the answer.
    """
    wire.send({key: found, "excluded": known_precisions.to_json()})


def fail(wire: Wire, number: int, error: Exception) -> NoReturn:
    """Report a worker's exception to its caller, and end the worker.

    Args:
        wire: wire to the caller.
        number: number of the worker.
        error: the exception.
    """
    from autotune.engines.job_checks import classify

    with contextlib.suppress(OSError):
        wire.send(
            {
                "failure": str(classify(error)),
                "raised": one_line(error)[:_TOLD],
                "refused": error.to_json() if isinstance(error, InputError) else None,
                "rank": number,
                # All processes of the machine share this clock.
                "at": time.monotonic(),
            }
        )
    leave(supervisor.RAISED)


def leave(code: int = supervisor.DONE) -> NoReturn:
    """End the process without the interpreter's clean-up, in which a job's threads could hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def python_path() -> str:
    """Return a module search path that contains this package, even if it runs from a checkout."""
    return os.pathsep.join(filter(None, [str(_PACKAGE), os.environ.get("PYTHONPATH", "")]))


def _left(until: float) -> float:
    """Return the remaining seconds, at least enough to receive what has arrived."""
    return max(until - time.monotonic(), 0.1)


def _kills() -> int | None:
    """Return how many processes the kernel killed because memory ran out; ``None`` if that is not known."""
    try:
        rows = dict(row.split() for row in _MEMORY_EVENTS.read_text().splitlines())
        return int(rows["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def _signal_name(number: int) -> str:
    """Return a signal's name, or its number if it has none on this system."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

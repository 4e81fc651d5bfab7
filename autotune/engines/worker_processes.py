"""Start worker processes of this package, talk with them, and learn what became of them.

Nothing of it has a name in a folder: what is said goes over sockets that the workers inherit, and what they print into
a file without a name. So nothing is left behind, however this process or a worker ends.
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
from types import TracebackType
from typing import Any, NoReturn

from autotune.engines import supervisor
from autotune.engines.rendezvous import listening_socket, rank_environment
from autotune.engines.wire import GarbledError, Wire
from autotune.errors import EngineError, InputError, one_line
from autotune.measurement import Failure

_PACKAGE = Path(__file__).resolve().parents[2]
# Where the kernel counts the processes that it ended for want of memory.
_MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")
# Bytes at the end of what workers printed that are looked at, characters of them that a failure quotes, and characters
# of an exception that are told.
_LOOKED_AT, _QUOTED, _TOLD = 2**16, 300, 2000
# Seconds that workers may take to end once they shall, or once one of them has.
_ENDING_S = 5.0


class WorkersError(EngineError):
    """Report what became of workers that did not answer.

    Args:
        failure: its class.
        detail: one line about it.
    """

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(" ".join(detail.split()))
        self.failure = failure


class Workers:
    """Run a module in a process of its own, or in the ranks of a process group, as long as this object is open.

    The workers never look into the working directory for libraries. They end together, with this process, and with
    them whatever they started.

    Args:
        module: the module; run, it begins with :func:`opened`.
        opening: what every worker is told first.
        ranks: how many ranks there are; ``None`` for one process outside any process group.
        environment: what else stands in their environment.
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
            self._asked = pairs[0][0]
            self._wires = [Wire(own) for own, _ in pairs[1:]]
            self._open = ours.pop_all()
        # Jobs are found where this process finds them, once all libraries are looked for elsewhere.
        self.send({**opening, "path": [entry for entry in sys.path if entry]})

    def send(self, document: dict[str, Any]) -> None:
        """Tell every worker something; of one that is gone, the answer says what became of it."""
        for wire in self._wires:
            with contextlib.suppress(OSError):
                wire.send(document)

    def send_files(self, descriptors: list[int]) -> None:
        """Hand an open file to every worker."""
        for wire, descriptor in zip(self._wires, descriptors, strict=True):
            with contextlib.suppress(OSError):
                wire.send_file(descriptor)

    def ready(self, timeout_s: float) -> bool:
        """Wait so many seconds at most, and tell whether there is something to receive from the first worker."""
        return self._wires[0].ready(timeout_s)

    def printed(self) -> int:
        """Return how much the workers have printed so far, in bytes."""
        return os.fstat(self._output.fileno()).st_size

    def first(self, timeout_s: float) -> dict[str, Any]:
        """Return the next thing that the first worker says; arguments and exceptions as for :meth:`answer`."""
        return self._received(self._wires[:1], timeout_s)[0]

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next thing that the first worker says, once every worker has said something.

        Args:
            timeout_s: seconds that it may take.

        Raises:
            InputError: if a worker refuses what it was asked.
            WorkersError: if a worker raised or ended, or did not answer in time. All are ended then.
        """
        return self._received(self._wires, timeout_s)[0]

    def close(self) -> None:
        """End the workers and everything that they started."""
        self._asked.close()
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        return found

    def _cause(self, said: list[dict[str, Any]]) -> EngineError | InputError:
        """Return the first thing that went wrong: others fail because of it."""
        said = [document for document in [*said, *self._rest()] if "failure" in document]
        failures = sorted(said, key=lambda document: float(document["at"]))
        refused = next((document["refused"] for document in failures if document["refused"]), None)
        if refused is not None:
            return InputError.from_json(refused)
        number, code = self._first_end()
        # One that was killed, or left without a word, is the cause of what others raise about it.
        if failures and (number is None or number in [document["rank"] for document in failures]):
            first = failures[0]
            return WorkersError(Failure(first["failure"]), f"{self._who(first['rank'])}{first['raised']}")
        return self._ended(self._who(number), code)

    def _ended(self, who: str, code: int | None) -> WorkersError:
        """Return what the exit code of the worker that ended first says."""
        killed = _kills()
        if code == -signal.SIGKILL and None not in (self._killed_before, killed) and self._killed_before != killed:
            return WorkersError(Failure.OUT_OF_MEMORY, f"{who}the system ended it for want of memory")
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"ended by {_signal_name(-code)}"
        else:
            how = f"ended with exit code {code}"
        return WorkersError(Failure.CRASHED, f"{who}{how}{self._last_words()}")

    def _who(self, number: int | None) -> str:
        """Return what begins a sentence about a worker, where there are several."""
        return "" if self._ranks is None or number is None else f"rank {number}: "

    def _rest(self) -> list[dict[str, Any]]:
        """Return what the workers said last: one that raised has left, and the others were ended."""
        until, found = time.monotonic() + _ENDING_S, list[dict[str, Any]]()
        for wire in self._wires:
            # A timeout is an OSError.
            with contextlib.suppress(EOFError, OSError, GarbledError):
                while True:
                    found.append(wire.receive(_left(until)))
        return found

    def _first_end(self) -> tuple[int | None, int | None]:
        """Return which worker ended first, and its exit code, where the supervisor lives to tell."""
        self._asked.settimeout(_ENDING_S)
        with contextlib.suppress(OSError, ValueError):
            number, code = map(int, self._asked.recv(64).split())
            return number, code
        with contextlib.suppress(subprocess.TimeoutExpired):
            return None, self.process.wait(_ENDING_S)
        return None, None

    def _last_words(self) -> str:
        """Return the last line that the workers printed, to follow a colon."""
        said = os.pread(self._output.fileno(), _LOOKED_AT, max(self.printed() - _LOOKED_AT, 0))
        # A line of one repeated character is a ruler.
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if len(set(line.strip())) > 1]
        return f": {lines[-1][-_QUOTED:]}" if lines else ""


def opened() -> tuple[Wire, dict[str, Any], int]:
    """Return a worker's wire to the asker, what it is told first, and its number among the workers."""
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))
    opening = wire.receive()
    # Behind its own: what lies beside a job replaces no library.
    sys.path.extend(entry for entry in opening["path"] if entry not in sys.path)
    return wire, opening, int(sys.argv[2])


def fail(wire: Wire, number: int, error: Exception) -> NoReturn:
    """Tell the asker what a worker raised, and end the worker.

    Args:
        wire: the worker's.
        number: the worker's.
        error: what it raised.
    """
    from autotune.engines.job_checks import classify

    with contextlib.suppress(OSError):
        wire.send(
            {
                "failure": str(classify(error)),
                "raised": one_line(error)[:_TOLD],
                "refused": error.to_json() if isinstance(error, InputError) else None,
                "rank": number,
                # One clock for all processes of the machine.
                "at": time.monotonic(),
            }
        )
    leave(supervisor.RAISED)


def leave(code: int) -> NoReturn:
    """End without the interpreter's clean-up, which a job's own threads could hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def python_path() -> str:
    """Return a search path on which the child finds this package, also where it runs from a checkout."""
    return os.pathsep.join(filter(None, [str(_PACKAGE), os.environ.get("PYTHONPATH", "")]))


def _left(until: float) -> float:
    """Return the seconds that are left; what has arrived is received in any case."""
    return max(until - time.monotonic(), 0.1)


def _kills() -> int | None:
    """Return how many processes the kernel ended for want of memory; ``None`` where it does not say."""
    try:
        rows = dict(row.split() for row in _MEMORY_EVENTS.read_text().splitlines())
        return int(rows["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def _signal_name(number: int) -> str:
    """Return a signal's name, or its number where it has none here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

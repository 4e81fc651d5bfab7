"""The tree of this package's exceptions.

    AutotuneError
    ├── InputError              wrong input from the user; the command line exits with 2
    │   ├── PlanError           a plan: unknown key, unit or value, impossible k
    │   ├── JobError            a job: unknown name, loss not a scalar, no batches, ...
    │   ├── BudgetError         a memory budget: not a size or share, or below what any plan needs
    │   ├── ProfileError        a profile: damaged, outdated, of another job or device
    │   ├── PolicyFileError     a policy folder: missing, foreign schema, wrong hash or shapes
    │   ├── AttachError         a model or option that ``attach`` cannot use, or a call in the wrong order
    │   └── RunDirectoryError   a run directory: cannot be written, or lacks a document
    │       └── RunLockedError  a run directory that another process is writing
    ├── EngineError             an engine used against its protocol, or whose processes failed
    └── WorkerLostError         a worker on another machine was lost

Failures of a window (out of memory, a loss that is not finite, a crash) are not exceptions but values:
``Measurement.failure``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

# Most characters of a line that is shown to people.
_LONGEST = 4000
# The password between the user and the host of a URL; path operations may have merged its slashes. Lengths are bounded
# because the search for the end restarts at every colon.
_OF_USER = re.compile(r"(:/+[^\s/@:]{0,200}:)\S{0,1000}@")
_OF_QUERY = re.compile(r"((?:password|passwd|token|secret)=)[^\s&;,)]+", re.IGNORECASE)


class AutotuneError(Exception):
    """The root of every exception that this package raises on purpose."""


class InputError(AutotuneError, ValueError):
    """Wrong input, reported in one line: where it is, what is wrong, and what is allowed.

    Args:
        problem: what was found, as a short clause.
        where: the file, option or object with the problem.
        allowed: what would have been accepted, as a phrase or as the accepted values.
        given: a name that is none of the accepted values; the most similar accepted value is then suggested.
    """

    def __init__(
        self, problem: str, *, where: str = "", allowed: str | Iterable[object] = "", given: str | None = None
    ) -> None:
        values = [] if isinstance(allowed, str) else [str(item) for item in allowed]
        self.problem = problem if given is None else f"{problem}{_suggestion(given, values)}"
        self.where = where
        self.allowed = allowed if isinstance(allowed, str) else ", ".join(values)
        prefix = f"{where}: " if where else ""
        suffix = f" (allowed: {self.allowed})" if self.allowed else ""
        super().__init__(printable(f"{prefix}{self.problem}{suffix}"))

    def to_json(self) -> dict[str, str]:
        """Return the error as a JSON object, to be raised again in another process."""
        return {"kind": type(self).__name__, "problem": self.problem, "where": self.where, "allowed": self.allowed}

    @staticmethod
    def from_json(found: dict[str, str]) -> InputError:
        """Return the error of the same kind that :meth:`to_json` described."""
        kind = globals().get(found["kind"], InputError)
        error: InputError = kind(found["problem"], where=found["where"], allowed=found["allowed"])
        return error


class PlanError(InputError):
    """A plan that cannot be applied."""


class JobError(InputError):
    """A job that cannot be trained."""


class BudgetError(InputError):
    """A memory budget that is not a size or a share, or that no plan can meet."""


class ProfileError(InputError):
    """A profile that is damaged, outdated, or was made for another job or device."""


class PolicyFileError(InputError):
    """A policy folder that is missing, foreign or damaged."""


class AttachError(InputError):
    """A model, optimizer or option that ``attach`` cannot use, or a call of a live tuner in the wrong order."""


class RunDirectoryError(InputError):
    """A run directory that cannot be written, or that lacks a requested document."""


class RunLockedError(RunDirectoryError):
    """A run directory that another process, or another call in this one, is writing."""


class EngineError(AutotuneError, RuntimeError):
    """An engine used against its protocol, for example run after it was closed, or whose processes failed."""


class WorkerLostError(AutotuneError):
    """A worker on another machine was lost, together with its current window."""


@contextmanager
def raised_as(kind: type[InputError]) -> Iterator[None]:
    """Raise the input errors of the body as errors of another kind, with the same text."""
    try:
        yield
    except InputError as error:
        raise kind(error.problem, where=error.where, allowed=error.allowed) from error


def _suggestion(given: str, values: Sequence[str]) -> str:
    """Return the accepted value that a mistyped name probably means, as a question; empty if none is similar."""
    from difflib import get_close_matches  # only failures need it

    by_lower = {value.lower(): value for value in values}
    close = get_close_matches(given[:100].lower(), by_lower, n=1, cutoff=0.7)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def printable(text: str) -> str:
    """Return text as one line without control sequences.

    Unprintable characters, such as escape sequences, marks that change the direction of writing or halves of surrogate
    pairs, become Python escapes. Passwords are masked, and the middle of very long text is cut.
    """
    line = _OF_QUERY.sub(r"\1***", _OF_USER.sub(r"\1***@", " ".join(text.split())))
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 4 :]}"
    return escaped(line)


def escaped(text: str) -> str:
    """Replace characters that are neither printable nor line feeds with Python escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def one_line(error: BaseException) -> str:
    """Return an exception's class and message, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message; the name of its class if it has none."""
    return str(error).partition("\n")[0] or type(error).__name__


def a_kind(value: object) -> str:
    """Return the name of a value's class behind its article, as in ``an int``."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in tuple('aeiou') else 'a'} {name}"

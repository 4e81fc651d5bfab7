"""The command line: all subcommands, and how failures are reported.

Invalid input is reported in one line on stderr with exit code 2. Other expected failures, including errors of the
operating system, are reported in one line with exit code 1. A traceback is a bug in this package.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from typing import Annotated, cast

import typer

from autotune import __version__
from autotune.cli import (
    bench,
    calibrate,
    compare,
    demo,
    doctor,
    elastic,
    explain,
    export,
    knobs,
    plan,
    profile,
    ramp,
    replay,
    report,
    reproduce,
    resume,
    schedule,
    train,
    tune,
    watch,
)
from autotune.cli.arguments import require_text, require_working_folder
from autotune.cli.command_help import HELP, example_lines
from autotune.cli.console import keep_stdout_for_json, let_go_of_stdout, open_closed_streams, stdout_has_no_reader
from autotune.cli.installed_names import NamingCommand
from autotune.cli.signals import EndedError, end_in_order, interruptible
from autotune.errors import AutotuneError, EngineError, InputError, escaped, first_line, one_line, printable

app = typer.Typer(
    name="autotune",
    help="Tune gradient accumulation, per-layer precision and activation checkpoints of a PyTorch training job.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_log = logging.getLogger(__name__)
_COMMANDS = (
    demo,
    profile,
    plan,
    calibrate,
    tune,
    knobs,
    ramp,
    train,
    compare,
    elastic,
    resume,
    reproduce,
    explain,
    export,
    replay,
    report,
    watch,
    schedule,
    doctor,
)
for module in _COMMANDS:
    name = module.__name__.rpartition(".")[2]
    summary, *examples = HELP[name]
    helped = NamingCommand if name in ("tune", "compare", "export") else None
    app.command(name, cls=helped, short_help=summary, epilog=example_lines(examples))(interruptible(module.command))
app.add_typer(bench.app, name="bench", short_help=HELP["bench"][0])

# Typer bundles click or uses an installed copy; the bases of its own exceptions are those of the click in use.
_UsageError, _ClickException = cast("tuple[type[Exception], type[Exception]]", typer.BadParameter.__mro__[1:3])


def _show_version(asked: bool) -> None:
    if asked:
        print(f"autotune {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log progress on stderr.")] = False,
) -> None:
    require_working_folder()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_EscapedFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


class _EscapedFormatter(logging.Formatter):
    """A log formatter that escapes control characters, so that a terminal does not act on quoted text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text."""
        return escaped(super().format(record))


def main() -> None:
    """Run the command line and exit."""
    open_closed_streams()
    end_in_order()
    # Memory metering frees blocks that were allocated before profiling; the C++ warning about it is not useful.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "--json" in sys.argv:
        keep_stdout_for_json()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line on arguments and return the exit code."""
    try:
        code = _run(arguments)
        # Flush now, while a missing reader or a full disk can still be reported.
        print(end="", flush=True)
    except InputError as error:
        return _fail(str(error), 2)
    except AutotuneError as error:
        return _fail(str(error), 1)
    except BrokenPipeError as error:
        return _broken_pipe(error)
    except SystemExit as leaving:
        # Typer exits silently when any pipe breaks, even a pipe to a worker.
        if isinstance(leaving.__context__, BrokenPipeError):
            return _broken_pipe(leaving.__context__)
        raise
    except (OSError, MemoryError, RecursionError, OverflowError, UnicodeError) as error:
        _log.info("the operation that failed:", exc_info=error)
        # A name that is too long for a file is wrong input.
        return _fail(_refusal(error), 2 if getattr(error, "errno", None) == errno.ENAMETOOLONG else 1)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except EndedError as error:
        return _fail(f"{error}{_how_to_finish(error)}", error.code)
    return code


def _how_to_finish(error: BaseException) -> str:
    """Return the command that finishes the run that an interruption left; empty if there is no such run."""
    from autotune.cli.resume import finishing

    notes = getattr(error.__cause__ or error, "__notes__", ())
    left = [command for note in notes if (command := finishing(note))]
    return f"; everything measured so far is kept, finish with: {left[-1]}" if left else ""


def _broken_pipe(error: BrokenPipeError) -> int:
    """Return the exit code; report the error unless the reader of stdout has exited, as in ``autotune ... | head``."""
    if not stdout_has_no_reader():
        return _fail(_refusal(error), 1)
    let_go_of_stdout()
    return 1


def _run(arguments: list[str]) -> int:
    require_text(arguments)
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="autotune", standalone_mode=False)
    except RuntimeError as error:
        # Compared by name: importing torch only for this class would be slow.
        if type(error).__name__ != "AcceleratorError":
            raise
        raise EngineError(f"the device fails: {first_line(error)}") from error
    except _UsageError as error:
        return _fail_usage(error, 2)
    except _ClickException as error:
        return _fail_usage(error, 1)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    print(f"autotune: {printable(message)}", file=sys.stderr)
    return code


def _fail_usage(error: BaseException, code: int) -> int:
    """Print a usage error in one line, or the help text if no subcommand was given."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError" and context is not None:
        print(context.get_help(), file=sys.stderr)
        return code
    formatted = getattr(error, "format_message", lambda: str(error))()
    listed = getattr(getattr(context, "command", None), "list_commands", None)
    if listed is not None and formatted.startswith("No such command"):
        return _fail(f"{formatted} (allowed: {', '.join(listed(context))})", code)
    return _fail(f"{formatted} (see {getattr(context, 'command_path', 'autotune')} --help)", code)


def _refusal(error: BaseException) -> str:
    """Describe an error of the operating system or of Python in a few words."""
    if isinstance(error, MemoryError):
        return f"out of memory ({error})" if str(error) else "out of memory"
    if not isinstance(error, OSError) or error.strerror is None:
        return one_line(error)
    files = [str(file) for file in (error.filename, error.filename2) if file is not None]
    return ": ".join([*files, error.strerror])


if __name__ == "__main__":
    main()

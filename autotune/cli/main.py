"""Be the command line: every verb, one way to fail.

Wrong input is one line on stderr and exit code 2; anything else that fails on purpose is one line and 1.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, cast

import typer

from autotune import __version__
from autotune.cli import (
    bench,
    compare,
    demo,
    doctor,
    explain,
    export,
    plan,
    profile,
    replay,
    report,
    reproduce,
    resume,
    schedule,
    train,
    tune,
)
from autotune.cli.console import keep_stdout_for_json
from autotune.errors import AutotuneError, InputError

app = typer.Typer(
    name="autotune",
    help="Tune gradient accumulation, per-layer precision and activation checkpoints of a PyTorch training job.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
_COMMANDS = (
    demo,
    profile,
    plan,
    tune,
    train,
    compare,
    resume,
    reproduce,
    explain,
    export,
    replay,
    report,
    schedule,
    doctor,
)
for module in _COMMANDS:
    app.command(module.__name__.rpartition(".")[2])(module.command)
app.add_typer(bench.app, name="bench")

# Typer carries its own copy of click or uses an installed one; both are reached through its exceptions.
_UsageError, _ClickException = cast("tuple[type[Exception], type[Exception]]", typer.BadParameter.__mro__[1:3])


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what is done, on stderr.")] = False,
) -> None:
    if version:
        print(f"autotune {__version__}")
        raise typer.Exit
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s: %(message)s", stream=sys.stderr)


def main() -> None:
    """Run the command line and exit."""
    # Metering frees blocks that are older than the profile, which is right and not worth a warning from C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Jobs named pkg.module:attribute are looked for from the working directory, as other such tools do.
    if os.getcwd() not in sys.path:  # noqa: PTH109 - a string is what sys.path holds
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    if "--json" in sys.argv:
        keep_stdout_for_json()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line on arguments and return the exit code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="autotune", standalone_mode=False)
    except InputError as error:
        return _fail(str(error), 2)
    except AutotuneError as error:
        return _fail(str(error), 1)
    except _UsageError as error:
        return _fail(_usage(error), 2)
    except _ClickException as error:
        return _fail(_usage(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    print(f"autotune: {message}" if code != 0 else message, file=sys.stderr)
    return code


def _usage(error: BaseException) -> str:
    """Return a usage error in one line; the help text, where no verb was given."""
    if type(error).__name__ == "NoArgsIsHelpError":
        context = getattr(error, "ctx", None)
        return str(context.get_help()) if context is not None else "see autotune --help"
    formatted = getattr(error, "format_message", lambda: str(error))()
    return " ".join(f"{formatted} (see autotune --help)".split())


if __name__ == "__main__":
    main()

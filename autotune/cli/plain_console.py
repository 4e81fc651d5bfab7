"""Print text as it is."""

from __future__ import annotations

from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from autotune.errors import escaped


class PlainConsole(Console):
    """A console on which text is text: names and paths in it are neither markup nor orders to the terminal.

    Args:
        stream: where it prints.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=stream, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return text for the screen; Rich calls this for all that is printed, cells and titles of tables included."""
        return super().render_str(escaped(text), **{**settings, "markup": False, "emoji": False})

    def on_broken_pipe(self) -> None:
        """Leave it to the command line what to do where nobody reads any more."""
        # Rich calls this while it handles the exception.
        raise

"""A console that prints text unchanged."""

from __future__ import annotations

from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from autotune.errors import escaped


class PlainConsole(Console):
    """A console that treats names and paths as text, not as markup or terminal commands.

    Args:
        stream: output stream.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=stream, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return text for the screen; Rich calls this for all that it prints, including table cells and titles."""
        return super().render_str(escaped(text), **{**settings, "markup": False, "emoji": False})

    def on_broken_pipe(self) -> None:
        """Raise the error again; the command line handles it."""
        # Rich calls this method while it handles the exception.
        raise

"""Markup from templates: pages that run no script and fetch nothing, light or dark as the reader has it.

All text is escaped when it enters a template or an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from autotune.errors import escaped
from autotune.report import palette

_VARIABLES: Mapping[str, str] = {name: f"var(--{name})" for name in palette.LIGHT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of a page.

    Attributes:
        label: what it holds, for readers who cannot see it.
        columns: names of its columns.
        rows: its cells; the first of each row is its heading.
        numbers: positions of the columns that are aligned to the right.
        note: what is said above it, also if it has no rows.
    """

    label: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()
    note: str = ""


def render(template: str, **values: Any) -> str:
    """Return a filled template.

    Args:
        template: its file name in ``autotune/report/templates``.
        **values: what it shows; everything but ``Markup`` is escaped.
    """
    return environment().get_template(template).render(values)


@cache
def environment() -> Environment:
    """Return the templates with their settings."""
    loader = PackageLoader("autotune.report")
    found = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, finalize=_shown, trim_blocks=True, lstrip_blocks=True
    )
    found.globals.update(palette=palette, variables=_VARIABLES)
    return found


def _shown(value: object) -> str:
    """Return a value without characters that terminals and readers act on; markup as it is."""
    return value if isinstance(value, Markup) else escaped(str(value))


def element(name: str, *content: object, **attributes: object) -> Markup:
    """Return an element of an SVG drawing.

    Args:
        name: its tag.
        *content: what is in it; text is escaped.
        **attributes: its attributes; a trailing ``_`` is dropped, others become ``-``, and ``None`` leaves one out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_shown(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{join(content)}</{name}>")  # noqa: S704 - all its parts are escaped


def join(parts: Iterable[object]) -> Markup:
    """Return parts one after the other; text is escaped."""
    return Markup("").join(_shown(part) for part in parts)

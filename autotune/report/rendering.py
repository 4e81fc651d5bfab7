"""Markup from templates: pages without external resources, light or dark as the browser prefers.

A page runs one script, which it names by its hash: nothing that a run's folder says can add another. All text is
escaped when it is inserted into a template or an element.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
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
        label: description for screen readers.
        columns: names of the columns.
        rows: cells; the first cell of each row is the row's heading.
        numbers: indices of the columns that are aligned to the right.
        note: text above the table, which is shown even without rows.
    """

    label: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()
    note: str = ""


def render(template: str, **values: Any) -> str:
    """Return a filled template.

    Args:
        template: file name in ``autotune/report/templates``.
        **values: the template's variables; all but ``Markup`` are escaped.
    """
    return _with_contents(environment().get_template(template).render(values))


def _with_contents(page: str) -> str:
    """Return a page whose sections have ids, with a list of them at its empty ``nav``."""
    sections = itertools.count(1)
    titles: list[str] = []

    def named(section: re.Match[str]) -> str:
        titles.append(section[1])
        return f'<section id="part-{next(sections)}"><h2>{section[1]}</h2>'

    page = re.sub(r"<section><h2>(.*?)</h2>", named, page)
    links = "".join(f'<li><a href="#part-{number}">{title}</a></li>' for number, title in enumerate(titles, 1))
    return page.replace("<nav></nav>", f'<nav aria-label="Contents"><ul>{links}</ul></nav>' if links else "", 1)


@cache
def environment() -> Environment:
    """Return the Jinja environment of the templates."""
    loader = PackageLoader("autotune.report")
    found = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, finalize=_shown, trim_blocks=True, lstrip_blocks=True
    )
    script = loader.get_source(found, "page.js")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The script is ours, and must be inserted to the letter for its hash to hold.
    found.globals.update(palette=palette, variables=_VARIABLES, script=Markup(script), digest=digest)  # noqa: S704
    return found


def _shown(value: object) -> str:
    """Return a value as text with unprintable characters escaped; return markup unchanged."""
    return value if isinstance(value, Markup) else escaped(str(value))


def element(name: str, *content: object, **attributes: object) -> Markup:
    """Return an element of an SVG drawing.

    Args:
        name: tag name.
        *content: content; text is escaped.
        **attributes: attributes, unless ``None``; in names, a trailing ``_`` is dropped and any other becomes ``-``.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_shown(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{join(content)}</{name}>")  # noqa: S704 - all its parts are escaped


def join(parts: Iterable[object]) -> Markup:
    """Return the concatenated parts; text is escaped."""
    return Markup("").join(_shown(part) for part in parts)

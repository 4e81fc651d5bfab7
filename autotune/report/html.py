"""Write the pages of every report: no script, nothing that is fetched, light or dark as the reader has it.

Text is escaped where it enters; what is ``Html`` already is left as it is.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from autotune.errors import escaped
from autotune.report.style import FIGURES, PAGE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def escape(text: object) -> Html:
    """Return text as markup, without characters that no page shows; markup stays what it is."""
    return text if isinstance(text, Html) else Html(_quoted(text))


def element(name: str, *content: object, **attributes: object) -> Html:
    """Return an element.

    Args:
        name: its tag.
        *content: what is in it; text is escaped.
        **attributes: its attributes; a trailing ``_`` is dropped, others become ``-``, and ``None`` leaves one out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_quoted(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{join(content)}</{name}>")


def join(parts: Iterable[object]) -> Html:
    """Return parts one after the other."""
    return Html("".join(escape(part) for part in parts))


def section(title: str, *content: object) -> Html:
    """Return a section with its heading; nothing if nothing is in it."""
    if not any(content):
        return Html("")
    return element("section", element("h2", title), "\n", *content)


def cards(values: Sequence[tuple[str, str]]) -> Html:
    """Return figures side by side, each under its name."""
    return element(
        "dl", *(element("div", element("dt", name), element("dd", value)) for name, value in values), class_="cards"
    )


def table(label: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[int] = ()) -> Html:
    """Return a table that scrolls sideways by itself, with the keyboard too.

    Args:
        label: what it holds, for who cannot see it.
        columns: names of its columns.
        rows: its cells; the first of each row is its heading.
        numbers: columns whose cells stand on the right.
    """

    def kind(number: int) -> str | None:
        return "number" if number in numbers else "text" if number == len(columns) - 1 else None

    head = element("tr", *(element("th", name, scope="col", class_=kind(i)) for i, name in enumerate(columns)))
    body = []
    for row in rows:
        first, *rest = row
        cells = [element("td", cell, class_=kind(number)) for number, cell in enumerate(rest, 1)]
        body.append(element("tr", element("th", first, scope="row", class_=kind(0)), *cells))
    inner = element("table", element("thead", head), element("tbody", *body))
    return element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=label)


def page(title: str, *content: object) -> str:
    """Return a whole page."""
    head = join(
        [
            Html('<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY)}">\n'),
            element("title", title),
            Html(f"\n<style>{PAGE}{FIGURES}</style>\n"),
        ]
    )
    body = element("body", element("main", *content))
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}</head>\n{body}\n</html>\n'


def _quoted(value: object) -> str:
    return html.escape(escaped(str(value)))

"""Tests of error messages: one line of plain text that hides passwords."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import autotune
from autotune.errors import InputError, escaped, printable
from autotune.report.rendering import element


@given(st.text(), st.text(), st.text())
def test_error_is_one_line_of_plain_text(problem: str, where: str, allowed: str) -> None:
    assert str(InputError(problem, where=where, allowed=allowed)).isprintable()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202egpj.exe", "\\u202egpj.exe"),
        ("\ud800", "\\ud800"),
        ("a\r\nb\tc", "a b c"),
        ("größe 😀", "größe 😀"),
    ],
)
def test_terminal_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_multiline_text_keeps_its_lines() -> None:
    assert escaped("a\nb\x1bc") == "a\nb\\x1bc"


def test_very_long_line_is_shortened_in_the_middle() -> None:
    line = printable("begins " + "x" * 100_000 + " ends")
    assert len(line) < 5000
    assert line.startswith("begins ")
    assert line.endswith(" ends")


@given(
    scheme=st.sampled_from(["postgresql", "postgresql+psycopg", "mysql+pymysql", "redis", "ray", "https"]),
    user=st.from_regex(r"[a-z]{0,8}", fullmatch=True),
    form=st.sampled_from(
        [
            "{scheme}://{user}:{word}@127.0.0.1:5432/studies",
            "{scheme}:/{user}:{word}@127.0.0.1/studies",
            "{scheme}://127.0.0.1/studies?user={user}&password={word}",
            "{scheme}://127.0.0.1/studies?PASSWD={word}&user={user}",
            "no answer from {scheme}://{user}:{word}@host: refused",
            "'{scheme}://{user}:{word}@[::1/studies'",
            "host=127.0.0.1 password={word} user={user}",
        ]
    ),
    word=st.text(st.characters(codec="ascii", exclude_categories=["C", "Z"], exclude_characters="&;,)"), min_size=6),
)
def test_password_in_a_url_is_hidden(scheme: str, user: str, form: str, word: str) -> None:
    assume(word not in form.format(scheme=scheme, user=user, word=""))
    assert word not in printable(form.format(scheme=scheme, user=user, word=word))


@pytest.mark.parametrize(
    "text", ["http://127.0.0.1:8000/a", "ray://127.0.0.1:1 and me@host", "postgresql://user@h:1/d"]
)
def test_url_without_a_password_is_shown_in_full(text: str) -> None:
    assert printable(text) == text


def test_page_shows_control_characters_as_escapes():
    assert element("title", "a\x1b[31m<b>", lang='\x1b"') == '<title lang="\\x1b&#34;">a\\x1b[31m&lt;b&gt;</title>'


@pytest.mark.parametrize("wrong", [None, 3, b"runs", ["runs"], "a\0b"], ids=repr)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("run", lambda value: autotune.resume(value)),
        ("runs_dir", lambda value: autotune.tune("digits", runs_dir=value)),
        ("runs_dir", lambda value: autotune.compare("digits", ["sqrt"], runs_dir=value)),
    ],
    ids=["resume", "tune", "compare"],
)
def test_argument_that_is_no_folder_is_named_in_one_sentence(
    name: str, call: Callable[[Any], object], wrong: object
) -> None:
    with pytest.raises(InputError, match=rf"^{name} is .* \(allowed: a folder\)$"):
        call(wrong)

"""What reaches a terminal: text of a model that can't act on it, and a width that can be shown."""

import io
import sys

import pytest

from common import run, show

ATTACKS = ["\x1b]0;title\x07", "\x1b[31mred", "\x9b2J", "\u202eabc\u202c", "\u2066a\u2069", "a\rb", "\x7f\x00\x85"]
PLAIN = ["two\nlines\tand a tab", "[bold]x[/bold]", "👩\u200d👧 🏳\ufe0f\u200d🌈", "שלום \u200fمرحبا", "naïve 漢字"]


@pytest.mark.parametrize("text", ATTACKS)
def test_text_that_acts_on_a_terminal_is_written_as_escapes(text, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    run.write(text)
    quoted = show.quote(text).plain
    for shown in (sys.stdout.getvalue(), quoted):
        assert shown.isprintable()
        assert "\\" in shown
    for word in ("title", "red", "abc"):
        assert (word in text) == (word in quoted)


@pytest.mark.parametrize("text", PLAIN)
def test_other_text_stays_as_it_is(text, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    run.write(text)
    assert sys.stdout.getvalue() == text
    assert show.quote(text).plain == "text: " + text.replace("\n", " ")


WIDTHS = [
    (None, 80),
    ("", 80),
    ("120", 120),
    ("abc", 80),
    ("²", 80),
    ("0", 80),
    ("-5", 80),
    ("1", 20),
    ("9" * 5000, 80),
]


@pytest.mark.parametrize(("columns", "width"), WIDTHS)
def test_columns_that_are_no_width_mean_eighty(columns, width, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert show.console().width == width

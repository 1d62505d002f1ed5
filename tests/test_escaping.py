"""Text of others, made fit to be seen."""

import pytest

from driver.errors import shortened
from ipc.wire import escaping
from ipc.wire.escaping import one_line, visible, visible_json

HOSTILE = "a\x1b[31mX\x1b]0;pwned\x07\r\x9b1m\x7f\u2028\u202eb\ud800"


def test_one_line_spells_out_what_is_hidden() -> None:
    """Controls of C0 and C1, newlines and tabs, separators, bidirectional overrides, and halves of characters."""
    text = r"a\x1b[31mX\x1b]0;pwned\x07\r\x9b1m\x7f\u2028\u202eb\ud800"

    assert one_line(HOSTILE) == text
    assert one_line("a\nb\tc") == r"a\nb\tc"
    assert one_line("Ünï ‏عربي 🏴 [bold]") == "Ünï ‏عربي 🏴 [bold]"


def test_a_terminal_is_given_newlines_and_tabs_and_nothing_else_that_it_obeys() -> None:
    """Text stays text."""
    assert visible("a\n\tb é\r\x1b[2J") == "a\n\tb é\\r\\x1b[2J"


def test_json_says_the_same_with_everything_hidden_spelt_out() -> None:
    """The escapes are those of JSON's strings."""
    assert visible_json('{"a":\n"\x7f\x9b\u202e"}') == '{"a":\n"\\u007f\\u009b\\u202e"}'


@pytest.mark.parametrize("text", ["x" * 10_000_000, "\x1b" * 10_000_000, "x" * 501, "\x00" * 500])
def test_what_is_long_is_cut_to_its_beginning_and_end(text: str) -> None:
    """With a note between of how long it is, however much longer it is spelt out."""
    for shown in (shortened(text), one_line(text, 500)):
        assert len(shown) <= 500
        assert ("characters in all ...]" in shown) == (len(text) > 500 or shown[0] == "\\")
    assert shortened("a" * 600 + "what to do").endswith("what to do")


def test_only_a_terminal_is_given_other_than_the_models_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is piped is what the model said."""
    escaping.write("a\x1b[0m", end="")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    escaping.write("a\x1b[0m", end="")

    assert capsys.readouterr().out == "a\x1b[0ma\\x1b[0m"

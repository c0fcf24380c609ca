"""However long a text is, what people read of it is bounded, and keeps its beginning and its end."""

from tandem.utils.errors import shorten, shorten_lines


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    assert shorten("abcdefgh", max_chars=8) == "abcdefgh"
    assert shorten("abcdefgh!", max_chars=8) == "abcdef … [1 characters left out] … h!"
    assert len(shorten("x" * 200_000)) < 2100


def test_many_lines_keep_the_first_and_the_last() -> None:
    text = "\n".join(str(number) for number in range(10))
    assert shorten_lines(text, max_lines=10) == text
    assert shorten_lines(text, max_lines=4) == "0\n1\n… [6 lines left out] …\n8\n9"
    assert shorten_lines("x" * 200_000) == shorten("x" * 200_000)

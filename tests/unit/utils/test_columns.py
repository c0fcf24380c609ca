"""Rows of text as columns of a terminal."""

from tandem.utils.columns import align, hang


def test_cells_of_a_column_begin_below_each_other() -> None:
    assert align([("a", "bbb", "c"), ("aaa", "b", "")]) == ["a    bbb  c", "aaa  b"]


def test_a_long_line_goes_on_below_its_text() -> None:
    assert hang("key   one two three", 13, 6) == "key   one two\n      three"
    assert hang("key   one two", 13, 6) == "key   one two"
    path = "/a/folder-with-a-name/that-is-long"  # stays in one piece
    assert hang(f"key   see {path} for a", 13, 6) == f"key   see\n      {path}\n      for a"

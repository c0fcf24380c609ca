"""What people read of an error: however long it is, its beginning and its end; and what the disk said, as such."""

import errno
import resource
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from tandem.utils.errors import disk_errors, shorten, shorten_lines, shown


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    assert shorten("abcdefgh", max_chars=8) == "abcdefgh"
    assert shorten("abcdefgh!", max_chars=8) == "abcdef … [1 characters left out] … h!"
    assert len(shorten("x" * 200_000)) < 2100


def test_a_wrong_value_is_shown_short_and_without_its_address() -> None:
    assert shown("1") == "'1'"
    assert shown(object()) == shown(object()) == "<object object>"
    assert shown("x" * 1000).startswith("'xxx") and len(shown("x" * 1000)) < 120


def test_many_lines_keep_the_first_and_the_last() -> None:
    text = "\n".join(str(number) for number in range(10))
    assert shorten_lines(text, max_lines=10) == text
    assert shorten_lines(text, max_lines=4) == "0\n1\n… [6 lines left out] …\n8\n9"
    assert shorten_lines("x" * 200_000) == shorten("x" * 200_000)


def test_what_safetensors_says_of_the_disk_has_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught, disk_errors(path):
            save_file({"a": np.zeros(1000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(path)
    with pytest.raises(SafetensorError), disk_errors(tmp_path):
        deserialize(b"no tensors")

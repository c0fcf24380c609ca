"""Who answered, through HTTP headers and back."""

import re
from pathlib import Path

import pytest

from tandem.types.identity import RUN_PATTERN, ServerIdentity, describe_run, new_run_name


@pytest.mark.parametrize("model", ["models/little", "/models/große Modelle/模型", "a, b\nc"])
def test_headers_tell_all_of_it(model: str) -> None:
    identity = ServerIdentity("abc", model, 7, ("one", "-", "two"))
    headers = identity.to_headers()
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    assert ServerIdentity.from_headers(headers) == identity


def test_somebody_elses_headers() -> None:
    assert ServerIdentity.from_headers({"server": "nginx"}) is None
    headers = ServerIdentity("abc", "model", 7, ("one",)).to_headers()
    assert ServerIdentity.from_headers(headers | {"x-tandem-version": "new"}) is None


@pytest.mark.parametrize("folder", ["outputs/reverse_text", "outputs/zweiter Lauf, größer", "/", "x" * 300])
def test_run_names_are_accepted_by_servers_and_never_the_same(folder: str) -> None:
    one, two = new_run_name(Path(folder)), new_run_name(Path(folder))
    assert one != two and re.match(RUN_PATTERN, one)
    assert new_run_name(Path("outputs/reverse_text")).startswith("reverse_text-")


def test_nobody_is_described() -> None:
    assert describe_run("-") == "a client that named no run" and describe_run("a-1") == "run 'a-1'"

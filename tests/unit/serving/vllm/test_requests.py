"""What is asked of us in front of vLLM: pausing by query and body, and fields under their earlier names."""

import pytest
from pydantic import ValidationError

from tandem.serving.http.errors import BadRequest
from tandem.serving.vllm.middleware import read_pause, with_structured_outputs
from tandem.types.openai import PauseRequest


@pytest.mark.parametrize(
    ("body", "query", "expected"),
    [
        (b"", {}, ("keep", False)),
        (b"null", {}, ("keep", False)),
        (b"{}", {"mode": "wait"}, ("wait", False)),
        (b'{"mode": "abort"}', {}, ("abort", False)),
        (b'{"mode": "abort", "clear_cache": true}', {}, ("abort", True)),
        (b'{"mode": "wait"}', {"clear_cache": "true"}, ("wait", True)),
        (b'{"mode": "wait"}', {"mode": "wait", "clear_cache": "0"}, ("wait", False)),
    ],
)
def test_a_pause_is_asked_for_in_the_query_or_in_the_body(
    body: bytes, query: dict[str, str], expected: tuple[str, bool]
) -> None:
    asked = read_pause(body, query)
    assert isinstance(asked, PauseRequest) and (asked.mode, asked.clear_cache) == expected


@pytest.mark.parametrize(
    ("body", "query"),
    [
        (b'{"mode": "nap"}', {}),
        (b"{}", {"mode": "nap"}),
        (b'{"speed": 1}', {}),
        (b'{"speed": null}', {}),
        (b"", {"speed": "1"}),
        (b"[]", {}),
        (b"{", {}),
        (b'{"clear_cache": 1}', {}),
    ],
)
def test_what_a_pause_does_not_know_is_refused(body: bytes, query: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        read_pause(body, query)


def test_a_pause_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(BadRequest, match="mode is 'keep' in the query and 'wait' in the body"):
        read_pause(b'{"mode": "wait"}', {"mode": "keep"})


def test_earlier_names_of_structures_reach_vllm_under_its_own() -> None:
    options = {"prompt": "a", "guided_regex": "a+", "guided_json": None}
    assert with_structured_outputs(options) == {"prompt": "a", "structured_outputs": {"regex": "a+"}}
    both = with_structured_outputs({"guided_choice": ["a"], "structured_outputs": {"json": {}}})
    assert both == {"structured_outputs": {"json": {}, "choice": ["a"]}}  # vLLM says what is wrong with that

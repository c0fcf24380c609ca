"""A text that grows is, at its end, the text of the whole sample."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.serving.http.fake_engine import FakeEngine, part_at

from tandem.data.tokenizer import Tokenizer
from tandem.engine.protocol import GenerationRequest, Sampling
from tandem.serving.http.text import GrowingText, completion_text, overlap


def test_the_longest_end_that_begins_a_stop_string() -> None:
    assert overlap("abc", ("cd", "bcd")) == 2
    assert overlap("abc", ("abc",)) == 0, "a whole stop string is the engine's to find"
    assert overlap("aaa", ("aaaa",)) == 3
    assert overlap("abc", ()) == 0


@settings(max_examples=300)
@given(
    tokens=st.lists(st.sampled_from([0, 66, 67, 68, 98]), min_size=1, max_size=12),
    stops=st.lists(st.text("abcé<", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 4),
    skip=st.booleans(),
    keep=st.booleans(),
)
def test_streamed_text_is_the_whole_text(
    tokenizer: Tokenizer, tokens: list[int], stops: list[str], min_tokens: int, skip: bool, keep: bool
) -> None:
    sampling = Sampling(
        max_tokens=12, stop=tuple(stops), min_tokens=min_tokens, stop_token_ids=(68,), skip_special_tokens=skip
    )
    engine = FakeEngine(tokenizer, lambda request, index: tokens)
    sample = engine.sample(GenerationRequest([1], sampling), 0)
    whole = completion_text(tokenizer, sample, skip_special=skip, keep_stop=keep)
    growing = GrowingText(tokenizer, sampling.stop, skip_special=skip, keep_stop=keep)
    pieces = [growing.push(part_at(sample, position)) for position in range(len(sample.token_ids))]
    assert "".join(pieces) == whole
    if isinstance(sample.stop_reason, str) and keep:
        assert whole.endswith(sample.stop_reason)

"""Log-probs in the shapes of text completions, chat completions, and vLLM's prompt_logprobs."""

from collections.abc import Callable, Sequence
from typing import Any

from tandem.engine.protocol import GeneratedSample, PromptLogprob, TopLogprobs

TokenName = Callable[[int], str]
TokenBytes = Callable[[int], list[int]]
LEAST = -9999.0  # what stands for minus infinity, which JSON cannot write


def text_logprobs(
    name: TokenName,
    sample: GeneratedSample,
    offsets: list[int],
    *,
    prompt: Sequence[int] = (),
    prompt_logprobs: Sequence[PromptLogprob] = (),
    with_top: bool,
) -> dict[str, Any]:
    """Of a text completion, after those of its prompt where that is echoed. `offsets`: where its tokens begin."""
    token_ids = [*prompt, *sample.token_ids] if prompt else sample.token_ids
    tokens = list(map(name, token_ids))
    token_logprobs: Sequence[float | None] = sample.logprobs
    top = _top_by_name(name, sample.token_ids, sample.logprobs, sample.top_logprobs) if with_top else None
    if prompt:
        # Nothing comes before the first token.
        token_logprobs = [None, *(entry.logprob for entry in prompt_logprobs), *token_logprobs]
        if top is not None:
            ids, values = [entry.token_id for entry in prompt_logprobs], [entry.logprob for entry in prompt_logprobs]
            top = [None, *_top_by_name(name, ids, values, [entry.top for entry in prompt_logprobs]), *top]
    return {"tokens": tokens, "token_logprobs": token_logprobs, "top_logprobs": top, "text_offset": offsets}


def _top_by_name(
    name: TokenName, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[TopLogprobs] | None
) -> list[dict[str, float] | None]:
    """For each place the likeliest tokens, and the token itself if it is none of them. Of several tokens that read
    the same, the likeliest."""
    named: list[dict[str, float] | None] = []
    for token, logprob, likeliest in zip(token_ids, logprobs, top or [[]] * len(token_ids), strict=True):
        place: dict[str, float] = {}
        for other, value in [*likeliest, (token, logprob)]:
            place.setdefault(name(other), max(value, LEAST))
        named.append(place)
    return named


def chat_logprobs(name: TokenName, bytes_of: TokenBytes, sample: GeneratedSample) -> dict[str, Any]:
    top = sample.top_logprobs or [[]] * len(sample.token_ids)

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": name(token), "logprob": logprob, "bytes": bytes_of(token)}

    return {
        "content": [
            entry(token, logprob) | {"top_logprobs": [entry(other, max(value, LEAST)) for other, value in likeliest]}
            for token, logprob, likeliest in zip(sample.token_ids, sample.logprobs, top, strict=True)
        ]
    }


def prompt_logprobs_by_id(name: TokenName, entries: Sequence[PromptLogprob]) -> list[dict[str, Any] | None]:
    """As vLLM: for each prompt token but the first, the likeliest tokens and the token itself, by id."""
    return [None, *(_by_id(name, entry) for entry in entries)]


def _by_id(name: TokenName, entry: PromptLogprob) -> dict[str, Any]:
    ranked: dict[int, tuple[float, int | None]] = {
        token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)
    }
    ranked[entry.token_id] = (entry.logprob, entry.rank)
    return {
        str(token): {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": name(token)}
        for token, (logprob, rank) in ranked.items()
    }

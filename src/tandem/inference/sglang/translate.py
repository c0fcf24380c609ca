"""Our requests in SGLang's words, and its answers in ours. Pure functions; no network.

What SGLang would do otherwise than the protocol says is refused in `check_request`. Its log-probs are those of the
logits after penalties, biases and the ban on ending early, over the temperature, before top-p, top-k and min-p; or,
where the server runs with SGLANG_RETURN_ORIGINAL_LOGPROB, the same without the temperature.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.inference.control.updates import EngineLost
from tandem.inference.engine import (
    EngineError,
    FinishReason,
    GenerationRequest,
    PromptLogprob,
    Sampling,
    TopLogprobs,
    UnusableWeights,
)
from tandem.inference.sglang.requests import Tokens

NOT_A_NUMBER = "NaN happened"  # what SGLang says it matched when it drew a token outside the vocabulary
MAX_STOP_STRINGS = 32
LEAST_TEMPERATURE = 1e-6  # SGLang takes the likeliest token below
LARGEST_PENALTY = 2.0


@dataclass(frozen=True)
class Abilities:
    """What the server that runs can do, as probed at the start."""

    version: str = "?"
    deterministic: bool = False  # draws by seed
    has_tokenizer: bool = True
    has_adapters: bool = False
    logprobs_at_temperature: bool = True


@dataclass(frozen=True)
class Limits:
    """What is asked of this engine by its configuration."""

    seq_len: int
    allow_unseeded: bool = False
    allow_adjusted_logprobs: bool = False


class UnknownWeights(EngineLost):
    """The answer was computed with weights that we did not put there."""


def check_request(request: GenerationRequest, abilities: Abilities, limits: Limits) -> None:
    """Raise ValueError for what SGLang cannot do, or would do in another way than it is asked for."""
    sampling = request.sampling
    request.check_length(limits.seq_len)
    _check_stops(sampling, abilities)
    _check_adjustments(sampling, limits)
    _check_draws(sampling, abilities, limits)
    _check_logprobs(request, abilities)
    if request.adapter is not None and not abilities.has_adapters:
        raise ValueError("this SGLang server serves no adapters; start it with --enable-lora")


def _check_stops(sampling: Sampling, abilities: Abilities) -> None:
    if sampling.ignore_eos and sampling.stop_token_ids:
        raise ValueError("ignore_eos and stop_token_ids together: SGLang would ignore the stop tokens too; give one")
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise ValueError(f"stop has {len(sampling.stop)} strings; SGLang takes {MAX_STOP_STRINGS}")
    if sampling.stop and sampling.min_tokens:
        raise ValueError("stop and min_tokens together: SGLang may end with a stop string before min_tokens; give one")
    if (sampling.stop or sampling.min_tokens) and not abilities.has_tokenizer:
        raise ValueError("stop and min_tokens need a SGLang server without --skip-tokenizer-init")


def _check_adjustments(sampling: Sampling, limits: Limits) -> None:
    if sampling.repetition_penalty != 1.0:
        raise ValueError(
            f"repetition_penalty = {sampling.repetition_penalty}: SGLang penalizes the completion's tokens only, "
            "not the prompt's; leave it out"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if abs(getattr(sampling, name)) > LARGEST_PENALTY:
            raise ValueError(f"{name} = {getattr(sampling, name)}; SGLang takes -2 to 2")
    adjustments = ("presence_penalty", "frequency_penalty", "logit_bias", "min_tokens")
    given = [name for name in adjustments if getattr(sampling, name)]
    if given and not limits.allow_adjusted_logprobs:
        raise ValueError(
            f"{', '.join(given)}: SGLang returns log-probs of the logits after this, not those of the model; "
            "leave it out, or set sglang.allow_adjusted_logprobs"
        )


def _check_draws(sampling: Sampling, abilities: Abilities, limits: Limits) -> None:
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise ValueError(f"temperature = {sampling.temperature}: SGLang takes 0, or {LEAST_TEMPERATURE} and more")
    if sampling.min_p and abilities.deterministic:
        raise ValueError("min_p: SGLang has no min_p with --enable-deterministic-inference; leave it out")
    by_seed = abilities.deterministic or is_greedy(sampling) or limits.allow_unseeded
    if sampling.seed is not None and not by_seed:
        raise ValueError(
            "seed: SGLang draws by seed only with --enable-deterministic-inference; start it so, "
            "or set sglang.allow_unseeded"
        )


def _check_logprobs(request: GenerationRequest, abilities: Abilities) -> None:
    temperature = request.sampling.temperature
    if temperature in (0.0, 1.0):  # SGLang computes log-probs of greedy requests at temperature 1
        return
    if request.raw_logprobs and abilities.logprobs_at_temperature and not is_greedy(request.sampling):
        raise ValueError(
            f"raw log-probs at temperature = {temperature}: SGLang returns them at the temperature; use temperature 1, "
            "or start it with SGLANG_RETURN_ORIGINAL_LOGPROB=1"
        )
    if not request.raw_logprobs and not abilities.logprobs_at_temperature:
        raise ValueError(
            f"log-probs at temperature = {temperature}: SGLang runs with SGLANG_RETURN_ORIGINAL_LOGPROB; "
            "use temperature 1, or start it without"
        )
    if not request.raw_logprobs and is_greedy(request.sampling):
        raise ValueError(
            f"top_k = 1 at temperature = {temperature}: whether SGLang's log-probs are at this temperature depends on "
            "what else runs; use temperature 0"
        )


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0.0 or sampling.top_k == 1


def sample_seed(seed: int, sample_index: int) -> int:
    """SGLang keys a draw by (seed, position); the sample's index goes into the seed. 63 bits, as it takes them."""
    digest = hashlib.blake2b(f"{seed}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generate_body(
    request: GenerationRequest, index: int, rid: str, *, seed: int | None, adapter: str | None, stream: bool
) -> dict[str, Any]:
    """The body of /generate for one sample. `seed`: of the request; `adapter`: its name at SGLang."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": request.prompt_ids,
        "sampling_params": sampling_params(request),
        "return_logprob": True,
        "top_logprobs_num": request.top_logprobs,
        "stream": stream,
    }
    if seed is not None:
        body["sampling_params"]["sampling_seed"] = sample_seed(seed, request.first_index + index)
    if adapter is not None:
        body["lora_path"] = adapter
    if request.prompt_logprobs is not None and index == 0:
        body["logprob_start_len"] = 0
        # One more than none: whether the prompt's token is the likeliest can be told from it.
        body["top_logprobs_num"] = max(request.top_logprobs, request.prompt_logprobs, 1)
    return body


def sampling_params(request: GenerationRequest) -> dict[str, Any]:
    """Every field is given, so that no default of the server's takes its place."""
    sampling = request.sampling
    greedy = is_greedy(sampling) and (request.raw_logprobs or sampling.temperature in (0.0, 1.0))
    return {
        "n": 1,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
    }


def new_tokens(meta: Mapping[str, Any], num_seen: int, num_top: int) -> Tokens:
    """The tokens of an output after the first `num_seen`. Outputs of a stream carry all tokens so far or, with
    --incremental-streaming-output, the newest; either way those that are new come last."""
    entries = meta.get("output_token_logprobs") or []
    total = meta.get("output_token_logprobs_length", max(meta.get("completion_tokens") or 0, len(entries)))
    num_new = total - num_seen
    if not 0 <= num_new <= len(entries):
        raise EngineError(f"SGLang sent {len(entries)} log-probs where {num_new} of {total} were still to come")
    entries = entries[len(entries) - num_new :]
    if any(logprob is None for logprob, *_ in entries):
        raise UnusableWeights("SGLang's log-probs are not numbers: the weights it serves are unusable")
    tokens = Tokens([token for _, token, *_ in entries], [logprob for logprob, *_ in entries])
    if num_top:
        alternatives = meta["output_top_logprobs"]
        tokens.top = [top_of(entry, num_top) for entry in alternatives[len(alternatives) - num_new :]]
    return tokens


def top_of(entry: list[list[Any]] | None, num_top: int) -> TopLogprobs:
    return [(token, logprob) for logprob, token, *_ in (entry or [])[:num_top]]


def prompt_logprobs(meta: Mapping[str, Any], num_top: int) -> list[PromptLogprob]:
    """From the second prompt token on. The rank is known only where the token is among SGLang's alternatives."""
    logprobs = []
    tops = meta.get("input_top_logprobs") or []
    for (logprob, token, *_), entry in zip(meta["input_token_logprobs"][1:], tops[1:], strict=True):
        top = top_of(entry, len(entry or []))
        rank = next((place for place, (other, _) in enumerate(top, 1) if other == token), None)
        logprobs.append(PromptLogprob(token, logprob, rank, top[:num_top]))
    return logprobs


def ending(
    reason: Mapping[str, Any], sampling: Sampling, eos_token_ids: Collection[int]
) -> tuple[FinishReason, int | str | None]:
    """Why a completion ended, and the stop token other than EOS, or the stop string, that ended it."""
    kind, matched = reason["type"], reason.get("matched")
    if kind == "abort":
        if reason.get(
            "status_code"
        ):  # SGLang ended it, for want of memory for instance; the client did not ask for that
            raise EngineError(f"SGLang ended the request: {reason.get('message')}")
        return "abort", None
    if kind == "length":
        return "length", None
    if kind != "stop":
        raise EngineError(f"SGLang ended the request for an unknown reason: {dict(reason)}")
    if matched == NOT_A_NUMBER and matched not in sampling.stop:
        raise UnusableWeights("SGLang drew a token that does not exist: the weights it serves are unusable")
    if isinstance(matched, int) and (matched in eos_token_ids or matched not in sampling.stop_token_ids):
        return "stop", None
    return "stop", matched


def token_versions(meta: Mapping[str, Any], num_tokens: int, labels: Mapping[str, int], oldest: int) -> list[int]:
    """The version of every token of a finished output.

    SGLang from 0.5.19 on says which weights drew which tokens (`weight_versions`). Before, an output names only the
    weights that served at its end; then every token gets `oldest`, the oldest version that served while the request
    ran: exact without an update in between, and never too new.
    """
    versions = [min(oldest, known(meta["weight_version"], labels))] * num_tokens
    for span in meta.get("weight_versions") or []:
        start, end = span["start"], min(span["end"], num_tokens)
        versions[start:end] = [known(span["version"], labels)] * max(end - start, 0)
    return versions


def known(label: str, labels: Mapping[str, int]) -> int:
    if label not in labels:
        raise UnknownWeights(
            f"SGLang answered with weights {label!r}, which were not put there from here "
            f"(known: {', '.join(sorted(labels))}); was it restarted, or updated by another client?"
        )
    return labels[label]

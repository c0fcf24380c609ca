"""Our requests in SGLang's words, and its answers in ours. Pure functions; no network.

What SGLang would do otherwise than the protocol says is refused in `check_request`. Its log-probs are those of the
logits after penalties, biases and the ban on ending early, over the temperature, before top-p, top-k and min-p; or,
where the server runs with SGLANG_RETURN_ORIGINAL_LOGPROB, the same without the temperature.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.config.sglang import SGLangConfig
from tandem.inference.control.updates import EngineLost
from tandem.inference.engine import (
    EngineError,
    FinishReason,
    GeneratedSample,
    GenerationRequest,
    PromptLogprob,
    Sampling,
    TopLogprobs,
    UnusableWeights,
)

NOT_A_NUMBER = "NaN happened"  # what SGLang says it matched when it drew a token outside the vocabulary
MAX_STOP_STRINGS = 32
LEAST_TEMPERATURE = 1e-6  # SGLang takes the likeliest token below


@dataclass(frozen=True)
class Abilities:
    """What the server that runs can do, as probed at the start."""

    version: str = "?"
    deterministic: bool = False  # draws by seed
    has_tokenizer: bool = True
    has_adapters: bool = False
    logprobs_at_temperature: bool = True


class UnknownWeights(EngineLost):
    """The answer was computed with weights that we did not put there."""


def check_request(request: GenerationRequest, abilities: Abilities, options: SGLangConfig) -> None:
    """Raise ValueError for what SGLang cannot do, or would do in another way than it is asked for."""
    for why in (
        *_refused_stops(request.sampling, abilities),
        *_refused_adjustments(request.sampling, options),
        *_refused_draws(request.sampling, abilities, options),
        *_refused_logprobs(request, abilities),
    ):
        raise ValueError(why)
    if request.adapter is not None and not abilities.has_adapters:
        raise ValueError("this SGLang server serves no adapters; start it with --enable-lora")


def _refused_stops(sampling: Sampling, abilities: Abilities) -> Iterator[str]:
    if sampling.ignore_eos and sampling.stop_token_ids:
        yield "ignore_eos and stop_token_ids together: SGLang would ignore the stop tokens too; give one"
    if len(sampling.stop) > MAX_STOP_STRINGS:
        yield f"stop has {len(sampling.stop)} strings; SGLang takes {MAX_STOP_STRINGS}"
    if sampling.stop and sampling.min_tokens:
        yield "stop and min_tokens together: SGLang may end with a stop string before min_tokens; give one"
    if (sampling.stop or sampling.min_tokens) and not abilities.has_tokenizer:
        yield "stop and min_tokens need a SGLang server without --skip-tokenizer-init"


def _refused_adjustments(sampling: Sampling, options: SGLangConfig) -> Iterator[str]:
    if sampling.repetition_penalty != 1.0:
        yield (
            f"repetition_penalty = {sampling.repetition_penalty}: SGLang penalizes the completion's tokens only, "
            "not the prompt's; leave it out"
        )
    adjustments = ("presence_penalty", "frequency_penalty", "logit_bias", "min_tokens")
    given = [name for name in adjustments if getattr(sampling, name)]
    if given and not options.allow_adjusted_logprobs:
        yield (
            f"{', '.join(given)}: SGLang returns log-probs of the logits after this, not those of the model; "
            "leave it out, or set sglang.allow_adjusted_logprobs"
        )


def _refused_draws(sampling: Sampling, abilities: Abilities, options: SGLangConfig) -> Iterator[str]:
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        yield f"temperature = {sampling.temperature}: SGLang takes 0, or {LEAST_TEMPERATURE} and more"
    if sampling.min_p and abilities.deterministic:
        yield "min_p: SGLang has no min_p with --enable-deterministic-inference; leave it out"
    by_seed = abilities.deterministic or is_greedy(sampling) or options.allow_unseeded
    if sampling.seed is not None and not by_seed:
        yield (
            "seed: SGLang draws by seed only with --enable-deterministic-inference; start it so, "
            "or set sglang.allow_unseeded"
        )


def _refused_logprobs(request: GenerationRequest, abilities: Abilities) -> Iterator[str]:
    temperature, greedy = request.sampling.temperature, is_greedy(request.sampling)
    if temperature in (0.0, 1.0):  # SGLang computes log-probs of greedy requests at temperature 1
        return
    if request.raw_logprobs and abilities.logprobs_at_temperature and not greedy:
        yield (
            f"raw log-probs at temperature = {temperature}: SGLang returns them at the temperature; use temperature 1, "
            "or start it with SGLANG_RETURN_ORIGINAL_LOGPROB=1"
        )
    if not request.raw_logprobs and not abilities.logprobs_at_temperature:
        yield (
            f"log-probs at temperature = {temperature}: SGLang runs with SGLANG_RETURN_ORIGINAL_LOGPROB; "
            "use temperature 1, or start it without"
        )
    if not request.raw_logprobs and greedy:
        yield (
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
    return {
        "n": 1,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "temperature": 0.0 if is_greedy(sampling) else sampling.temperature,
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


@dataclass
class Completion:
    """What SGLang has told of one sample so far."""

    num_top: int = 0  # alternatives to every token
    adapter_version: int | None = None  # that its tokens carry, instead of that of the weights
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)

    def add(self, meta: Mapping[str, Any]) -> int:
        """Take up the new tokens of an output; returns where they begin. Outputs of a stream carry all tokens so far
        or, with --incremental-streaming-output, the newest; either way those that are new come last."""
        start = len(self.ids)
        entries = meta.get("output_token_logprobs") or []
        total = meta.get("output_token_logprobs_length", max(meta.get("completion_tokens") or 0, len(entries)))
        num_new = total - start
        if not 0 <= num_new <= len(entries):
            raise EngineError(f"SGLang sent {len(entries)} log-probs where {num_new} of {total} were still to come")
        new = entries[len(entries) - num_new :]
        if any(logprob is None for logprob, *_ in new):
            raise UnusableWeights("SGLang's log-probs are not numbers: the weights it serves are unusable")
        self.ids += [token for _, token, *_ in new]
        self.logprobs += [logprob for logprob, *_ in new]
        if self.num_top and new:
            self.top += [top_of(entry)[: self.num_top] for entry in meta["output_top_logprobs"][-num_new:]]
        return start

    def part(
        self,
        start: int,
        versions: list[int],
        reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> GeneratedSample:
        """From the token at `start` on. `versions`: of the weights that drew each token, from the first on."""
        if self.adapter_version is not None:
            versions = [self.adapter_version] * len(versions)
        top = self.top[start:] if self.num_top else None
        return GeneratedSample(self.ids[start:], self.logprobs[start:], versions[start:], reason, stop_reason, top)


def top_of(entry: list[list[Any]]) -> TopLogprobs:
    return [(token, logprob) for logprob, token, *_ in entry]


def prompt_logprobs(meta: Mapping[str, Any], num_top: int) -> list[PromptLogprob]:
    """From the second prompt token on. The rank is known only where the token is among SGLang's alternatives."""
    logprobs = []
    for (logprob, token, *_), entry in zip(
        meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True
    ):
        top = top_of(entry)
        rank = next((place for place, (other, _) in enumerate(top, 1) if other == token), None)
        logprobs.append(PromptLogprob(token, logprob, rank, top[:num_top]))
    return logprobs


def ending(
    reason: Mapping[str, Any], sampling: Sampling, eos_token_ids: Collection[int]
) -> tuple[FinishReason, int | str | None]:
    """Why a completion ended, and the stop token other than EOS, or the stop string, that ended it."""
    kind, matched = reason["type"], reason.get("matched")
    if kind == "length":
        return "length", None
    if kind == "abort":
        if reason.get("status_code"):  # by SGLang, for want of memory for instance; the client did not ask for that
            raise EngineError(f"SGLang ended the request: {reason.get('message')}")
        return "abort", None
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

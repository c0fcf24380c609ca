"""Our requests in SGLang's words, and its answers in ours. Pure functions; no network.

What SGLang would do otherwise than the protocol says is refused in `check_request`. Its log-probs are those of the
logits after penalties, biases and the ban on ending early, over the temperature, before top-p, top-k and min-p; or,
where the server runs with SGLANG_RETURN_ORIGINAL_LOGPROB, the same without the temperature.
"""

import hashlib
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.config.sglang import SGLangConfig
from tandem.engine.protocol import (
    EngineError,
    FinishReason,
    GeneratedSample,
    GenerationRequest,
    PromptLogprob,
    Sampling,
    TopLogprobs,
    UnusableWeights,
)
from tandem.serving.updates import EngineLost

NOT_A_NUMBER = "NaN happened"  # what SGLang says it matched when it drew a token outside the vocabulary
MAX_STOP_STRINGS = 32
ADJUSTMENTS = ("presence_penalty", "frequency_penalty", "logit_bias", "min_tokens")  # of logits
LEAST_TEMPERATURE = 1e-6  # SGLang takes the likeliest token below

Ending = tuple[FinishReason | None, int | str | None]
"""Why a completion ended, and the stop token other than EOS, or the stop string, that ended it."""


@dataclass(frozen=True)
class Abilities:
    """What the server that runs can do, as probed at the start."""

    deterministic: bool = False  # draws by seed
    has_tokenizer: bool = True
    has_adapters: bool = False
    logprobs_at_temperature: bool = True


def check_request(request: GenerationRequest, abilities: Abilities, options: SGLangConfig) -> None:
    """Raise ValueError for what SGLang cannot do, or would do in another way than it is asked for."""
    for why in (*_refused_sampling(request.sampling, abilities, options), *_refused_logprobs(request, abilities)):
        raise ValueError(why)


def _refused_sampling(sampling: Sampling, abilities: Abilities, options: SGLangConfig) -> Iterator[str]:
    if sampling.ignore_eos and sampling.stop_token_ids:
        yield "ignore_eos and stop_token_ids together: SGLang would ignore the stop tokens too; give one"
    if len(sampling.stop) > MAX_STOP_STRINGS:
        yield f"stop has {len(sampling.stop)} strings; SGLang takes {MAX_STOP_STRINGS}"
    if sampling.stop and sampling.min_tokens:
        yield "stop and min_tokens together: SGLang may end with a stop string before min_tokens; give one"
    if (sampling.stop or sampling.min_tokens) and not abilities.has_tokenizer:
        yield "stop and min_tokens need a SGLang server without --skip-tokenizer-init"
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        yield f"temperature = {sampling.temperature}: SGLang takes 0, or {LEAST_TEMPERATURE} and more"
    if sampling.min_p and abilities.deterministic:
        yield "min_p: SGLang has no min_p with --enable-deterministic-inference; leave it out"
    by_seed = abilities.deterministic or is_greedy(sampling) or options.allow_unseeded
    if sampling.seed is not None and not by_seed:
        yield "seed: start SGLang with --enable-deterministic-inference, or set sglang.allow_unseeded"
    if sampling.repetition_penalty != 1.0:
        given = f"repetition_penalty = {sampling.repetition_penalty}"
        yield f"{given}: SGLang penalizes the completion's tokens only, not the prompt's; leave it out"
    given = ", ".join(name for name in ADJUSTMENTS if getattr(sampling, name))
    if given and not options.allow_adjusted_logprobs:
        yield f"{given}: SGLang gives log-probs after this; leave it out, or set sglang.allow_adjusted_logprobs"


def _refused_logprobs(request: GenerationRequest, abilities: Abilities) -> Iterator[str]:
    temperature, greedy, raw = request.sampling.temperature, is_greedy(request.sampling), request.raw_logprobs
    if temperature in (0.0, 1.0) or (greedy and raw):  # SGLang computes log-probs of greedy requests at temperature 1
        return
    if raw == abilities.logprobs_at_temperature:
        kind, how = ("raw log-probs", "with") if raw else ("log-probs", "without")
        start = f"start SGLang {how} SGLANG_RETURN_ORIGINAL_LOGPROB=1"
        yield f"{kind} at temperature = {temperature}: use temperature 1, or {start}"
    if greedy:  # whether SGLang's log-probs are at this temperature then depends on what else runs
        yield f"top_k = 1 at temperature = {temperature}: use temperature 0"


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0.0 or sampling.top_k == 1


def sample_seed(seed: int, sample_index: int) -> int:
    """SGLang keys a draw by (seed, position); the sample's index goes into the seed. 63 bits, as it takes them."""
    digest = hashlib.blake2b(f"{seed}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Adapter:
    server_name: str  # SGLang's name of it
    path: Path
    version: int | None  # None: that of the weights below


@dataclass(eq=False)
class Sample:
    """One sample of a request: what SGLang is asked for, and what it has told so far."""

    request: GenerationRequest
    index: int = 0
    seed: int | None = None  # of the request; None: SGLang draws at random
    adapter: Adapter | None = None
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    meta: Mapping[str, Any] = field(default_factory=dict)  # of the last output
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)

    def body(self, *, stream: bool) -> dict[str, Any]:
        """For /generate. Every field of sampling is given, so that no default of the server's takes its place."""
        request, sampling = self.request, self.request.sampling
        body: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": request.prompt_ids,
            "sampling_params": {
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
            },
            "return_logprob": True,
            "top_logprobs_num": request.top_logprobs,
            "lora_path": self.adapter.server_name if self.adapter else None,
            "stream": stream,
        }
        if self.seed is not None:
            body["sampling_params"]["sampling_seed"] = sample_seed(self.seed, request.first_index + self.index)
        if request.prompt_logprobs is not None and self.index == 0:
            body["logprob_start_len"] = 0
            # One more than none: whether the prompt's token is the likeliest can be told from it.
            body["top_logprobs_num"] = max(request.top_logprobs, request.prompt_logprobs, 1)
        return body

    def add(self, meta: Mapping[str, Any]) -> int:
        """Take up the new tokens of an output; returns where they begin. Outputs of a stream carry all tokens so far
        or, with --incremental-streaming-output, the newest; either way those that are new come last."""
        self.meta, start, num_top = meta, len(self.ids), self.request.top_logprobs
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
        if num_top and new:
            self.top += [top_of(entry)[:num_top] for entry in meta["output_top_logprobs"][-num_new:]]
        return start

    def part(self, start: int, versions: list[int], end: Ending = (None, None)) -> GeneratedSample:
        """From the token at `start` on. `versions`: of the weights that drew each token, from the first on."""
        if self.adapter is not None and self.adapter.version is not None:
            versions = [self.adapter.version] * len(versions)
        top = self.top[start:] if self.request.top_logprobs else None
        return GeneratedSample(self.ids[start:], self.logprobs[start:], versions[start:], *end, top)


def top_of(entry: list[list[Any]]) -> TopLogprobs:
    return [(token, logprob) for logprob, token, *_ in entry]


def prompt_logprobs(meta: Mapping[str, Any], num_top: int | None) -> list[PromptLogprob] | None:
    """From the second prompt token on. The rank is known only where the token is among SGLang's alternatives."""
    if num_top is None or "input_token_logprobs" not in meta:
        return None
    logprobs = []
    for (logprob, token, *_), entry in zip(meta["input_token_logprobs"], meta["input_top_logprobs"], strict=True):
        if logprob is not None:
            top = top_of(entry)
            rank = next((place for place, (other, _) in enumerate(top, 1) if other == token), None)
            logprobs.append(PromptLogprob(token, logprob, rank, top[:num_top]))
    return logprobs


def ending(reason: Mapping[str, Any], sampling: Sampling, eos_token_ids: Collection[int]) -> Ending:
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
        raise EngineLost(
            f"SGLang answered with weights {label!r}, which were not put there from here "
            f"(known: {', '.join(sorted(labels))}); was it restarted, or updated by another client?"
        )
    return labels[label]

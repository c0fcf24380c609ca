"""From an accepted request body to what the engine takes; what cannot be served is refused by field.

What requests leave out is taken from generation_config.json, as vLLM does it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import ValidationError

from tandem.data.tokenizer import Tokenizer
from tandem.engine.protocol import GenerationRequest, Sampling
from tandem.serving.http.errors import BadRequest
from tandem.serving.http.messages import ChatPrompts, refuse_size
from tandem.serving.text_size import TextLimit
from tandem.serving.vocabulary import explain_beyond, token_beyond
from tandem.types.chat import ChatCompletionRequest, TokenizeRequest
from tandem.types.openai import CompletionRequest, GenerationOptions
from tandem.utils.errors import UserError
from tandem.utils.files import read_json

FILE = "generation_config.json"
FIELDS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
Body = TypeVar("Body", bound=GenerationOptions)


class SamplingDefaults:
    """By field. `max_tokens` is one for chats only: text completions have 16, as everywhere."""

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        self.values = values or {}
        self.max_tokens: int | None = self.values.pop("max_new_tokens", None)

    @classmethod
    def read(cls, model_dir: Path) -> "SamplingDefaults":
        path = model_dir / FILE
        given = read_json(path) if path.exists() else {}
        known = (*FIELDS, "max_new_tokens")
        found = {name: value for name in known if (value := given.get(name)) is not None}
        checked = {name: value for name, value in found.items() if name in FIELDS}
        try:
            GenerationOptions.model_validate(checked)
            ChatCompletionRequest.model_validate(
                {"messages": [{"role": "user", "content": ""}], "max_tokens": found.get("max_new_tokens")}
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(
                f"{path}: {first['loc'][0]} = {first['input']!r}: {first['msg']}; correct it, "
                "or set generation_config = 'vllm' to ignore the file"
            ) from error
        return cls(found)

    def apply(self, body: Body) -> Body:
        """The request with what it leaves out."""
        missing = {name: value for name, value in self.values.items() if name not in body.model_fields_set}
        return body.model_copy(update=missing) if missing else body


if TYPE_CHECKING:
    from tandem.engine.grammars import Grammar

MAX_CHOICES = 4096
# Below this a temperature is 0, as for vLLM: divided by less, logits would no longer be numbers.
LEAST_TEMPERATURE = 1e-5


class PromptReader:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, seq_len: int, defaults: SamplingDefaults) -> None:
        self.tokenizer = tokenizer
        self.limit = TextLimit(tokenizer, seq_len)
        self.chat = ChatPrompts(tokenizer, self.limit)
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.defaults = defaults

    def completion_requests(
        self, body: CompletionRequest, adapter: str | None, grammar: "Grammar | None" = None
    ) -> list[GenerationRequest]:
        """One request for each prompt."""
        body = self.defaults.apply(body)
        if body.max_tokens == 0 and not body.echo:
            raise BadRequest("max_tokens = 0 gives nothing without echo; give at least 1", "max_tokens")
        if body.best_of is not None and body.best_of != body.n:
            raise BadRequest(f"best_of = {body.best_of} is not supported: it must be n = {body.n}", "best_of")
        if not body.detokenize:
            refuse_texts(body)
        wanted = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            if body.stream:
                raise BadRequest("echo with logprobs is not available with stream", "echo")
            wanted = max(wanted or 0, body.logprobs)
        given = as_prompts(body.prompt)
        if len(given) * body.n > MAX_CHOICES:
            raise BadRequest(f"{len(given)} prompts × n = {body.n} are more than {MAX_CHOICES} choices", "n")
        # One after the other: the first that does not fit ends it, whatever follows.
        prompts = (self._ids(prompt, body) for prompt in given)
        # The engine always draws a token; where none is wanted, it is left out of the answer.
        max_tokens, top = max(body.max_tokens, 1), body.logprobs or 0
        return self._requests(prompts, body, max_tokens, adapter, top, wanted, "prompt", grammar)

    def chat_request(
        self, body: ChatCompletionRequest, adapter: str | None, grammar: "Grammar | None" = None
    ) -> GenerationRequest:
        if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
            message = "max_tokens and max_completion_tokens differ; give one of them"
            raise BadRequest(message, "max_completion_tokens")
        if body.top_logprobs and not body.logprobs:
            raise BadRequest("top_logprobs needs logprobs = true", "top_logprobs")
        text = self.chat.render(body.messages, body, show_tools=uses_tools(body))
        prompt = self._encode(text, "messages", add_special_tokens=body.add_special_tokens)
        body = self.defaults.apply(body)
        max_tokens = body.max_completion_tokens or body.max_tokens
        if max_tokens is None and self.defaults.max_tokens is not None:
            max_tokens = max(1, min(self.defaults.max_tokens, self.seq_len - len(prompt)))
        top, wanted = body.top_logprobs, body.prompt_logprobs
        [request] = self._requests([prompt], body, max_tokens, adapter, top, wanted, "messages", grammar)
        return request

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        if body.prompt is not None and body.messages is not None:
            raise BadRequest("prompt and messages are both given; give one of them", "prompt")
        if body.messages is not None:
            text = self.chat.render(body.messages, body, show_tools=bool(body.tools))
            return self._encode(text, "messages", add_special_tokens=bool(body.add_special_tokens))
        if body.prompt is None:
            raise BadRequest("field 'prompt' is missing; give it or messages", "prompt")
        return self._encode(body.prompt, "prompt", add_special_tokens=body.add_special_tokens is not False)

    def detokenize(self, tokens: list[int]) -> str:
        if len(tokens) > self.limit.max_bytes:
            raise BadRequest(f"{len(tokens)} tokens are more than {self.limit.max_bytes}", "tokens")
        self._check_ids(tokens, "tokens")
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def _requests(
        self,
        prompts: Iterable[list[int]],
        body: GenerationOptions,
        max_tokens: int | None,
        adapter: str | None,
        top_logprobs: int,
        prompt_logprobs: int | None,
        param: str,
        grammar: "Grammar | None",
    ) -> list[GenerationRequest]:
        self._check_ids(body.stop_token_ids, "stop_token_ids")
        if body.stream and prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs are not available with stream", "prompt_logprobs")
        if body.stream_options is not None and not body.stream:
            raise BadRequest("stream_options needs stream = true", "stream_options")
        bias = self._bias(body)
        requests = []
        for index, whole in enumerate(prompts):
            prompt = self._truncate(whole, body, max_tokens)
            requests.append(
                GenerationRequest(
                    prompt_ids=prompt,
                    sampling=self._sampling(prompt, body, max_tokens, bias, param),
                    n=body.n,
                    first_index=index * body.n,
                    adapter=adapter,
                    top_logprobs=top_logprobs,
                    raw_logprobs=body.logprobs_mode == "raw",
                    kept_tokens=body.return_kept_token_ids,
                    prompt_logprobs=prompt_logprobs,
                    grammar=grammar,
                )
            )
        return requests

    def _sampling(
        self,
        prompt: list[int],
        body: GenerationOptions,
        max_tokens: int | None,
        bias: tuple[tuple[int, float], ...],
        param: str,
    ) -> Sampling:
        room = self._room(prompt, max_tokens, param)
        max_tokens = room if max_tokens is None else max_tokens
        if body.min_tokens > max_tokens:
            raise BadRequest(f"min_tokens = {body.min_tokens} is above max_tokens = {max_tokens}", "min_tokens")
        return Sampling(
            max_tokens=max_tokens,
            temperature=body.temperature if body.temperature >= LEAST_TEMPERATURE else 0.0,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=bias,
            seed=body.seed,
            min_tokens=body.min_tokens,
            stop_token_ids=tuple(body.stop_token_ids),
            stop=body.stops,
            skip_special_tokens=body.skip_special_tokens,
            ignore_eos=body.ignore_eos,
        )

    def _room(self, prompt: list[int], max_tokens: int | None, param: str) -> int:
        """How many tokens fit behind the prompt; at least those that are asked for."""
        if not prompt:
            raise BadRequest("the prompt is empty; give at least one token", param)
        room = self.seq_len - len(prompt)
        if room < 1:
            raise BadRequest(f"the prompt has {len(prompt)} tokens, at most {self.seq_len - 1} fit", param)
        if max_tokens is not None and max_tokens > room:
            raise BadRequest(
                f"max_tokens = {max_tokens} and a prompt of {len(prompt)} tokens exceed the context of "
                f"{self.seq_len} tokens; at most {room} can be generated",
                "max_tokens",
            )
        return room

    def _truncate(self, prompt: list[int], body: GenerationOptions, max_tokens: int | None) -> list[int]:
        keep = body.truncate_prompt_tokens
        if keep is None:
            return prompt
        if keep == 0:
            raise BadRequest(
                "truncate_prompt_tokens = 0 leaves no prompt; give at least 1, or -1", "truncate_prompt_tokens"
            )
        return prompt[-keep:] if keep > 0 else prompt[-max(self.seq_len - (max_tokens or 1), 1) :]

    def _bias(self, body: GenerationOptions) -> tuple[tuple[int, float], ...]:
        for token in body.logit_bias:
            if not (token.isascii() and token.isdigit() and len(token) < 20 and int(token) < self.vocab_size):
                message = f"logit_bias: {token!r} is no token id below {self.vocab_size}, the size of the vocabulary"
                raise BadRequest(message, "logit_bias")
        return tuple((int(token), bias) for token, bias in body.logit_bias.items())

    def _ids(self, prompt: str | list[int], body: CompletionRequest) -> list[int]:
        if isinstance(prompt, str):
            return self._encode(prompt, "prompt", add_special_tokens=body.add_special_tokens)
        self._check_ids(prompt, "prompt")
        return prompt

    def _encode(self, text: str, param: str, *, add_special_tokens: bool = False) -> list[int]:
        refuse_size(self.limit, len(text), param)
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:  # JSON can spell half a character, which no encoding can write
            raise BadRequest("the text is not valid Unicode: it holds a lone surrogate", param) from error
        refuse_size(self.limit, num_bytes, param)
        token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if (beyond := token_beyond(token_ids, self.vocab_size)) is not None:
            raise BadRequest(explain_beyond(self.tokenizer, beyond, self.vocab_size), param)
        return token_ids

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        if (beyond := token_beyond(token_ids, self.vocab_size)) is not None:
            raise BadRequest(f"token id {beyond} is outside the vocabulary of {self.vocab_size} tokens", param)


def refuse_texts(body: CompletionRequest) -> None:
    """What an answer without text cannot give."""
    if not body.return_token_ids:
        raise BadRequest("detokenize = false gives nothing without return_token_ids = true", "detokenize")
    given = {
        "stream": body.stream,
        "echo": body.echo,
        "logprobs": body.logprobs,
        "prompt_logprobs": body.prompt_logprobs,
    }
    for name, value in given.items():
        if value:
            raise BadRequest(
                f"detokenize = false is not available with {name}, which is answered with text", "detokenize"
            )


def uses_tools(body: ChatCompletionRequest) -> bool:
    return bool(body.tools) and body.tool_choice != "none"


def as_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or several, as text or as token ids; a list of numbers is one prompt."""
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [cast(str | list[int], prompt)]
    return cast(list[str | list[int]], prompt)


def num_characters(body: CompletionRequest) -> int:
    """How much there is to encode, or to check: characters or token ids, over all prompts."""
    return sum(len(prompt) for prompt in as_prompts(body.prompt))

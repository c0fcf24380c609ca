"""From an accepted request body to what the engine takes; what cannot be served is refused by field."""

from collections.abc import Sequence
from typing import cast

from tandem.data.tokenizer import Tokenizer
from tandem.inference.engine import GenerationRequest, Sampling
from tandem.types.openai import ChatCompletionRequest, CompletionRequest, GenerationOptions
from tandem.utils.errors import UserError

MAX_CHOICES = 4096


class BadRequest(ValueError):
    """Refused with the field that is wrong."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class PromptReader:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, seq_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.seq_len = seq_len

    def completion_requests(self, body: CompletionRequest) -> list[GenerationRequest]:
        """One request for each prompt."""
        prompts = [self._ids(prompt) for prompt in as_prompts(body.prompt)]
        return self._requests(prompts, body, body.max_tokens, "prompt")

    def chat_request(self, body: ChatCompletionRequest) -> GenerationRequest:
        if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
            message = "max_tokens and max_completion_tokens differ; give one of them"
            raise BadRequest(message, "max_completion_tokens")
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        try:
            prompt = self._encode(self.tokenizer.render(messages, add_generation_prompt=True), "messages")
        except UserError as error:
            raise BadRequest(str(error), "messages") from error
        return self._requests([prompt], body, body.max_completion_tokens or body.max_tokens, "messages")[0]

    def _requests(
        self, prompts: list[list[int]], body: GenerationOptions, max_tokens: int | None, param: str
    ) -> list[GenerationRequest]:
        self._check_ids(body.stop_token_ids, "stop_token_ids")
        if len(prompts) * body.n > MAX_CHOICES:
            raise BadRequest(f"{len(prompts)} prompts × n = {body.n} are more than {MAX_CHOICES} choices", "n")
        return [
            GenerationRequest(prompt, self._sampling(prompt, body, max_tokens, param), body.n, index * body.n)
            for index, prompt in enumerate(prompts)
        ]

    def _sampling(self, prompt: list[int], body: GenerationOptions, max_tokens: int | None, param: str) -> Sampling:
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
        return Sampling(
            max_tokens=room if max_tokens is None else max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            seed=body.seed,
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
        )

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._encode(prompt, "prompt", add_special_tokens=True)
        self._check_ids(prompt, "prompt")
        return prompt

    def _encode(self, text: str, param: str, *, add_special_tokens: bool = False) -> list[int]:
        # JSON can spell half a character, which no encoding can write.
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise BadRequest("the text is not valid Unicode: it holds a lone surrogate", param)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        if token_ids and max(token_ids) >= self.vocab_size:
            raise BadRequest(f"token id {max(token_ids)} is outside the vocabulary of {self.vocab_size} tokens", param)


def as_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or several, as text or as token ids; a list of numbers is one prompt."""
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [cast(str | list[int], prompt)]
    return cast(list[str | list[int]], prompt)

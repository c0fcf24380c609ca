"""Prompts with a token that the model has no embedding for. vLLM lets pass what its tokenizer knows, and the engine
ends on it."""

from typing import Any


def client_error() -> type[Exception]:
    """What vLLM answers with 400."""
    try:
        from vllm.exceptions import VLLMValidationError  # pyright: ignore[reportMissingImports]
    except ImportError:
        return ValueError
    return VLLMValidationError


def refuse_unknown_tokens(engine: Any, refused: type[Exception]) -> None:
    """Have vLLM's AsyncLLM refuse such prompts as it refuses other bad ones."""
    vocab_size = engine.vllm_config.model_config.get_vocab_size()
    processor = engine.input_processor
    process = processor.process_inputs

    def checked(*arguments: Any, **named: Any) -> Any:
        request = process(*arguments, **named)
        largest = max(request.prompt_token_ids or (), default=0)
        # Ids that stand for images and the like have no embedding.
        if largest >= vocab_size and not getattr(request, "mm_features", None):
            raise refused(f"token id {largest} is outside the model's vocabulary of {vocab_size} tokens")
        return request

    processor.process_inputs = checked

"""Prompts that vLLM must not see."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.serving.vllm.prompts import refuse_unknown_tokens


def fake_engine(vocab_size: int) -> Any:
    """As much of AsyncLLM as is looked at: `process_inputs` makes a request of what it is given."""
    model_config = SimpleNamespace(get_vocab_size=lambda: vocab_size)
    processor = SimpleNamespace(process_inputs=lambda request_id, prompt, **named: prompt)
    return SimpleNamespace(vllm_config=SimpleNamespace(model_config=model_config), input_processor=processor)


def test_a_token_beyond_the_embedding_is_refused_and_others_pass() -> None:
    engine = fake_engine(vocab_size=10)
    refuse_unknown_tokens(engine, ValueError)
    process = engine.input_processor.process_inputs
    for fine in ([1, 9], [], None):
        request = SimpleNamespace(prompt_token_ids=fine, mm_features=None)
        assert process("a", request, priority=0) is request
    with pytest.raises(ValueError, match="token id 10 is outside the model's vocabulary of 10 tokens"):
        process("a", SimpleNamespace(prompt_token_ids=[1, 10], mm_features=None))
    process("a", SimpleNamespace(prompt_token_ids=[1, 10], mm_features=["an image"]))

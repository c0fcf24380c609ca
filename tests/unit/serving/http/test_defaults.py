"""What requests leave out, from the model's generation_config.json."""

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.unit.serving.http.conftest import SEQ_LEN, hello_engine

from tandem.data.tokenizer import Tokenizer
from tandem.engine.protocol import Sampling
from tandem.serving.http.app import create_app
from tandem.serving.http.context import ApiOptions
from tandem.serving.http.prompts import SamplingDefaults
from tandem.utils.errors import UserError
from tandem.utils.files import write_json

GIVEN = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 40,
    "do_sample": True,
    "eos_token_id": [0],
    "bos_token_id": None,
}


def sampled(tokenizer: Tokenizer, defaults: SamplingDefaults, path: str, **body: Any) -> Sampling:
    """What the engine is asked for."""
    engine = hello_engine(tokenizer)
    options = ApiOptions(vocab_size=99, seq_len=SEQ_LEN, sampling=defaults)
    needed = {"prompt": "ab"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    with TestClient(create_app(engine, tokenizer, Path("/models/little"), options)) as client:
        answer = client.post(path, json=needed | body)
    assert answer.status_code == 200, answer.text
    return engine.asked[0].sampling


@pytest.fixture
def defaults(tmp_path: Path) -> SamplingDefaults:
    write_json(tmp_path / "generation_config.json", GIVEN)
    return SamplingDefaults.read(tmp_path)


def test_what_is_left_out_is_as_the_model_advises(tokenizer: Tokenizer, defaults: SamplingDefaults) -> None:
    chat = sampled(tokenizer, defaults, "/v1/chat/completions", temperature=None)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.min_p) == (0.6, 0.95, 20, 0.05)
    assert chat.repetition_penalty == 1.1 and chat.max_tokens == 40
    text = sampled(tokenizer, defaults, "/v1/completions")
    assert (text.temperature, text.top_k, text.max_tokens) == (0.6, 20, 16)


def test_what_is_said_counts(tokenizer: Tokenizer, defaults: SamplingDefaults) -> None:
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    chat = sampled(tokenizer, defaults, "/v1/chat/completions", **plain, max_tokens=60)
    assert chat == sampled(tokenizer, SamplingDefaults(), "/v1/chat/completions", max_tokens=60)
    assert sampled(tokenizer, defaults, "/v1/chat/completions", max_completion_tokens=50).max_tokens == 50


def test_as_many_tokens_as_fit(tokenizer: Tokenizer) -> None:
    chat = sampled(tokenizer, SamplingDefaults({"max_new_tokens": 10**6}), "/v1/chat/completions")
    assert chat.max_tokens == SEQ_LEN - 18


def test_a_model_without_advice(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chat = sampled(tokenizer, SamplingDefaults.read(tmp_path), "/v1/chat/completions")
    assert (chat.temperature, chat.top_p, chat.top_k, chat.max_tokens) == (1.0, 1.0, 0, SEQ_LEN - 18)


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 7}, {"top_k": 1.5}, {"max_new_tokens": 0}])
def test_advice_that_makes_no_sense_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    write_json(tmp_path / "generation_config.json", wrong)
    with pytest.raises(UserError, match=r"generation_config\.json: .* set generation_config = 'vllm'"):
        SamplingDefaults.read(tmp_path)

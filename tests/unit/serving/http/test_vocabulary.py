"""A tokenizer with more tokens than the model has embeddings: every way a token can come is closed."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.unit.serving.http.conftest import SEQ_LEN, hello_engine, write_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from tandem.data.tokenizer import Tokenizer
from tandem.serving.http.app import create_app
from tandem.serving.http.context import ApiOptions
from tandem.serving.vocabulary import compare_vocabularies
from tandem.utils.errors import UserError

PAD = "<pad>"


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With a pad token that nobody resized the model for."""
    folder = tmp_path_factory.mktemp("grown")
    write_tokenizer(folder)
    tokenizer = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(PAD, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def client(grown: Tokenizer) -> Iterator[TestClient]:
    options = ApiOptions(vocab_size=grown.vocab_size - 1, seq_len=SEQ_LEN)
    app = create_app(hello_engine(grown), grown, Path("/models/little"), options)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def conversation(text: str) -> dict[str, list[dict[str, str]]]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": f"a{PAD}b"}, "prompt"),
        ("/v1/completions", {"prompt": ["a", PAD]}, "prompt"),
        ("/v1/completions", {"prompt": PAD, "stream": True}, "prompt"),
        ("/v1/completions", {"prompt": "a" * 5000 + PAD, "truncate_prompt_tokens": 9}, "prompt"),
        ("/v1/chat/completions", conversation(PAD), "messages"),
        ("/v1/chat/completions", conversation("a") | {"chat_template_kwargs": {"mood": PAD}}, "messages"),
        ("/tokenize", {"prompt": PAD}, "prompt"),
        ("/tokenize", conversation(PAD), "messages"),
    ],
)
def test_text_is_checked_as_token_ids_are(
    client: TestClient, grown: Tokenizer, path: str, body: dict, param: str
) -> None:
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param
    assert f"'{PAD}' ({grown.vocab_size - 1})" in error["message"]


def test_so_are_all_token_ids(client: TestClient, grown: Tokenizer) -> None:
    beyond = grown.vocab_size - 1
    for body in (
        {"prompt": [1, beyond]},
        {"prompt": [[1], [beyond]]},
        {"prompt": "a", "stop_token_ids": [beyond]},
        {"prompt": "a", "logit_bias": {str(beyond): 1}},
    ):
        assert client.post("/v1/completions", json=body).status_code == 400, body
    assert client.post("/detokenize", json={"tokens": [beyond]}).status_code == 400
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_the_start_tells_of_it(grown: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compare_vocabularies(grown, grown.vocab_size, Path("m"))
        assert not caplog.records
        compare_vocabularies(grown, grown.vocab_size - 1, Path("m"))
    assert f"1 of its {grown.vocab_size} tokens" in caplog.text and f"'{PAD}'" in caplog.text
    with pytest.raises(UserError, match="holds the tokenizer of another model"):
        compare_vocabularies(grown, 40, Path("m"))

"""An API around a fake engine, on a tokenizer whose tokens are single characters, and a client for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.unit.serving.http.fake_engine import FakeEngine
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tandem.data.tokenizer import Tokenizer as ModelTokenizer
from tandem.engine.grammars import Grammars
from tandem.engine.protocol import GenerationRequest
from tandem.serving.http.app import create_app
from tandem.serving.http.context import ApiOptions
from tandem.utils.files import write_json

EOS = 0
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "é", "界"]
TEMPLATE = """\
{%- if tools %}tools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call></tool_call>
{% endif %}
{%- for message in messages %}{{ message.role }}:{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- if message.tool_call_id %}#{{ message.tool_call_id }}{% endif %}|{% endfor %}
{%- if add_generation_prompt %}assistant:{% if mood %}({{ mood }}){% endif %}{% endif %}"""
SEQ_LEN = 512


def write_tokenizer(folder: Path, template: Any = TEMPLATE) -> ModelTokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: index for index, token in enumerate(["<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<eos>", "chat_template": template})
    return ModelTokenizer(folder)


def write_byte_tokenizer(folder: Path) -> ModelTokenizer:
    """One token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(["<eos>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<eos>", "chat_template": TEMPLATE})
    return ModelTokenizer(folder)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "little")


def hello_engine(tokenizer: ModelTokenizer) -> FakeEngine:
    """Says "hello world!" and ends, unless a test tells it otherwise."""

    def script(request: GenerationRequest, index: int) -> list[int]:
        return [*tokenizer.encode("hello world!"), EOS, *tokenizer.encode("more" * 100)]

    return FakeEngine(tokenizer, script)


@pytest.fixture
def engine(tokenizer: ModelTokenizer) -> FakeEngine:
    return hello_engine(tokenizer)


@pytest.fixture(scope="session")
def api_options() -> ApiOptions:
    return ApiOptions(vocab_size=1 + len(CHARACTERS), seq_len=SEQ_LEN, weight_roots=(Path("/"),))


@pytest.fixture
def client(engine: FakeEngine, tokenizer: ModelTokenizer, api_options: ApiOptions) -> Iterator[TestClient]:
    app = create_app(
        engine, tokenizer, Path("/models/little"), api_options, Grammars(tokenizer, api_options.vocab_size)
    )
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client

"""Rendering and token ids equal to transformers' apply_chat_template, and clear refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import tandem
from tandem.config.shared import ModelConfig
from tandem.data.tokenizer import Tokenizer
from tandem.utils.errors import UserError

SOURCES = Path(tandem.__file__).parent
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Reverse abc, in 12 steps."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<b>1 & 2</b>\n  indented"},
        {"role": "assistant", "content": "ok "},
        {"role": "user", "content": ""},
    ],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "größe",
            "description": "Size of <x> & 'y'",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    }
]
# What real templates use: tools, tojson with and without layout, namespaces, loop controls, special tokens.
TOOL_TEMPLATE = """\
{{- bos_token }}
{%- set state = namespace(count=0) %}
{%- if tools %}
    {%- for tool in tools %}
{{ tool | tojson }}
{{ tool | tojson(indent=2) }}
{{ tool | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}
    {%- endfor %}
{%- endif %}
{% for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set state.count = state.count + 1 %}
    {%- if message.role == 'assistant' %}
{% generation %}{{ message.content.strip() }}{{ eos_token }}{% endgeneration %}
    {%- else %}
[{{ state.count }}] {{ message.content }}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}>{% endif %}
"""


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json cannot be read as a tokenizer"),
        ("tokenizer.json", "[]", r"tokenizer\.json cannot be read as a tokenizer"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json must hold a JSON object"),
        ("config.json", "7", r"config\.json must hold a JSON object"),
        ("config.json", '{"eos_token_id": "two"}', r"config\.json: eos_token_id = 'two' is neither a token id"),
        ("generation_config.json", '{"eos_token_id": [2, -1]}', r"eos_token_id = \[2, -1\] is neither a token id"),
    ],
)
def test_damaged_files_are_named(tiny_model: Path, tmp_path: Path, name: str, text: str, message: str) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / name).write_text(text)
    with pytest.raises(UserError, match=message):
        Tokenizer(tmp_path / "model")


@pytest.fixture(params=["tiny_model", "smollm2_model"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture
def changed(tiny_model: Path, tmp_path: Path):
    """A copy of the tiny model's text files, with some of them written anew; None deletes."""

    def change(**files: Any) -> Path:
        target = tmp_path / "model"
        shutil.copytree(tiny_model, target, ignore=shutil.ignore_patterns("*.safetensors"))
        names = {"template": "chat_template.jinja", "tokenizer": "tokenizer.json"}
        for key, content in files.items():
            path = target / names.get(key, f"{key}.json")
            if content is None:
                path.unlink()
            else:
                path.write_text(content if isinstance(content, str) else json.dumps(content))
        return target

    return change


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_are_those_of_transformers(
    model_dir: Path, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    ours, theirs = Tokenizer(model_dir), AutoTokenizer.from_pretrained(model_dir)
    options: Any = {"add_generation_prompt": add_generation_prompt}
    expected = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert messages[0]["content"] in expected
    assert ours.render(messages, **options) == expected
    expected_ids = theirs.apply_chat_template(messages, return_dict=False, **options)
    assert ours.encode_chat(messages, **options) == expected_ids


@pytest.mark.parametrize("tools", [TOOLS, None])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_tools_are_rendered_as_transformers_does(
    smollm2_model: Path, tmp_path: Path, tools: list[dict[str, Any]] | None, add_generation_prompt: bool
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copyfile(smollm2_model / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    options = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    expected = theirs.apply_chat_template(CONVERSATIONS[1], tokenize=False, **options)
    assert ("größe" in expected) == (tools is not None)
    assert ours.render(CONVERSATIONS[1], **options) == expected
    expected_ids = theirs.apply_chat_template(CONVERSATIONS[1], return_dict=False, **options)
    assert ours.encode_chat(CONVERSATIONS[1], **options) == expected_ids


def test_text_comes_back(model_dir: Path) -> None:
    tokenizer = Tokenizer(model_dir)
    text = "Reverse abc:  cba, 123!\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ended = tokenizer.encode("cba<|im_end|>")
    assert ended[-1] == tokenizer.token_id("<|im_end|>")
    assert tokenizer.decode(ended) == "cba"
    assert tokenizer.decode(ended, skip_special_tokens=False) == "cba<|im_end|>"


def test_vocabulary_is_the_models(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    assert Tokenizer(model_dir).vocab_size == config["vocab_size"]
    assert Tokenizer(model_dir).token_id("no such token") is None


def test_every_end_token_is_found_once(changed) -> None:
    folder = changed(generation_config={"eos_token_id": [5, 2, 7]}, config={"eos_token_id": 9})
    assert Tokenizer(folder).eos_token_ids == [2, 5, 7, 9]


def test_end_tokens_of_real_directories(tiny_model: Path, smollm2_model: Path) -> None:
    assert Tokenizer(tiny_model).eos_token_ids == [2]
    assert Tokenizer(smollm2_model).eos_token_ids == [2]


def test_a_special_token_may_be_a_table(changed) -> None:
    folder = changed(tokenizer_config={"eos_token": {"content": "<|pad|>"}}, config={}, template="{{ eos_token }}!")
    tokenizer = Tokenizer(folder)
    assert tokenizer.eos_token_ids == [0]
    assert tokenizer.render(user("hi"), add_generation_prompt=True) == "<|pad|>!"


@pytest.mark.parametrize(
    "written", ["{{ messages[0].content }}?", [{"name": "default", "template": "{{ messages[0].content }}?"}]]
)
def test_a_template_may_stand_in_the_tokenizer_config(changed, written: Any) -> None:
    tokenizer = Tokenizer(changed(template=None, tokenizer_config={"chat_template": written}))
    assert tokenizer.has_chat_template
    assert tokenizer.render(user("why"), add_generation_prompt=True) == "why?"


@pytest.mark.parametrize("own", [{"template": None}, {"template": "the model's"}])
def test_a_template_that_is_given_replaces_all_that_the_model_has(changed, tmp_path: Path, own: dict[str, Any]) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}, {% if tools %} with tools{% endif %}")
    folder = changed(**own)
    write_files(folder, {"additional_chat_templates/tool_use.jinja": "not this one"})
    tokenizer, theirs = (
        Tokenizer.of(ModelConfig(name=folder, chat_template=file)),
        AutoTokenizer.from_pretrained(folder),
    )
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(user("hi"), tools=tools, tokenize=False, chat_template=file.read_text())
        assert tokenizer.render(user("hi"), add_generation_prompt=False, tools=tools) == expected


def test_a_template_file_that_is_none_is_refused(changed, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"model.chat_template = 'no.jinja' cannot be read: No such file .* a Jinja file"
    ):
        Tokenizer.of(ModelConfig(name=tmp_path, chat_template=Path("no.jinja")))
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match="chat template cannot be read"):
        Tokenizer.of(ModelConfig(name=changed(), chat_template=tmp_path / "bad.jinja"))


def test_every_process_takes_the_template_that_its_model_was_given() -> None:
    """Whoever knows what the model was told opens its tokenizer by `Tokenizer.of`."""
    direct = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if " Tokenizer(" in path.read_text()}
    assert direct == {"serving/rewards/goal.py"}  # which is given no configuration of one


def test_a_model_without_a_template_refuses_messages(changed) -> None:
    tokenizer = Tokenizer(changed(template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match="the model has no chat template"):
        tokenizer.render(user("hi"), add_generation_prompt=True)


def test_a_template_that_refuses_is_quoted(changed) -> None:
    tokenizer = Tokenizer(changed(template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(UserError, match="the chat template refuses these messages: roles must alternate"):
        tokenizer.render(user("hi"), add_generation_prompt=True)


@pytest.mark.parametrize("messages", [user(None), [{"role": "user"}]])
def test_messages_without_text_are_refused(tiny_model: Path, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(UserError, match="the chat template refuses these messages"):
        Tokenizer(tiny_model).render(messages, add_generation_prompt=True)


def test_a_template_cannot_reach_python(changed) -> None:
    tokenizer = Tokenizer(changed(template="{{ ''.__class__.__mro__ }}"))
    with pytest.raises(UserError, match="unsafe"):
        tokenizer.render(user("hi"), add_generation_prompt=True)


def test_a_broken_template_is_refused(changed) -> None:
    with pytest.raises(UserError, match="chat template cannot be read"):
        Tokenizer(changed(template="{% for %}"))


def test_a_directory_without_a_tokenizer_is_refused(changed) -> None:
    with pytest.raises(UserError, match=r"holds no tokenizer: there is no tokenizer\.json in it"):
        Tokenizer(changed(tokenizer=None))


def test_lengths_that_a_tokenizer_file_carries_cut_nothing(changed, tiny_model: Path) -> None:
    content = json.loads((tiny_model / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    content["padding"] |= {"pad_type_id": 0, "pad_token": "<|pad|>"}
    assert Tokenizer(changed(tokenizer=content)).encode("abcde") == Tokenizer(tiny_model).encode("abcde")


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


SPECIAL_TEMPLATE = (
    "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ sep_token }}{{ pad_token }}{{ cls_token }}{{ mask_token }}"
    "{{ image_token }}{{ audio_token }}"
)
SPECIAL_FILES: list[dict[str, Any]] = [
    {
        "tokenizer_config": {
            "bos_token": "<|im_start|>",
            "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
            "pad_token": None,
            "unk_token": "u",
            "cls_token": "c",
            "sep_token": "s",
            "mask_token": "m",
            "image_token": "i",
            "add_bos_token": True,
            "extra_special_tokens": {"audio_token": "a"},
        }
    },
    {
        "tokenizer_config": {"eos_token": "old", "cls_token": "c"},
        "special_tokens_map": {"eos_token": {"content": "<|im_end|>"}, "mask_token": "m", "image_token": "i"},
    },
    {
        "tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": {}},
        "special_tokens_map": {"eos_token": "another", "mask_token": "m"},
    },
]


@pytest.mark.parametrize("files", SPECIAL_FILES)
def test_special_tokens_reach_the_template_as_with_transformers(changed, files: dict[str, Any]) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | files["tokenizer_config"]
    folder = changed(template=SPECIAL_TEMPLATE, **files | {"tokenizer_config": config})
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(user("hi"), tokenize=False)
    assert Tokenizer(folder).render(user("hi"), add_generation_prompt=False) == expected
    assert "<|im_end|>" in expected and Tokenizer(folder).info["eos_token"] == "<|im_end|>"


def test_additional_special_tokens_reach_the_template(changed) -> None:
    written = {"additional_special_tokens": ["<|pad|>", {"content": "<|im_end|>"}]}
    folder = changed(template="{{ additional_special_tokens | join(' ') }}", tokenizer_config=written)
    assert Tokenizer(folder).render(user("hi"), add_generation_prompt=False) == "<|pad|> <|im_end|>"


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
NAMED += [{"name": "rag", "template": "{% never read %}"}]


@pytest.mark.parametrize("tools", [TOOLS, [], None])
@pytest.mark.parametrize("in_files", [False, True])
def test_the_template_for_tools_is_used_where_there_are_tools(changed, tools: Any, in_files: bool) -> None:
    if in_files:
        folder = changed(template="plain", tokenizer_config={"chat_template": "not this one"})
        write_files(folder, {"additional_chat_templates/tool_use.jinja": "with tools"})
    else:
        folder = changed(template=None, tokenizer_config={"chat_template": NAMED})
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(user("hi"), tools=tools, tokenize=False)
    assert expected == ("plain" if tools is None else "with tools")
    assert ours.render(user("hi"), tools=tools, add_generation_prompt=False) == expected
    assert [entry["name"] for entry in ours.info["chat_template"]][-2:] in (
        ["tool_use", "rag"],
        ["tool_use", "default"],
    )


def test_named_templates_without_a_default_are_told(changed) -> None:
    tokenizer = Tokenizer(changed(template=None, tokenizer_config={"chat_template": NAMED[1:]}))
    assert tokenizer.render(user("hi"), tools=TOOLS, add_generation_prompt=False) == "with tools"
    with pytest.raises(UserError, match=r"none of the model's chat templates \(rag, tool_use\) is its 'default'"):
        tokenizer.render(user("hi"), add_generation_prompt=False)


@pytest.mark.parametrize("written", [7, ["text"], [{"name": "default"}], [{"name": "default", "template": 3}]])
def test_a_template_of_another_shape_is_refused(changed, written: Any) -> None:
    with pytest.raises(UserError, match="chat_template must be a text, or a list"):
        Tokenizer(changed(template=None, tokenizer_config={"chat_template": written}))

"""Secrets are known by their names, and neither shown nor stored for others to read."""

import pytest

from tandem.utils.secrets import hidden, hidden_in_arguments, holds_secret, names_secret

SECRETS = """
api_key server.api_key --server.api-key WANDB_API_KEY OPENAI_KEY apiKey HF_TOKEN hf-token accessToken bearer_token
AWS_SECRET_ACCESS_KEY client_secret PGPASSWORD db.password ssl-keyfile-password
openai_key judge_key wandb_key hf_key openrouter_key --env.args.judge-key anthropicKey
Authorization proxy-authorization bearer
"""
OTHERS = """
question_key solution_key id_key
api_key_var key env.args.key keys answer_key sort_key primary-key cache.public_key
max_tokens MAX_TOKENS token_ids eos_token stop-token-ids tokenizer
TOKENIZERS_PARALLELISM WANDB_PROJECT keep_last
"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_secrets_are_known_by_name(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize("name", OTHERS.split())
def test_other_names_are_none(name: str) -> None:
    assert not names_secret(name)


def test_a_configuration_is_shown_without_them() -> None:
    config = {"seed": 1, "server": {"api_key": "s3cret", "api_key_var": "K"}, "env": [{"args": {"token": "s3cret"}}]}
    assert holds_secret(config) and "s3cret" not in str(hidden(config))
    assert hidden(config)["server"] == {"api_key": "***", "api_key_var": "K"} and hidden(config)["seed"] == 1
    assert hidden({"url": "http://me:s3cret@host/v1"}) == {"url": "http://***@host/v1"}
    for without in ({"api_key": None}, {"api_key": ""}, {"url": "http://host:80/v1"}, {"tokens": [1, 2]}, (1, "a")):
        assert not holds_secret(without)


@pytest.mark.parametrize(
    "value",
    ["Bearer s3cret", "Authorization: Bearer s3cret", "sk-proj-s3cret-abc", "hf_s3cretABCDEF", "http://me:s3cret@host"],
)
def test_secrets_are_known_by_their_form(value: str) -> None:
    config = {"headers": [{"a": value}], "n": 1}
    assert holds_secret(config) and "s3cret" not in str(hidden(config))
    assert "s3cret" not in str(hidden_in_arguments(["rl", "--env.args", value, f"--more={value}"]))


@pytest.mark.parametrize(
    "value",
    [
        "Bearer",
        "a Bearer of bad news",
        "sk-SK",
        "sk-learn-baseline",
        "hf_transformers",
        "models/hf_Qwen25small",
        "risk-free-assets",
    ],
)
def test_other_texts_are_none(value: str) -> None:
    assert not holds_secret({"a": value}) and hidden(value) == value


@pytest.mark.parametrize("flag", ["--inference.server.api-key", "--orchestrator.client.api_key", "--env.args.hf-token"])
def test_a_command_line_is_shown_without_them(flag: str) -> None:
    assert hidden_in_arguments(["rl", flag, "s3cret", "--seed", "1"]) == ["rl", flag, "***", "--seed", "1"]
    assert hidden_in_arguments(["rl", f"{flag}=s3cret", "--seed", "1"]) == ["rl", f"{flag}=***", "--seed", "1"]


def test_tables_and_addresses_in_a_command_line() -> None:
    shown = hidden_in_arguments(["rl", "--env.args", '{"api_key": "s3cret", "n": 1}', "--url=http://a:s3cret@host"])
    assert shown == ["rl", "--env.args", '{"api_key":"***","n":1}', "--url=http://***@host"]
    others = ["rl", "@", "rl.toml", "--server.api-key-var", "MY_KEY", "--max-steps=3", "--args", '{"n": [1, 2]}', "{"]
    assert hidden_in_arguments(others) == others

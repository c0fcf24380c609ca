"""Every mistake gets the key, the value, and what would be right."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.commands.rl import RLConfig
from tandem.commands.sft import SFTConfig
from tandem.commands.trainer import TrainerConfig
from tandem.config.base import load_config
from tandem.config.client import ClientConfig
from tandem.config.explain import explain_validation_error
from tandem.config.inference import InferenceConfig, ServerConfig
from tandem.config.sglang import SGLangConfig
from tandem.rewards.config import SteeringConfig
from tandem.utils.errors import UserError

MODEL = ("--model.name", "m")


def test_an_unknown_key_in_a_file(refusal, rl_toml, tmp_path) -> None:
    more = tmp_path / "more.toml"
    more.write_text("max_stepps = 5\n")
    assert refusal("@", rl_toml, "@", str(more)) == ("unknown key 'max_stepps' (value 5); did you mean 'max_steps'?")


def test_an_unknown_key_below_a_section(refusal, rl_toml, tmp_path) -> None:
    more = tmp_path / "more.toml"
    more.write_text("[orchestrator.sampling]\ntemprature = 0.5\n")
    assert refusal("@", rl_toml, "@", str(more)) == (
        "unknown key 'orchestrator.sampling.temprature' (value 0.5); did you mean 'temperature'?"
    )


def test_an_unknown_key_in_an_optional_section(refusal, rl_toml) -> None:
    assert refusal("@", rl_toml, "--inference.server.prot", "9") == (
        "unknown key 'inference.server.prot' (value '9'); did you mean 'port'?"
    )


@pytest.mark.parametrize("name", ["api-kee", "password"])
def test_a_secret_under_a_wrong_name_is_not_shown(refusal, rl_toml, name: str) -> None:
    message = refusal("@", rl_toml, f"--inference.server.{name}", "s3cret")
    assert message.startswith(f"unknown key 'inference.server.{name.replace('-', '_')}' (value ***); ")


def test_an_unknown_flag(refusal) -> None:
    assert refusal(*MODEL, "--optimizer.momentum", "1", cls=TrainerConfig).startswith(
        "unknown key 'optimizer.momentum' (value '1'); known here: betas, eps, lr, max_grad_norm, weight_decay"
    )


def test_a_misspelt_section(refusal, rl_toml) -> None:
    message = refusal("@", rl_toml, "--trianer", "@", rl_toml)
    assert "unknown key 'trianer'" in message and "did you mean 'trainer'?" in message


def test_several_problems_are_all_named(refusal) -> None:
    message = refusal(*MODEL, "--max-stps", "3", "--log-level", "loud", cls=TrainerConfig)
    first, *rest = message.splitlines()
    assert first == "2 problems in the configuration:"
    assert len(rest) == 2 and "'max_stps'" in message and "'loud'" in message


def test_a_wrong_type(refusal) -> None:
    assert refusal(*MODEL, "--max-steps", "three", cls=TrainerConfig) == (
        "max_steps = 'three' is not valid: input should be a valid integer, unable to parse string as an integer"
    )


def test_a_switch_where_a_number_belongs(refusal, tmp_path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("max_steps = true\n[optimizer]\nlr = false\nbetas = [0.9, true]\n")
    message = refusal(*MODEL, "@", str(wrong), cls=TrainerConfig)
    assert "max_steps: true is not a number" in message and "optimizer.lr: false is not a number" in message
    assert "optimizer.betas: true is not a number" in message


@pytest.mark.parametrize(("key", "value"), [("targets", True), ("targets", [0, True]), ("goal_weights", True)])
def test_a_switch_in_a_table_of_numbers(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match="true is not a number"):
        SteeringConfig.model_validate(
            {"type": "steering", "base_url": "http://host", "goals": ["a"], key: {"a": value}}
        )


def test_a_shared_value_of_a_wrong_type(refusal, rl_toml) -> None:
    assert "max_steps = 'three' is not valid" in refusal("@", rl_toml, "--max-steps", "three")


def test_a_section_that_is_no_table(refusal, rl_toml, tmp_path) -> None:
    more = tmp_path / "more.json"
    more.write_text('{"trainer": 5}')
    assert "trainer = 5 is not valid" in refusal("@", rl_toml, "@", str(more))
    more.write_text('{"model": "x"}')
    assert "model = 'x' is not valid: it is a section; give model.name" in refusal("@", rl_toml, "@", str(more))
    more.write_text('{"orchestrator": {"env": "arithmetic"}}')
    assert refusal("@", rl_toml, "@", str(more)).endswith("it is a section; give orchestrator.env.id")


def test_a_value_out_of_range(refusal) -> None:
    assert refusal(*MODEL, "--loss.clip-low", "1.5", cls=TrainerConfig) == (
        "loss.clip_low = '1.5' is not valid: input should be less than 1"
    )
    assert "server.port = '70000' is not valid" in refusal(*MODEL, "--server.port", "70000", cls=InferenceConfig)


def test_a_choice_that_is_none_of_the_choices(refusal) -> None:
    assert refusal(*MODEL, "--scheduler.type", "linea", cls=TrainerConfig) == (
        "scheduler.type = 'linea' is not valid; did you mean 'linear'? (one of: constant, linear, cosine)"
    )
    assert refusal(*MODEL, "--log-level", "zzz", cls=TrainerConfig) == (
        "log_level = 'zzz' is not valid; one of: debug, info, warning, error"
    )


def test_a_required_value_that_is_missing(refusal) -> None:
    assert refusal("--model.dtype", "bfloat16", cls=TrainerConfig) == (
        "model.name is required and was not given; set it in the file or with --model.name"
    )


def test_a_required_table_that_is_missing(refusal) -> None:
    message = refusal("--max-steps", "3", cls=TrainerConfig)
    assert message.startswith("model is required and was not given")


def test_a_flag_without_its_value(refusal, rl_toml) -> None:
    assert refusal("@", rl_toml, "--max-steps") == "--max-steps requires a value"


def test_a_stray_argument(refusal, rl_toml) -> None:
    message = refusal("@", rl_toml, "stray")
    assert message == "'stray' is not an option; give files as @ FILE, options as --name VALUE"


def test_json_that_is_none(refusal, rl_toml) -> None:
    message = refusal("@", rl_toml, "--orchestrator.env.args", "{size: 3}")
    assert message.startswith("--orchestrator.env.args '{size: 3}' is not valid JSON: ")


def test_a_table_where_a_list_of_tables_belongs(refusal, rl_toml, tmp_path) -> None:
    more = tmp_path / "more.toml"
    more.write_text('[orchestrator.env.rewards]\ntype = "exact_match"\n')
    message = refusal("@", rl_toml, "@", str(more))
    assert message.startswith("orchestrator.env.rewards: it is a list of tables, not one; write [[…rewards]]")


def test_a_group_of_one(refusal, rl_toml) -> None:
    message = refusal("@", rl_toml, "--orchestrator.group-size", "1")
    assert "group_size = 1 with advantage.type = 'grpo'" in message
    assert message.endswith("set group_size to 2 or more")


def test_deterministic_with_staleness(refusal, rl_toml) -> None:
    message = refusal("@", rl_toml, "--deterministic", "--orchestrator.max-staleness", "2")
    assert "deterministic = true needs max_staleness = 0, not 2" in message


def test_a_wait_for_the_server_that_another_wait_would_cut_short(refusal, rl_toml) -> None:
    """The default is no such wish: it gives way."""
    message = refusal("@", rl_toml, "--orchestrator.client.outage-timeout-s", "3600")
    assert "client.outage_timeout_s = 3600 is longer than weights_timeout_s = 1800" in message
    assert message.endswith("give weights_timeout_s at least 3600")
    enough = ("--orchestrator.client.outage-timeout-s", "3600", "--orchestrator.weights-timeout-s", "3600")
    for options in (enough, ("--orchestrator.weights-timeout-s", "60")):
        load_config(RLConfig, ["@", rl_toml, *options])


def test_max_tokens_that_leave_no_room_for_a_prompt(refusal, rl_toml) -> None:
    message = refusal("@", rl_toml, "--orchestrator.sampling.max-tokens", "64")
    assert "sampling.max_tokens = 64 leaves no room for a prompt in seq_len = 64" in message
    assert message.endswith("the largest valid value is 63")


@pytest.mark.parametrize("cls", [TrainerConfig, SFTConfig])
def test_a_microbatch_shorter_than_a_sequence(refusal, cls) -> None:
    data = ("--data.path", "d.jsonl") if cls is SFTConfig else ()
    message = refusal(*MODEL, *data, "--seq-len", "256", "--tokens-per-microbatch", "255", cls=cls)
    assert "tokens_per_microbatch = 255 cannot hold one sequence of seq_len = 256" in message
    assert message.endswith("the smallest valid value is 256")


@pytest.mark.parametrize("cls", [TrainerConfig, SFTConfig])
def test_a_way_to_save_memory_that_the_model_does_not_have(refusal, cls) -> None:
    data = ("--data.path", "d.jsonl") if cls is SFTConfig else ()
    ways = ("--parallel.gradient-checkpointing", "elementwise", "--model.impl", "hf")
    message = refusal(*MODEL, *data, *ways, cls=cls)
    assert 'parallel.gradient_checkpointing = "elementwise" is for our own decoder' in message
    assert 'model.impl = "hf" is not; give "mlp" or a whole number' in message


def test_a_cache_shorter_than_a_sequence(refusal) -> None:
    message = refusal(*MODEL, "--seq-len", "64", "--kv-cache-tokens", "79", cls=InferenceConfig)
    assert "kv_cache_tokens = 79 cannot hold one sequence of seq_len = 64; give at least 80" in message


def test_a_client_that_misses_the_server(refusal, rl_toml) -> None:
    message = refusal("@", rl_toml, "--orchestrator.client.base-url", "http://127.0.0.1:9000")
    assert "orchestrator.client.base_url = 'http://127.0.0.1:9000' does not lead to the server" in message
    assert "inference.server.port = 8000" in message


def test_a_reachable_host_without_a_key(refusal, rl_toml) -> None:
    message = refusal("@", rl_toml, "--inference.server.host", "0.0.0.0")
    assert "inference.server: host = '0.0.0.0' is reachable from other machines and no API key is set" in message
    assert "api_key_var" in message and "allow_unauthenticated" in message


@pytest.mark.parametrize("host", ["10.0.0.7", "::", "gpu-3", "192.168.1.5"])
def test_every_address_but_loopback_is_reachable(host: str) -> None:
    with pytest.raises(ValueError, match="is reachable from other machines and no API key is set"):
        ServerConfig(host=host)


def test_a_reachable_host_is_fine_with_a_key_or_on_request() -> None:
    assert ServerConfig(host="0.0.0.0", api_key="k").url == "http://127.0.0.1:8000"
    assert ServerConfig(host="10.0.0.7", port=9, api_key_var="K").url == "http://10.0.0.7:9"
    assert ServerConfig(host="0.0.0.0", allow_unauthenticated=True).api_key is None


def test_a_key_given_twice(refusal, rl_toml) -> None:
    for section in ("inference.server", "orchestrator.client"):
        message = refusal("@", rl_toml, f"--{section}.api-key", "k", f"--{section}.api-key-var", "K")
        assert f"{section}: api_key and api_key_var are both given; give one of them" in message


def test_keys_that_contradict_each_other(refusal, rl_toml) -> None:
    message = refusal("@", rl_toml, "--inference.server.api-key", "one", "--orchestrator.client.api-key", "two")
    assert "inference.server.api_key" in message and "orchestrator.client.api_key" in message
    assert "one" not in message.replace("one of", "") and "two" not in message


@pytest.mark.parametrize(
    ("config", "option"), [(ServerConfig, "server"), (ClientConfig, "client"), (SGLangConfig, "sglang")]
)
def test_an_api_key_variable_that_is_not_set(monkeypatch, config, option) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(UserError, match=rf"{option}\.api_key_var = 'NO_SUCH_KEY' names an environment variable"):
        config(api_key_var="NO_SUCH_KEY").resolve_api_key()
    monkeypatch.setenv("NO_SUCH_KEY", "secret")
    assert config(api_key_var="NO_SUCH_KEY").resolve_api_key() == "secret"
    assert config(api_key="plain").resolve_api_key() == "plain"
    assert config().resolve_api_key() is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("q_prj", "lora.targets = 'q_prj' is not valid: input should be a valid list, or 'all-linear'"),
        ('{"a": 1}', "lora.targets = {'a': 1} is not valid: input should be a valid list, or 'all-linear'"),
        ('["q_proj", 7]', "lora.targets.1 = 7 is not valid: input should be a valid string"),
    ],
)
def test_a_value_of_several_kinds_has_one_error_with_its_own_key(refusal, value: str, expected: str) -> None:
    assert refusal(*MODEL, "--lora.targets", value, cls=TrainerConfig) == expected


def test_every_kind_that_a_value_could_be_is_told(refusal, rl_toml) -> None:
    assert refusal("@", rl_toml, "--orchestrator.client.concurrency", "0") == (
        "orchestrator.client.concurrency = '0' is not valid: input should be greater than or equal to 1, or 'auto'"
    )
    assert refusal("@", rl_toml, "--orchestrator.client.concurrency", "0", "--max-steps", "x").splitlines()[0] == (
        "2 problems in the configuration:"
    )


def test_a_kind_inside_a_table_is_no_key() -> None:
    with pytest.raises(ValidationError) as refused:
        SteeringConfig.model_validate(
            {"type": "steering", "base_url": "http://a:1", "goals": ["joy"], "targets": {"joy": "much"}}
        )
    message = explain_validation_error(SteeringConfig, refused.value)
    assert message.startswith("targets.joy = 'much' is not valid: input should be a valid number")


def test_a_table_of_several_kinds_is_explained_by_its_type(tmp_path: Path) -> None:
    def refusal(table: str) -> str:
        file = tmp_path / "rewards.toml"
        file.write_text(f"[[env.rewards]]\n{table}\n")
        with pytest.raises(UserError) as refused:
            load_config(OrchestratorConfig, ["@", str(file), "--model.name", "m"])
        return str(refused.value)

    assert refusal('type = "numric"').startswith("env.rewards.0.type = 'numric' is not valid; did you mean 'numeric'?")
    assert "(value 1); did you mean 'tolerance'?" in refusal('type = "numeric"\ntolerence = 1')
    assert "env.rewards.0.pattern is required" in refusal('type = "regex"')
    own = refusal('type = "./mine.py:brief"\nweigth = 1')
    assert own == "unknown key 'env.rewards.0.weigth' (value 1); did you mean 'weight'?"
    no_address = refusal('type = "judge"\nmodel = "m"\nbase_url = ["http://a:1", "127.0.0.1:1"]')
    assert no_address.startswith("env.rewards.0.base_url: '127.0.0.1:1' is not the address of a server; give one")
    assert "'(' is not a regular expression" in refusal('type = "regex"\npattern = "("')
    # A type that is the name of an option, too.
    schema = refusal('type = "json_schema"\njson_schema = 5')
    assert schema.startswith("env.rewards.0.json_schema = 5 is not valid: input should be a valid dictionary, or ")
    assert refusal('type = "goal"\ngoal = "joy"') == (
        "env.rewards.0.base_url is required and was not given; set it in its table"
    )
    # An option of another type is none of this one.
    assert refusal('type = "length"\ntarget = 5').startswith(
        "unknown key 'env.rewards.0.target' (value 5); known here: least, most,"
    )
    elsewhere = refusal('type = "exact_match"\njson_schema = 5')
    assert elsewhere.startswith("unknown key 'env.rewards.0.json_schema' (value 5); known here: extract,")
    assert refusal("weight = 1").startswith("env.rewards.0.type is required and was not given; one of: exact_match,")
    assert refusal('type = "your own"').endswith("steering, ./file.py:name")


def test_a_text_where_a_table_of_several_kinds_belongs(refusal, rl_toml) -> None:
    assert refusal("@", rl_toml, "--orchestrator.env.rewards", "exact_match") == (
        "orchestrator.env.rewards.0 = 'exact_match' is not valid: it is a section; give orchestrator.env.rewards.0.type"
    )


def test_two_numbers_by_a_flag(refusal) -> None:
    for flags in (["--optimizer.betas", "[0.9, 0.95]"], ["--optimizer.betas", "0.9", "0.95"]):
        assert load_config(TrainerConfig, [*MODEL, *flags]).optimizer.betas == [0.9, 0.95]
    one = refusal(*MODEL, "--optimizer.betas", "[0.9]", cls=TrainerConfig)
    assert one.startswith("optimizer.betas = [0.9] is not valid: list should have at least 2 items")
    large = refusal(*MODEL, "--optimizer.betas", "[0.9, 1.5]", cls=TrainerConfig)
    assert large == "optimizer.betas.1 = 1.5 is not valid: input should be less than 1"

"""vLLM's flags on our command line and in our files."""

import pytest

from tandem.config.base import load_config
from tandem.config.inference import InferenceConfig
from tandem.config.vllm import VllmConfig, own_flags, split_arguments, take_vllm_flags
from tandem.utils.errors import UserError

OURS = own_flags(InferenceConfig)
BASE = ["--model.name", "m", "--engine", "vllm"]


def test_flags_that_are_not_ours_are_vllms() -> None:
    arguments = [
        *BASE,
        *("--tensor-parallel-size", "2", "--headless", "--data_parallel_rpc_port=1234", "--seq-len", "64"),
        *("-tp", "2", "--lora-modules", "a=b", "c=d", "--compilation-config.mode", "3", "--a-number", "-1"),
        *("--no-enable-chunked-prefill", "--limit", '{"image": 1}'),
    ]
    ours, theirs = split_arguments(arguments, OURS)
    assert ours == [*BASE, "--seq-len", "64"]
    assert theirs == {
        "tensor-parallel-size": "2",
        "headless": True,
        "data-parallel-rpc-port": "1234",
        "-tp": "2",
        "lora-modules": ["a=b", "c=d"],
        "compilation-config.mode": "3",
        "a-number": "-1",
        "no-enable-chunked-prefill": True,
        "limit": '{"image": 1}',
    }


def test_vllms_name_of_our_option_is_understood() -> None:
    arguments = ["--engine", "vllm", "--model.name", "m", "--max-model-len", "64", "--port=81", "--dtype", "bfloat16"]
    arguments += ["--no-enable-prefix-caching"]
    taken, hint = take_vllm_flags(InferenceConfig, arguments)
    config = load_config(InferenceConfig, taken)
    assert (config.seq_len, config.server.port, config.model.dtype) == (64, 81, "bfloat16")
    assert config.prefix_caching is False
    assert config.vllm.flags == {} and hint == ""


@pytest.mark.parametrize(
    "arguments", [["--seq-len", "5", "--max-model-len", "5"], ["--port", "1", "--server.port", "1"]]
)
def test_the_same_thing_said_twice_is_refused(arguments: list[str]) -> None:
    with pytest.raises(UserError, match=f"{arguments[0]} and {arguments[2]} say the same thing"):
        take_vllm_flags(InferenceConfig, [*BASE, *arguments])


def test_flags_reach_the_configuration(tmp_path) -> None:
    file = tmp_path / "i.toml"
    file.write_text('engine = "vllm"\n[vllm.flags]\ntensor-parallel-size = 2\nenforce_eager = true\n')
    taken, _ = take_vllm_flags(InferenceConfig, ["@", str(file), "--model.name", "m", "--tensor-parallel-size", "4"])
    config = load_config(InferenceConfig, taken)
    assert config.vllm.flags == {"tensor-parallel-size": "4", "enforce-eager": True}


def test_the_native_engine_refuses_them_with_a_hint() -> None:
    arguments = ["--model.name", "m", "--tensor-parallel-size", "2"]
    taken, hint = take_vllm_flags(InferenceConfig, arguments)
    assert taken == arguments and "--engine vllm" in hint
    with pytest.raises(UserError, match="tensor_parallel_size"):
        load_config(InferenceConfig, taken)
    with pytest.raises(UserError, match="set engine = 'vllm'"):
        load_config(InferenceConfig, ["--model.name", "m", "--vllm.flags.tensor-parallel-size", "2"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_model_len", "is our option seq_len"),
        ("trust-remote-code", "is our option model.trust_remote_code"),
        ("no-enable-prefix-caching", "is our option prefix_caching"),
        ("api-server-count", "is fixed: one process must see every token"),
        ("worker-extension-cls", "is fixed"),
    ],
)
def test_flags_that_are_taken_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VllmConfig(flags={name: 1})

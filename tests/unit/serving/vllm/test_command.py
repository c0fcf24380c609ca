"""From configuration to vLLM's command line and environment."""

from pathlib import Path
from typing import Any

import pytest

from tandem.config.inference import InferenceConfig
from tandem.serving.vllm.command import (
    build_command,
    build_environment,
    bytes_per_token,
    make_settings,
    render_flags,
)
from tandem.serving.vllm.installation import Installation
from tandem.serving.vllm.settings import Settings

GPU = Installation(Path("/venv/bin/python"), "0.24.0", is_cpu=False)
CPU = Installation(Path("/venv/bin/python"), "0.32.0", is_cpu=True)
SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
FREE = 2**40


def make_config(**options: Any) -> InferenceConfig:
    return InferenceConfig.model_validate({"model": {"name": "/models/tiny"}, "engine": "vllm", **options})


def flags_of(command: list[str]) -> dict[str, Any]:
    """Every flag with its values, and the model under ''."""
    found: dict[str, Any] = {"": command[4]}
    name = ""
    for argument in command[5:]:
        if argument.startswith("--"):
            name = argument.removeprefix("--")
            found[name] = found.get(name, [])
        else:
            found[name].append(argument)
    return found


def test_our_options_become_vllms_flags() -> None:
    config = make_config(
        model={"name": "/models/tiny", "dtype": "bfloat16"},
        seq_len=128,
        max_sequences=16,
        tokens_per_step=512,
        block_size=32,
        prefix_caching=False,
        seed=7,
        drain_timeout_s=2.5,
        server={"port": 8123},
        vllm={"flags": {"tensor_parallel_size": 2, "gpu-memory-utilization": 0.8}},
    )
    command = build_command(config, GPU, SHAPE, FREE)
    assert command[:4] == ["/venv/bin/python", "-m", "tandem.serving.vllm.launcher", "serve"]
    flags = flags_of(command)
    expected = {
        "": "/models/tiny",
        "served-model-name": ["/models/tiny", "tiny"],
        "dtype": ["bfloat16"],
        "max-model-len": ["128"],
        "max-num-seqs": ["16"],
        "max-num-batched-tokens": ["512"],
        "block-size": ["32"],
        "no-enable-prefix-caching": [],
        "seed": ["7"],
        "shutdown-timeout": ["3"],
        "host": ["127.0.0.1"],
        "port": ["8123"],
        "tensor-parallel-size": ["2"],
        "gpu-memory-utilization": ["0.8"],
        "logprobs-mode": ["processed_logprobs"],
        "generation-config": ["auto"],
        "api-server-count": ["1"],
        "exclude-tools-when-tool-choice-none": [],
    }
    assert {name: flags[name] for name in expected} == expected
    assert "kv-cache-memory-bytes" not in flags


def test_vllm_renders_with_the_chat_template_of_the_run() -> None:
    model = {"name": "/models/tiny", "chat_template": "/templates/own.jinja"}
    assert flags_of(build_command(make_config(model=model), GPU, SHAPE, FREE))["chat-template"] == [
        "/templates/own.jinja"
    ]
    assert "chat-template" not in flags_of(build_command(make_config(), GPU, SHAPE, FREE))


def test_a_headless_node_has_no_address() -> None:
    flags = flags_of(build_command(make_config(vllm={"flags": {"headless": True}}), GPU, SHAPE, FREE))
    assert not {"host", "port", "api-server-count"} & set(flags) and flags["headless"] == []
    assert "worker-extension-cls" in flags


def test_the_kv_cache_is_bounded_on_a_cpu_and_vllms_own_on_a_gpu() -> None:
    per_token = 2 * 4 * 2 * 32 * 4
    assert bytes_per_token(SHAPE, make_config()) == per_token
    assert bytes_per_token(SHAPE, make_config(vllm={"flags": {"tensor-parallel-size": 4}})) == per_token // 2
    assert "kv-cache-memory-bytes" not in flags_of(build_command(make_config(), GPU, SHAPE, FREE))

    def size(free_bytes: int, **options: Any) -> int:
        command = build_command(make_config(seq_len=100, max_sequences=4, **options), CPU, SHAPE, free_bytes)
        return int(flags_of(command)["kv-cache-memory-bytes"][0])

    assert size(FREE) == (4 * 128 + 128) * per_token  # sequences are rounded up to blocks of 128
    assert size(4 * 400 * per_token) == 400 * per_token  # a quarter of what is free
    assert size(0) == (128 + 128) * per_token  # but one sequence has to fit
    assert size(0, kv_cache_tokens=1000) == (1000 + 128) * per_token


def test_the_share_of_a_gpu_is_vllms_own_flag() -> None:
    config = make_config(gpu_memory_utilization=0.4)
    assert flags_of(build_command(config, GPU, SHAPE, FREE))["gpu-memory-utilization"] == ["0.4"]
    on_cpu = flags_of(build_command(config, CPU, SHAPE, FREE))
    assert "kv-cache-memory-bytes" not in on_cpu, "both say how large the cache is"


def test_code_of_a_model_is_run_where_our_option_says_so() -> None:
    for trusted in (True, False):
        config = make_config(model={"name": "/models/tiny", "trust_remote_code": trusted})
        assert ("trust-remote-code" in flags_of(build_command(config, GPU, SHAPE, FREE))) == trusted


def test_middleware_of_others_comes_before_ours() -> None:
    command = build_command(make_config(vllm={"flags": {"middleware": ["a.A", "b.B"]}}), GPU, SHAPE, FREE)
    at = [command[i + 1] for i, argument in enumerate(command) if argument == "--middleware"]
    assert at == ["a.A", "b.B", "tandem.serving.vllm.middleware.TandemMiddleware"]


def test_values_of_flags() -> None:
    flags = {"a": True, "b": False, "c": 3, "d": ["x", "y"], "e": {"k": 1}, "f": None, "-tp": 2, "-O3": True}
    assert render_flags(flags) == [
        *("--a", "--no-b", "--c", "3", "--d", "x", "y", "--e", '{"k": 1}'),
        *("-tp", "2", "-O3"),
    ]


def test_the_environment() -> None:
    base = {"PATH": "/bin", "VLLM_API_KEY": "other", "PYTHONPATH": "/mine", "HF_HUB_OFFLINE": "0"}
    environment = build_environment(make_config(threads=3), "secret", Path("/src"), base)
    assert environment["PYTHONPATH"] == "/src:/mine"
    assert "VLLM_API_KEY" not in environment, "it would guard some routes with another key"
    assert environment["OMP_NUM_THREADS"] == "3" and environment["HF_HUB_OFFLINE"] == "0"
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"
    settings = Settings.from_environment(environment)
    assert settings == make_settings(make_config(), "secret")
    assert (settings.model_dir, settings.api_key) == (Path("/models/tiny"), "secret")
    assert settings.max_body_bytes == 64 << 20 and settings.receive_timeout_s == 60
    assert settings.weight_roots == (Path("/models/tiny"), Path("/models"), Path("outputs").resolve())
    many = make_config(vllm={"flags": {"data-parallel-address": "10.0.0.1"}})
    assert "VLLM_HOST_IP" not in build_environment(many, None, Path("/src"), {})
    assert Settings.from_environment(build_environment(many, None, Path("/src"), {})).api_key is None


@pytest.mark.parametrize("option", ["deterministic", "check_invariants"])
def test_what_vllm_cannot_promise_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} = true does not work with engine = 'vllm'"):
        make_config(**{option: True})


def test_adapters_on_a_cpu_leave_a_slot_empty() -> None:
    adapters = make_config(vllm={"flags": {"enable-lora": True}})
    assert flags_of(build_command(adapters, CPU, SHAPE, FREE))["max-loras"] == ["2"]
    assert "max-loras" not in flags_of(build_command(adapters, GPU, SHAPE, FREE))
    assert "max-loras" not in flags_of(build_command(make_config(), CPU, SHAPE, FREE))
    chosen = make_config(vllm={"flags": {"enable-lora": True, "max-loras": 5}})
    assert flags_of(build_command(chosen, CPU, SHAPE, FREE))["max-loras"] == ["5"]

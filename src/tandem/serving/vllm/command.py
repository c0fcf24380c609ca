"""From our configuration to the command line and the environment of vLLM's server. Pure, and without torch."""

import json
import math
from pathlib import Path
from typing import Any

from tandem.config.inference import InferenceConfig
from tandem.serving.roots import weight_roots
from tandem.serving.vllm.installation import Installation
from tandem.serving.vllm.settings import API_KEY, Settings
from tandem.utils.hub import served_names
from tandem.utils.serving.browsers import names_of

LAUNCHER = "tandem.serving.vllm.launcher"
MIDDLEWARE = "tandem.serving.vllm.middleware.TandemMiddleware"
WORKER_EXTENSION = "tandem.serving.vllm.worker.WeightReloader"

# Flags whose values are given by repeating the flag.
REPEATED = ("middleware",)
# Flags that already say how large the KV cache is.
CACHE_FLAGS = ("kv-cache-memory-bytes", "gpu-memory-utilization", "num-gpu-blocks-override")
# Flags of servers whose parts lie on several machines; the others need not be reachable from outside.
MULTI_NODE_FLAGS = ("headless", "data-parallel-address", "nnodes", "node-rank", "master-addr", "data-parallel-backend")
DEFAULT_BLOCK_SIZE = InferenceConfig.model_fields["block_size"].default
CPU_BLOCK_SIZE = 128
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
UNKNOWN_CACHE_BYTES = 2**30


def is_headless(config: InferenceConfig) -> bool:
    """Whether this is another node's part of a server: engines without an API."""
    return bool(config.vllm.flags.get("headless"))


def build_command(
    config: InferenceConfig, vllm: Installation, model_config: dict[str, Any], free_bytes: int
) -> list[str]:
    """`model_config` is the model's config.json; `free_bytes` bounds the KV cache on a CPU."""
    flags = dict(config.vllm.flags)
    middleware = flags.pop("middleware", [])
    model_dir = config.model.name.resolve()
    own: dict[str, Any] = {
        "served-model-name": served_names(config.model.name),
        "dtype": config.model.dtype,
        "max-model-len": config.seq_len,
        "max-num-seqs": config.max_sequences,
        "max-num-batched-tokens": max(config.tokens_per_step, config.max_sequences),
        "seed": config.seed,
        "logprobs-mode": "processed_logprobs",
        "generation-config": config.generation_config,
        "shutdown-timeout": math.ceil(config.drain_timeout_s),
        "worker-extension-cls": WORKER_EXTENSION,
        # Ours is the last, which is the outermost: nothing is reached without the key.
        "middleware": [*(middleware if isinstance(middleware, list) else [middleware]), MIDDLEWARE],
    }
    if config.model.chat_template is not None:
        own["chat-template"] = str(config.model.chat_template.resolve())
    if not config.cuda_graphs:
        own["enforce-eager"] = True
    if not config.prefix_caching:
        own["enable-prefix-caching"] = False
    if config.block_size != DEFAULT_BLOCK_SIZE:
        own["block-size"] = config.block_size
    if vllm.is_cpu and flags.get("enable-lora"):
        # On a CPU, requests without an adapter meet what lies in the last slot: it has to stay empty.
        own["max-loras"] = 2
    if not is_headless(config):
        own |= {"host": config.server.host, "port": config.server.port, "api-server-count": 1}
        own |= {"uvicorn-log-level": "warning", "disable-uvicorn-access-log": True}
        # A client that wants no call gets words: the template must not tell the model of the tools either.
        own["exclude-tools-when-tool-choice-none"] = True
    if config.model.trust_remote_code:
        own["trust-remote-code"] = True
    if config.gpu_memory_utilization is not None:
        own["gpu-memory-utilization"] = config.gpu_memory_utilization
    if not any(name in own | flags for name in CACHE_FLAGS) and (config.kv_cache_tokens is not None or vllm.is_cpu):
        own["kv-cache-memory-bytes"] = cache_bytes(config, model_config, free_bytes)
    arguments = [str(model_dir), *render_flags(own | flags)]
    return [str(vllm.python), "-m", LAUNCHER, "serve", *arguments]


def build_environment(
    config: InferenceConfig, api_key: str | None, import_path: Path, base: dict[str, str]
) -> dict[str, str]:
    """The environment of vLLM's processes: `base` with what they need to find us and to stay quiet."""
    environment = dict(base)
    # Its own idea of a key guards only some of the routes, and would ask for a second one.
    # And tokens are counted by the request ids that vLLM makes by default.
    for name in ("VLLM_API_KEY", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", API_KEY):
        environment.pop(name, None)
    environment |= make_settings(config, api_key).to_environment()
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{import_path}:{inherited}" if inherited else str(import_path)
    environment["VLLM_LOGGING_LEVEL"] = config.log_level.upper()
    environment["VLLM_USE_RUST_FRONTEND"] = "0"
    defaults = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if not any(name in config.vllm.flags for name in MULTI_NODE_FLAGS):
        defaults["VLLM_HOST_IP"] = "127.0.0.1"
    if config.threads is not None:
        environment["OMP_NUM_THREADS"] = str(config.threads)
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return defaults | environment


def make_settings(config: InferenceConfig, api_key: str | None) -> Settings:
    server = config.server
    return Settings(
        model_dir=config.model.name.resolve(),
        model_name=str(config.model.name),
        api_key=api_key,
        max_body_bytes=server.max_body_mb << 20,
        receive_timeout_s=server.receive_timeout_s,
        weight_roots=tuple(weight_roots(config.model.name, server.weight_roots)),
        host_names=names_of(server.host, server.allowed_hosts),
    )


def render_flags(flags: dict[str, Any]) -> list[str]:
    """True: the bare flag. False: its --no- form. A list: several values. A table: JSON. None: left out."""
    arguments: list[str] = []
    for name, value in flags.items():
        flag = name if name.startswith("-") else f"--{name}"
        if value is None:
            continue
        if value is False:
            arguments.append(f"--no-{name}")
        elif value is True:
            arguments.append(flag)
        elif isinstance(value, list) and name in REPEATED:
            arguments += [part for item in value for part in (flag, str(item))]
        elif isinstance(value, list):
            arguments += [flag, *(str(item) for item in value)]
        elif isinstance(value, dict):
            arguments += [flag, json.dumps(value)]
        else:
            arguments += [flag, str(value)]
    return arguments


def cache_bytes(config: InferenceConfig, model_config: dict[str, Any], free_bytes: int) -> int:
    """Room for kv_cache_tokens; left out, for max_sequences of seq_len, within a quarter of what is free."""
    per_token = bytes_per_token(model_config, config)
    if per_token is None:
        return UNKNOWN_CACHE_BYTES
    # vLLM rounds a sequence up to whole blocks and keeps one block for itself.
    padded_len = math.ceil(config.seq_len / CPU_BLOCK_SIZE) * CPU_BLOCK_SIZE
    if config.kv_cache_tokens is not None:
        return (max(config.kv_cache_tokens, padded_len) + CPU_BLOCK_SIZE) * per_token
    wanted = (config.max_sequences * padded_len + CPU_BLOCK_SIZE) * per_token
    least = (padded_len + CPU_BLOCK_SIZE) * per_token
    return max(least, min(wanted, free_bytes // 4))


def bytes_per_token(model_config: dict[str, Any], config: InferenceConfig) -> int | None:
    """Keys and values of one token on one rank; None where config.json does not tell."""
    try:
        layers, heads = model_config["num_hidden_layers"], model_config["num_attention_heads"]
        kv_heads = model_config.get("num_key_value_heads") or heads
        head_dim = model_config.get("head_dim") or model_config["hidden_size"] // heads
    except KeyError:
        return None
    ranks = int(config.vllm.flags.get("tensor-parallel-size", config.vllm.flags.get("-tp", 1)))
    return 2 * layers * max(1, kv_heads // ranks) * head_dim * DTYPE_BYTES[config.model.dtype]

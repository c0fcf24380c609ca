"""The shape of a model, read from a Hugging Face config.json. No torch.

One spec covers the Llama, Qwen2, Qwen3 and Mistral families: they differ in biases, in query/key
norms, in rotary scaling and in sliding windows, and in nothing else.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.utils.errors import UserError
from tandem.utils.files import read_table

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What transformers assumes where a config.json is silent.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "qwen2": {
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "max_position_embeddings": 32768,
    },
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "max_position_embeddings": 32768,
    },
}
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# The largest values believed: beyond them a file is damaged, and a model of its shape could not even be described.
LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 16,
    "max_position_embeddings": 1 << 40,
    "sliding_window": 1 << 40,
    "max_window_layers": 1 << 40,
}
# What those can do whose model our decoder does not compute.
ELSEWHERE = "Train others with model.impl = 'hf' and serve them with engine = 'vllm'"
SERVED_ELSEWHERE = "model.impl is for training; serve it with inference.engine = 'vllm'"
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelSpec:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # one entry a layer

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def load(cls, model_dir: Path) -> "ModelSpec":
        path = model_dir / "config.json"
        if not path.exists():
            raise UserError(f"model.name = {str(model_dir)!r} holds no model: there is no config.json in it")
        config = read_table(path)
        try:
            return cls.from_config(config)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ModelSpec":
        architecture = architecture_of(config)
        if architecture not in FAMILIES:
            raise UserError(
                f"model architecture {architecture!r} is not supported; supported: {', '.join(sorted(FAMILIES))}. "
                f"{ELSEWHERE}"
            )
        family = FAMILIES[architecture]
        missing = [key for key in REQUIRED if config.get(key) is None]
        if missing:
            raise UserError(f"the model config lacks {', '.join(missing)}")
        # A sliding window of null is none; elsewhere null is as good as leaving a key out.
        given = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
        config = DEFAULTS[family] | given
        _check_values(config)
        if config.get("hidden_act", "silu") not in ("silu", "swish"):  # two names of one function
            raise UserError(f"hidden_act = {config['hidden_act']!r} is not supported; supported: silu. {ELSEWHERE}")
        num_heads = config["num_attention_heads"]
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise UserError(
                f"num_key_value_heads must divide num_attention_heads: {num_kv_heads} does not divide {num_heads}"
            )
        # The other families have no such option; transformers ignores it there.
        attention_bias = family in ("llama", "qwen3") and config.get("attention_bias", False)
        rope_theta, rope_scaling = _rope(config)
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        if head_dim < 1 or head_dim % 2:
            raise UserError(f"head_dim = {head_dim} (hidden_size / num_attention_heads) must be even")
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            norm_eps=_positive(config, "rms_norm_eps", 1e-6),
            tied_embeddings=config.get("tie_word_embeddings", False),
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias,
            mlp_bias=family == "llama" and config.get("mlp_bias", False),
            qk_norm=family == "qwen3",
            sliding_windows=_sliding_windows(config, family),
        )


def architecture_of(config: dict[str, Any]) -> str:
    """The first of `architectures`; "?" where there is none."""
    names = config.get("architectures") or ["?"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise UserError(f"architectures = {names!r} must be a list of names")
    return names[0]


def _check_values(config: dict[str, Any]) -> None:
    """Sizes are whole numbers within reason, switches true or false."""
    for key, largest in LARGEST.items():
        value, least = config.get(key), 0 if key == "max_window_layers" else 1
        if value is not None and (type(value) is not int or not least <= value <= largest):
            raise UserError(f"{key} = {value!r} must be a whole number from {least} to {largest}")
    for key in FLAGS:
        if config.get(key) not in (None, False, True):
            raise UserError(f"{key} = {config[key]!r} must be true or false")


def _positive(table: dict[str, Any], key: str, default: float | None = None) -> float:
    """A number above zero; `default` where there is none."""
    value = table.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UserError(f"{key} = {value!r} must be a number above 0")
    return value


def _rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling; newer config files keep both in `rope_parameters`."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = config.get(key) or {}
    if not isinstance(parameters, dict):
        raise UserError(f"{key} = {parameters!r} must be a table")
    theta = float(_positive(parameters if parameters.get("rope_theta") else config, "rope_theta", 10000.0))
    partial = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UserError(f"partial_rotary_factor = {partial} is not supported; supported: 1.0. {ELSEWHERE}")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"rope_type = {kind!r} is not supported; supported: default, llama3. {ELSEWHERE}")
    return theta, RopeScaling(
        factor=_positive(parameters, "factor"),
        low_freq_factor=_positive(parameters, "low_freq_factor"),
        high_freq_factor=_positive(parameters, "high_freq_factor"),
        original_max_positions=int(
            _positive(parameters, "original_max_position_embeddings", config["max_position_embeddings"])
        ),
    )


def _sliding_windows(config: dict[str, Any], family: str) -> tuple[int | None, ...]:
    num_layers = config["num_hidden_layers"]
    window = config.get("sliding_window")
    # Llama has none, whatever its config.json says, and Mistral has no switch.
    has_windows = family == "mistral" or (family != "llama" and config.get("use_sliding_window"))
    if not has_windows or window is None:
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != num_layers):
        raise UserError(f"layer_types = {kinds!r} must be a list with an entry for each of {num_layers} layers")
    if kinds is None:
        full = 0 if family == "mistral" else config["max_window_layers"]
        return tuple(window if layer >= full else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)

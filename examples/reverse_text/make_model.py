"""Make the tiny model of this example: Qwen3 architecture, character tokenizer, random weights.

python examples/reverse_text/make_model.py models/reverse_text
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tandem.models.hf import named_tensors, new_decoder
from tandem.models.spec import ModelSpec
from tandem.utils.files import write_json
from tandem.weights.files import write_model

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
ROLES = ["system", "user", "assistant"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_tokenizer(words: Sequence[str] = ROLES) -> Tokenizer:
    """Characters, and `words` that are single tokens, which keeps prompts short."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *words, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(word, special=False) for word in words])
    return tokenizer


def make_config(tokenizer: Tokenizer) -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|pad|>"),
        "dtype": "float32",
    }


def write_files(target: Path, tokenizer: Tokenizer, chat_template: str) -> None:
    config = make_config(tokenizer)
    decoder = new_decoder(ModelSpec.from_config(config), seed=0)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"))
    write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "model_max_length": 512,
            "clean_up_tokenization_spaces": False,
        },
    )
    (target / "chat_template.jinja").write_text(chat_template)
    write_model(target, named_tensors(decoder), config)
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    print(f"{target}: {parameters / 1e6:.2f}M parameters, {config['vocab_size']} tokens")


def main(target: Path) -> None:
    write_files(target, make_tokenizer(), CHAT_TEMPLATE)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))

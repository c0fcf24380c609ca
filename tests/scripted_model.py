"""A model whose every next token follows from the last one alone: it says what a test wants it to say.

Token i is the i-th unit vector all the way through (attention and MLP add nothing), and the output matrix leads
from each token to its successor. The chat template chooses what is said by the token the prompt ends with.
"""

from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tandem.models.hf import named_tensors, new_decoder
from tandem.models.spec import ModelSpec
from tandem.utils.files import write_json
from tandem.weights.files import write_model

EOS = "<|im_end|>"
CALL = [
    "Let me look.\n",
    "<tool_call>",
    '\n{"name": "get_weather", ',
    '"arguments": {"city": "Łódź"}}',
    "\n</tool_call>",
]
ANSWER = ["It is sunny", " in Łódź."]
HELLO = ["Hello", " there", ", 世", "界", "!"]
# The last token of a prompt, and what is said after it.
SCRIPTS = {"<|calls|>": CALL, "<|answers|>": ANSWER, "<|greets|>": HELLO}
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "ń"]
HIDDEN_SIZE = 160
TEMPLATE = """\
{%- if tools %}Tools:
{%- for tool in tools %}{{ tool | tojson }}{% endfor %} Call them as <tool_call>{"name": …, "arguments": …}</tool_call>
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}
{%- if messages[-1].role == 'tool' %}<|answers|>{% elif tools %}<|calls|>{% else %}<|greets|>{% endif %}
{%- endif %}"""


def write_scripted_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    special = [EOS, *SCRIPTS]
    words = [word for script in SCRIPTS.values() for word in script]
    vocabulary = {token: index for index, token in enumerate([*special, *words, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": TEMPLATE}
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(vocabulary),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "eos_token_id": vocabulary[EOS],
        "dtype": "float32",
    }
    tensors = dict(named_tensors(new_decoder(ModelSpec.from_config(config), seed=0)))
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.embed_tokens.weight"] = torch.eye(len(vocabulary), HIDDEN_SIZE)
    tensors["lm_head.weight"] = successors(vocabulary)
    write_model(folder, tensors, config)
    return folder


def successors(vocabulary: dict[str, int]) -> torch.Tensor:
    matrix = torch.zeros(len(vocabulary), HIDDEN_SIZE)
    chains = [[begin, *script, EOS] for begin, script in SCRIPTS.items()]
    following = dict(pair for chain in chains for pair in pairwise(chain))
    for token, index in vocabulary.items():
        matrix[vocabulary[following.get(token, EOS)], index] = 4.0
    return matrix

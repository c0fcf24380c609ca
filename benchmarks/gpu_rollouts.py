"""Rollouts on one GPU, compared with vLLM: the `rollouts` section of `benchmarks/gpu.py`, which can also be run
by itself.

    python benchmarks/gpu_rollouts.py --output rollouts.json      # about 4 minutes on an H200 with vLLM installed
    python benchmarks/gpu_rollouts.py --sides tandem vllm --shapes Qwen3-4B

Shapes of known models with random weights in bfloat16, prompts of random token ids, temperature 1, no early end, the
log-prob of every token. Each side runs in a process of its own and is timed from the first request to the last answer,
prefill included, after as many requests with fewer new tokens: the median of three rounds. By default the peer and HTTP
are measured with the first shape only: vLLM takes over a minute to start. `--uneven` adds a workload where requests are
more than rows, and of very different lengths, so that prompts begin all along; it is not measured over HTTP.

    tandem   the native engine through its Python interface
    lora     the same through a LoRA adapter of rank 16 on all projections, as `rl` with `trainer.lora` asks it
    top-p    the same with top_p = 0.9 and top_k = 50, and the kept tokens reported, as `rl` asks with these
    http     the native engine behind its server, one request a prompt, token ids and log-probs in the answers
    vllm     vLLM through its Python interface, with its defaults

The floor is what a step must read from memory (the weights, keys and values; a prompt that samples share once) at
4.26 TB/s, what a large copy reaches on an H200. It knows nothing of prefill.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BYTES_PER_SECOND = 4.26e12
START_TIMEOUT_S = 240
WARM_UP_TOKENS = 64
ROUNDS = 3
MAX_SEQUENCES = 256
JSON = {"Content-Type": "application/json"}
KEPT_MODELS = "TANDEM_BENCHMARK_MODELS"  # a folder where models are kept that several scripts use
SIDES = ("tandem", "http", "vllm")  # by default
LORA_RANK = 16


@dataclass(frozen=True)
class Shape:
    """A model of the Qwen3 or the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3" if self.architecture.startswith("Qwen3") else "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": 2,
        }

    @property
    def step_bytes(self) -> float:
        """Of the weights that a step reads."""
        layer = self.hidden_size * (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer += 3 * self.hidden_size * self.intermediate_size
        return 2.0 * (self.num_layers * layer + self.vocab_size * self.hidden_size)

    @property
    def token_bytes(self) -> float:
        """Of one token's keys and values."""
        return 2.0 * 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Workload:
    shape: str
    prompts: int
    samples: int  # of each prompt
    prompt_tokens: int
    new_tokens: int  # of each sample; where they are uneven, at most
    is_uneven: bool = False

    @property
    def name(self) -> str:
        group = f"{self.prompts} × {self.samples}" if self.samples > 1 else f"{self.prompts}"
        new_tokens = f"{min(self.lengths)} – {max(self.lengths)}" if self.is_uneven else self.new_tokens
        return f"{self.shape}, {group} × ({self.prompt_tokens} + {new_tokens})"

    @property
    def lengths(self) -> list[int]:
        """New tokens of each prompt's samples. Uneven ones are distributed as answers of a policy often are: half of
        them within a ninth of what the longest may have, a few that go on and on."""
        if not self.is_uneven:
            return [self.new_tokens] * self.prompts
        rng = random.Random(0)
        drawn = (int(rng.lognormvariate(math.log(self.new_tokens / 9), 0.9)) for _ in range(self.prompts))
        return [min(max(length, 1), self.new_tokens) for length in drawn]

    @property
    def num_tokens(self) -> int:
        return self.samples * sum(self.lengths)

    @property
    def floor_s(self) -> float:
        shape, lengths = SHAPES[self.shape], self.lengths
        steps = max(max(lengths), self.num_tokens / MAX_SEQUENCES)
        read = sum(length * (self.prompt_tokens + self.samples * length / 2) for length in lengths)
        return (steps * shape.step_bytes + read * shape.token_bytes) / BYTES_PER_SECOND


SHAPES = {
    "Qwen3-0.6B": Shape("Qwen3ForCausalLM", 151936, 1024, 3072, 28, 16, 8, 128),
    "SmolLM2-135M": Shape("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64),
    "Qwen3-4B": Shape("Qwen3ForCausalLM", 151936, 2560, 9728, 36, 32, 8, 128),
    "Qwen3-8B": Shape("Qwen3ForCausalLM", 151936, 4096, 12288, 36, 32, 8, 128),
    "tiny": Shape("Qwen3ForCausalLM", 1024, 32, 64, 2, 4, 2, 16),  # to try the scripts themselves, without a GPU
}
WORKLOADS = [
    Workload("Qwen3-0.6B", 256, 1, 128, 512),
    Workload("Qwen3-0.6B", 32, 8, 128, 512),
    Workload("Qwen3-0.6B", 64, 1, 512, 1024),
    Workload("Qwen3-0.6B", 512, 1, 128, 1800, is_uneven=True),
    Workload("SmolLM2-135M", 256, 1, 128, 512),
    Workload("Qwen3-4B", 128, 1, 128, 256),
    Workload("tiny", 4, 2, 16, 8),
    Workload("tiny", 4, 1, 16, 72, is_uneven=True),
]

Generate = Callable[[list[list[int]], int, list[int]], int]
"""Prompts, how many samples of each, how many tokens of each prompt's samples in, number of generated tokens out."""


def make_model(shape: Shape, folder: Path) -> Path:
    """Random weights and a tokenizer of made-up words."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    from tandem.models.decoder import Decoder
    from tandem.models.hf import named_tensors
    from tandem.models.spec import ModelSpec

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config))
    with torch.device("meta"):
        decoder = Decoder(ModelSpec.load(folder))
    decoder = decoder.to(torch.bfloat16).to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
    for parameter in decoder.parameters():
        parameter.data.normal_(0, 0.02) if parameter.ndim > 1 else parameter.data.fill_(1)
    save_file({name: tensor.contiguous().cpu() for name, tensor in named_tensors(decoder).items()},
              folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(shape.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2", "unk_token": "w0"}
    settings["chat_template"] = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make_adapter(model: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    from tandem.models.spec import ModelSpec

    spec, folder = ModelSpec.load(model), model.with_name(f"{model.name}-lora")
    hidden, inner, q_size, kv_size = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    sizes = {
        "self_attn.q_proj": (q_size, hidden), "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden), "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    tensors = {}
    for layer in range(spec.num_layers):
        for name, (outputs, inputs) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.{name}.lora"
            tensors[f"{key}_A.weight"] = torch.randn(LORA_RANK, inputs) * 0.02
            tensors[f"{key}_B.weight"] = torch.randn(outputs, LORA_RANK) * 0.02
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": LORA_RANK}))
    return folder


def load_tandem(model: Path, adapter: str | None = None, truncation: dict[str, Any] | None = None) -> Generate:
    from tandem.config.inference import InferenceConfig
    from tandem.engine.build import build_engine
    from tandem.engine.protocol import GenerationRequest, GenerationResult, Sampling

    engine = build_engine(InferenceConfig.model_validate(settings_of(model)), [], lambda: None, print)  # type: ignore[arg-type]
    engine.start()
    if adapter is not None:
        engine.load_adapter(adapter, make_adapter(model))

    def generate(prompts: list[list[int]], samples: int, new_tokens: list[int]) -> int:
        futures: list[Future[GenerationResult]] = [Future() for _ in prompts]
        for prompt, length, future in zip(prompts, new_tokens, futures, strict=True):
            sampling = Sampling(length, ignore_eos=True, **truncation or {})
            request = GenerationRequest(prompt, sampling, samples, adapter=adapter, kept_tokens=truncation is not None)
            engine.submit(request, future.set_result)  # type: ignore[arg-type]
        return sum(len(sample.token_ids) for future in futures for sample in future.result().samples)

    return generate


def load_lora(model: Path) -> Generate:
    return load_tandem(model, "policy")


def load_truncated(model: Path) -> Generate:
    return load_tandem(model, truncation={"top_p": 0.9, "top_k": 50})


def settings_of(model: Path) -> dict[str, Any]:
    return {
        "model": {"name": model, "dtype": "bfloat16"},
        "seq_len": 2048,
        "max_sequences": MAX_SEQUENCES,
        "prefix_caching": False,
        "gpu_memory_utilization": 0.8,
    }


def load_http(model: Path) -> Generate:
    """The server in a process of its own, asked as the orchestrator asks: by one process that keeps its connections."""
    import aiohttp
    import orjson

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--model.name", str(model), "--model.dtype", "bfloat16", "--port", str(port), "--seq-len", "2048"]
    flags += ["--no-prefix-caching", "--gpu-memory-utilization", "0.8", "--log-level", "warning"]
    command = "import sys; from tandem.entrypoints.inference import main; main()"
    server = subprocess.Popen([sys.executable, "-c", command, *flags])
    loop = asyncio.new_event_loop()

    async def start() -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=600)
        session = aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, timeout=timeout)
        began = time.time()
        while time.time() - began < START_TIMEOUT_S:
            try:
                async with session.get("/health") as answer:
                    if answer.status == 200:
                        return session
            except aiohttp.ClientError:
                assert server.poll() is None, "the server ended"
            await asyncio.sleep(0.2)
        raise TimeoutError(f"no server within {START_TIMEOUT_S} s")

    async def one(prompt: list[int], samples: int, new_tokens: int) -> int:
        body = {"model": str(model), "prompt": prompt, "n": samples, "max_tokens": new_tokens, "temperature": 1.0,
                "ignore_eos": True, "logprobs": 0, "return_token_ids": True, "detokenize": False}  # fmt: skip
        async with session.post("/v1/completions", data=orjson.dumps(body), headers=JSON) as answer:
            assert answer.status == 200, await answer.text()
            choices = orjson.loads(await answer.read())["choices"]
        return sum(len(choice["token_ids"]) for choice in choices)

    async def ask(prompts: list[list[int]], samples: int, new_tokens: list[int]) -> int:
        requests = zip(prompts, new_tokens, strict=True)
        return sum(await asyncio.gather(*(one(prompt, samples, length) for prompt, length in requests)))

    def generate(prompts: list[list[int]], samples: int, new_tokens: list[int]) -> int:
        if not prompts:
            loop.run_until_complete(session.close())
            server.send_signal(signal.SIGTERM)
            server.wait(60)
            return 0
        return loop.run_until_complete(ask(prompts, samples, new_tokens))

    session = loop.run_until_complete(start())
    return generate


def load_vllm(model: Path) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=MAX_SEQUENCES,
        gpu_memory_utilization=0.8,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], samples: int, new_tokens: list[int]) -> int:
        params = [
            SamplingParams(n=samples, max_tokens=length, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
            for length in new_tokens
        ]
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.token_ids) for answer in answers for output in answer.outputs)

    return generate


LOADERS: dict[str, Callable[[Path], Generate]] = {
    "tandem": load_tandem, "lora": load_lora, "top-p": load_truncated, "http": load_http, "vllm": load_vllm
}  # fmt: skip


def measure(side: str, shape: str, model: Path, *, uneven: bool) -> Iterator[dict[str, Any]]:
    began = time.time()
    generate = LOADERS[side](model)
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(3, SHAPES[shape].vocab_size) for _ in range(length)] for _ in range(count)]

    generate(prompts(4, 16), 1, [4] * 4)
    start_s = time.time() - began
    for workload in [w for w in WORKLOADS if w.shape == shape and (not w.is_uneven or (uneven and side != "http"))]:
        lengths = workload.lengths
        warm_up = [min(WARM_UP_TOKENS, length) for length in lengths]
        generate(prompts(workload.prompts, workload.prompt_tokens), workload.samples, warm_up)
        rounds: list[float] = []
        for _ in range(ROUNDS):
            asked = prompts(workload.prompts, workload.prompt_tokens)
            began = time.time()
            count = generate(asked, workload.samples, lengths)
            rounds.append(time.time() - began)
            assert count == workload.num_tokens, f"{count} tokens came back, {workload.num_tokens} were asked for"
        yield {
            "workload": workload.name, "side": side, "tokens_per_s": workload.num_tokens / statistics.median(rounds),
            "rounds_s": rounds, "start_s": start_s, "floor_tokens_per_s": workload.num_tokens / workload.floor_s,
        }  # fmt: skip
    if side == "http":
        generate([], 1, [])


def run(sides: list[str] | None, shapes: list[str], *, uneven: bool) -> Iterator[dict[str, Any]]:
    """A row for each workload and side; a side that fails is told and left out."""
    with tempfile.TemporaryDirectory() as scratch:
        for shape in shapes:
            model = make_in_process(shape, Path(scratch) / shape)
            for side in sides or (SIDES if shape == next(iter(SHAPES)) else SIDES[:1]):
                command = [sys.executable, __file__, "--measure", side, shape, str(model), *["--uneven"] * uneven]
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
                    assert process.stdout is not None
                    for line in process.stdout:
                        if line.startswith("{"):
                            yield json.loads(line)
                if process.returncode:
                    print(f"{side} with {shape}: exit status {process.returncode}", file=sys.stderr, flush=True)


def make_in_process(shape: str, folder: Path) -> Path:
    """In a process of its own, so that this one holds no GPU memory."""
    if KEPT_MODELS in os.environ:
        folder = Path(os.environ[KEPT_MODELS]) / shape
    if not folder.exists():
        subprocess.run([sys.executable, __file__, "--make", shape, str(folder)], check=True, cwd=ROOT)
    return folder


def table(rows: list[dict[str, Any]]) -> list[str]:
    """One line a workload: every side, how many times vLLM, floor, share of it."""
    lines = [
        "| rollouts, tokens/s | ours | with LoRA | with top-p | over HTTP | vLLM | ratio | floor | share |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["workload"] for row in rows):
        found = {row["side"]: row["tokens_per_s"] for row in rows if row["workload"] == name}
        floor = next(row["floor_tokens_per_s"] for row in rows if row["workload"] == name)
        ours, peer = found.get("tandem"), found.get("vllm")
        cells = [f"{found[side]:,.0f}" if side in found else "–" for side in LOADERS]
        cells.append(f"{ours / peer:.2f}" if ours and peer else "–")
        cells += [f"{floor:,.0f}", f"{ours / floor:.2f}" if ours else "–"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=list(LOADERS),
        help=f"default: {', '.join(SIDES)} with the first shape, tandem with others",
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES)[:3])
    parser.add_argument("--uneven", action="store_true", help="with a workload of uneven lengths, a minute more")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make_model(SHAPES[args.make[0]], Path(args.make[1]))
        return
    if args.measure:
        side, shape, model = args.measure
        for row in measure(side, shape, Path(model), uneven=args.uneven):
            print(json.dumps(row), flush=True)
        if side != "vllm":  # whose processes must be ended
            os._exit(0)
        return
    rows: list[dict[str, Any]] = []
    for row in run(args.sides, args.shapes, uneven=args.uneven):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.output:
            args.output.write_text(json.dumps(rows, indent=1))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()

"""What a step would take on 8, 64 and 1,024 GPUs: a small simulation, fed by figures measured on one H200.

    python benchmarks/scaling.py            # the tables of docs/scaling.md

Generation is simulated: prompts go to the server with the least to do, completions have lengths of a long tail, and all
that a server decodes at once share the reading of its weights. Training, weight updates and the orchestrator are worked
out. What was measured and what is assumed is said next to each figure; nothing here has run on more than one GPU.
"""

import heapq
import random
from dataclasses import dataclass, field

from tandem.config.parallel import ParallelConfig
from tandem.models.memory_estimate import MemoryUse, kv_bytes, num_parameters, serving_memory, training_memory
from tandem.models.spec import ModelSpec

GIB = 2**30
GB = 1e9

# Measured (docs/performance.md, docs/log.md).
PEAK_FLOPS = 808e12  # H200, bfloat16
MEMORY_BYTES_PER_S = 4.26e12  # H200
TRAIN_SHARE = 0.60  # of the peak; 0.56 at 0.6B, 0.64 at 4B
DECODE_SHARE = 0.53  # of the floor that memory sets; 0.53 at 4B, 0.66 at 0.6B
ROLLOUT_CPU_S = 0.23e-3  # the orchestrator, single turn
TURNS_CPU_S = 3.9e-3  # and of four turns
# Assumed: an ordinary cluster. One GPU's share of each.
NVLINK_BYTES_PER_S = 300e9
NETWORK_BYTES_PER_S = 40e9  # 400 Gbit/s InfiniBand, four fifths of it
GPUS_PER_NODE = 8
WRITE_BYTES_PER_S = 2e9  # one process into a shared file system
READ_BYTES_PER_S = 40e9  # all servers together from it
READ_BYTES_PER_S_EACH = 5e9
H200_BYTES = int(139.8 * GIB)

# hidden, intermediate, layers, heads, KV heads, tied embeddings; head dimension 128
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False),
    "32B": (5120, 25600, 64, 64, 8, False),
}


def spec_of(size: str) -> ModelSpec:
    """The Qwen3 of this size."""
    hidden, intermediate, layers, heads, kv_heads, tied = SHAPES[size]
    return ModelSpec.from_config(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 151936,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128,
            "tie_word_embeddings": tied,
        }
    )


@dataclass(frozen=True)
class Layout:
    """A model on GPUs of which some train and the others generate; one server takes `tensor_parallel` of them."""

    size: str
    ranks: int
    servers: int
    tensor_parallel: int
    prompts: int  # a step, each with `group` completions
    strategy: str = "zero3"
    group: int = 16
    prompt_tokens: int = 512
    mean_tokens: int = 2048
    max_tokens: int = 8192
    rows: int = 256  # that a server decodes at once
    microbatch_tokens: int = 16384
    checkpointing: int = 1

    @property
    def gpus(self) -> int:
        return self.ranks + self.servers * self.tensor_parallel

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, and what a GPU of each kind needs."""

    generate: float
    train: float
    publish: float
    load: float
    orchestrator: float
    orchestrator_turns: float
    trained_tokens: int
    trainer: MemoryUse
    server: MemoryUse

    @property
    def overlapped(self) -> float:
        """With max_staleness = 1: whatever takes longest, generation being paused while weights are loaded."""
        return max(self.generate + self.load, self.train + self.publish, self.orchestrator)

    @property
    def on_policy(self) -> float:
        return self.generate + self.train + self.publish + self.load


@dataclass(order=True)
class Server:
    """Decodes up to `rows` sequences at once; times are those of its own clock."""

    time: float
    number: int
    waiting: list[int] = field(default_factory=list, compare=False)  # completion lengths, in tokens


def simulate(layout: Layout, seed: int = 0) -> StepTimes:
    spec = spec_of(layout.size)
    draw = random.Random(seed)
    lengths = [draw_length(draw, layout) for _ in range(layout.rollouts)]
    tokens = sum(lengths) + layout.rollouts * layout.prompt_tokens
    weights = 2 * num_parameters(spec)
    publish, load = weight_update(layout, weights)
    parallel = ParallelConfig.model_validate(
        {"strategy": layout.strategy, "gradient_checkpointing": layout.checkpointing}
    )
    kv_tokens = layout.rows * (layout.prompt_tokens + layout.mean_tokens)
    return StepTimes(
        generate=generate(layout, spec, lengths),
        train=train(layout, spec, tokens),
        publish=publish,
        load=load,
        orchestrator=layout.rollouts * ROLLOUT_CPU_S,
        orchestrator_turns=layout.rollouts * TURNS_CPU_S,
        trained_tokens=tokens,
        trainer=training_memory(spec, "bfloat16", parallel, layout.ranks, layout.microbatch_tokens, H200_BYTES),
        server=serving_memory(spec, "bfloat16", kv_tokens, 8192, layout.rows, layout.tensor_parallel),
    )


def draw_length(draw: random.Random, layout: Layout) -> int:
    """Lognormal: half are shorter than three fifths of the mean, one in a hundred is seven times as long."""
    length = draw.lognormvariate(0, 1) * layout.mean_tokens / 1.6487
    return max(1, min(layout.max_tokens, round(length)))


def generate(layout: Layout, spec: ModelSpec, lengths: list[int]) -> float:
    """Until the last completion of the step is there. Groups go to the server with the fewest tokens to do."""
    servers = [Server(0.0, number) for number in range(layout.servers)]
    load = [(0, number) for number in range(layout.servers)]
    for start in range(0, len(lengths), layout.group):
        group = lengths[start : start + layout.group]
        tokens, number = heapq.heappop(load)
        servers[number].waiting += group
        heapq.heappush(load, (tokens + len(group) * layout.mean_tokens, number))  # lengths are not known beforehand
    return max(decode(layout, spec, server.waiting) for server in servers)


def decode(layout: Layout, spec: ModelSpec, lengths: list[int]) -> float:
    """Continuous batching: a row that ends is given to the next; from one end to the next all decode at one speed."""
    weights, kv = 2 * num_parameters(spec), kv_bytes(spec, 2)
    bandwidth = MEMORY_BYTES_PER_S * layout.tensor_parallel * DECODE_SHARE
    waiting = list(reversed(lengths))
    running: list[tuple[int, int]] = []  # (token count at which it ends, at which it began)
    done, seconds, began = 0, 0.0, 0
    while waiting or running:
        while waiting and len(running) < layout.rows:
            heapq.heappush(running, (done + waiting.pop(), done))
            began += done
        ends, since = running[0]
        steps = ends - done
        # Tokens in the cache half-way to the next end: prompts, and what was decoded since each began.
        cached = len(running) * (layout.prompt_tokens + done + steps / 2) - began
        seconds += steps * (weights + cached * kv) / bandwidth
        done = ends
        heapq.heappop(running)
        began -= since
    prefill = 2 * num_parameters(spec) * len(lengths) / layout.group * layout.prompt_tokens
    return seconds + prefill / (PEAK_FLOPS * TRAIN_SHARE * layout.tensor_parallel)


def train(layout: Layout, spec: ModelSpec, tokens: int) -> float:
    """Computing and communicating overlap; whichever takes longer counts. Recomputing layers costs a third forward."""
    parameters = num_parameters(spec)
    passes = 8 if layout.checkpointing else 6  # operations for each parameter and token
    compute = passes * parameters * tokens / (PEAK_FLOPS * TRAIN_SHARE * layout.ranks)
    microbatches = -(-tokens // (layout.ranks * layout.microbatch_tokens))
    gathered = 2 * parameters * (2 if layout.strategy == "zero3" else 1)  # for the forward and for the backward pass
    link = NVLINK_BYTES_PER_S if layout.ranks <= GPUS_PER_NODE else NETWORK_BYTES_PER_S
    traffic = microbatches * gathered + 4 * parameters  # gradients once, in float32
    return max(compute, traffic / link)


def weight_update(layout: Layout, weights: int) -> tuple[float, float]:
    """Written by the first rank into the shared file system; read by every server."""
    each = weights / READ_BYTES_PER_S_EACH
    return weights / WRITE_BYTES_PER_S, max(each, layout.servers * weights / READ_BYTES_PER_S)


LAYOUTS = [
    Layout("4B", ranks=4, servers=4, tensor_parallel=1, prompts=64, strategy="zero2"),
    Layout("8B", ranks=4, servers=4, tensor_parallel=1, prompts=64),
    Layout("8B", ranks=32, servers=32, tensor_parallel=1, prompts=256),
    Layout("32B", ranks=32, servers=16, tensor_parallel=2, prompts=256),
    Layout("8B", ranks=512, servers=512, tensor_parallel=1, prompts=2048),
    Layout("32B", ranks=512, servers=128, tensor_parallel=4, prompts=2048),
]
# What one GPU holds, by size: ranks, strategy, recomputed layers.
ADVICE = [
    ("0.6B", 1, "zero2", 0),
    ("4B", 1, "zero2", 1),
    ("4B", 4, "zero2", 0),
    ("8B", 4, "zero3", 1),
    ("8B", 8, "zero3", 0),
    ("14B", 8, "zero3", 1),
    ("32B", 8, "zero3", 1),
    ("32B", 32, "zero3", 1),
]


def step_table() -> list[str]:
    lines = [
        "| GPUs | model | train | generate | rollouts | sampling | training | publish | load | overlap | on-policy |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for layout in LAYOUTS:
        times = simulate(layout)
        servers = f"{layout.servers} × {layout.tensor_parallel}"
        seconds = (times.generate, times.train, times.publish, times.load, times.overlapped, times.on_policy)
        shown = " | ".join(f"{value:.0f} s" for value in seconds)
        lines.append(
            f"| {layout.gpus:,} | {layout.size} | {layout.ranks} | {servers} | {layout.rollouts:,} | {shown} |"
        )
    return lines


def orchestrator_table() -> list[str]:
    lines = ["| rollouts a step | CPU, single turn | CPU, four turns |", "|---|---|---|"]
    for rollouts in sorted({layout.rollouts for layout in LAYOUTS}):
        lines.append(f"| {rollouts:,} | {rollouts * ROLLOUT_CPU_S:.1f} s | {rollouts * TURNS_CPU_S:.0f} s |")
    return lines


def memory_table() -> list[str]:
    lines = [
        "| model | ranks | strategy | recompute | trainer's GPU | state | server's weights | KV, 100,000 tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size, ranks, strategy, checkpointing in ADVICE:
        spec = spec_of(size)
        parallel = ParallelConfig.model_validate({"strategy": strategy, "gradient_checkpointing": checkpointing})
        use = training_memory(spec, "bfloat16", parallel, ranks, 8192, H200_BYTES)
        server = serving_memory(spec, "bfloat16", 100_000, 8192, 256)
        numbers = (use.total, use.total - use.activations, server.weights, server.kv_cache)
        shown = " | ".join(f"{value / GIB:.0f} GiB" for value in numbers)
        lines.append(f"| {size} | {ranks} | `{strategy}` | {'all' if checkpointing else 'none'} | {shown} |")
    return lines


def main() -> None:
    for title, table in (("Steps", step_table), ("Orchestrator", orchestrator_table), ("Memory", memory_table)):
        print(f"{title}\n", *table(), "", sep="\n")


if __name__ == "__main__":
    main()

"""GRPO in one file: rollouts, rewards, advantages, loss, update and weight sync of a small model, step by step.

    python examples/python/grpo_in_one_file.py                     # a tiny new model learns to write vowels
    python examples/python/grpo_in_one_file.py --model DIR --steps 100

It has one process and one loop, on the parts that `rl` runs: our decoder, our engine, our packing. Replace `PROMPTS`
and `reward` by your own task.
"""

import argparse
import importlib.util
import random
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tandem.config.inference import InferenceConfig
from tandem.config.shared import ModelConfig
from tandem.data.packing import pack
from tandem.data.tokenizer import Tokenizer
from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import GeneratedSample, GenerationRequest, GenerationResult, Outcome, Sampling
from tandem.models.runtime import choose_device
from tandem.models.trainable import load_trainable, whole_tensors
from tandem.serving.builders import build_native
from tandem.trainer.model.language_model import Inputs, LanguageModel
from tandem.types.rollout import PackedBatch, TrainingSequence
from tandem.weights.files import WeightsPublisher

WORDS = ("sun", "moon", "river", "stone", "cloud", "grass", "light", "sand", "wind", "leaf", "snow", "fire")
PROMPTS = [f"{first} {second}" for first in WORDS for second in WORDS if first != second]
SEQ_LEN = 64


def reward(prompt: str, response: str) -> float:
    """The share of vowels in 16 characters: there is something to learn from the first step on."""
    return sum(character in "aeiou" for character in response[:16]) / 16


def main() -> list[float]:
    """The mean reward of every step."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        return train(args, Path(scratch))


def train(args: argparse.Namespace, scratch: Path) -> list[float]:
    torch.manual_seed(args.seed)
    model_dir = Path(args.model) if args.model else make_model(scratch / "model")
    tokenizer = Tokenizer(model_dir)

    # The same weights twice: in the engine, which samples, and in the model, which learns.
    engine = start_engine(model_dir, tokenizer, args.seed)
    decoder = load_trainable(ModelConfig(name=model_dir), choose_device("auto"))
    model = LanguageModel(decoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    published = WeightsPublisher(scratch / "weights", model_dir, "float32", keep=2)

    means: list[float] = []
    draw = random.Random(args.seed)
    for step in range(1, args.steps + 1):
        # 1. Rollouts: a group of completions of every prompt, with the log-probs they were sampled at.
        prompts = draw.sample(PROMPTS, args.prompts)
        prompt_ids = [encode(tokenizer, prompt) for prompt in prompts]
        groups = generate(engine, prompt_ids, args.group_size, args.max_tokens, seed=args.seed + step)

        # 2. Rewards, and advantages: how much better a completion is than the others of its prompt.
        rewards = [
            [reward(prompt, tokenizer.decode(sample.token_ids)) for sample in group]
            for prompt, group in zip(prompts, groups, strict=True)
        ]
        batch = make_batch(prompt_ids, groups, [advantages(group) for group in rewards])

        # 3. Updates: the clipped objective, and a penalty on moving away from the policy that sampled.
        for _ in range(args.updates):
            loss, held_back = grpo_loss(model, batch, args.clip, args.kl)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        # 4. Weight sync: the engine samples from the new policy in the next step.
        engine.update_weights(published.publish(whole_tensors(decoder), step), step)

        flat = [value for group in rewards for value in group]
        means.append(sum(flat) / len(flat))
        print(f"step {step:3d}  reward {means[-1]:.3f}  loss {loss.item():+.4f}  clipped {held_back:.3f}", flush=True)
    engine.stop()
    return means


# Rollouts


def start_engine(model_dir: Path, tokenizer: Tokenizer, seed: int) -> NativeEngine:
    """It decodes in a thread of its own; requests are batched as they come."""
    config = InferenceConfig(model=ModelConfig(name=model_dir), seq_len=SEQ_LEN, seed=seed)
    engine = build_native(config, tokenizer, on_failure=print)
    engine.start()
    return engine


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    return tokenizer.encode_chat([{"role": "user", "content": prompt}], add_generation_prompt=True)


def generate(
    engine: NativeEngine, prompts: Sequence[list[int]], group_size: int, max_tokens: int, seed: int
) -> list[list[GeneratedSample]]:
    """`group_size` completions of each prompt. All prompts are asked at once; their answers come in any order."""
    outcomes: dict[int, Outcome] = {}
    arrived = threading.Semaphore(0)

    def on_done(number: int, outcome: Outcome) -> None:
        outcomes[number] = outcome
        arrived.release()

    for number, ids in enumerate(prompts):
        sampling = Sampling(max_tokens=max_tokens, temperature=1.0, seed=seed * len(prompts) + number)
        engine.submit(
            GenerationRequest(ids, sampling, n=group_size), lambda outcome, number=number: on_done(number, outcome)
        )
    for _ in prompts:
        arrived.acquire()
    groups = []
    for _, outcome in sorted(outcomes.items()):
        if not isinstance(outcome, GenerationResult):
            raise outcome
        groups.append(outcome.samples)
    return groups


# Advantages and batches


def advantages(rewards: Sequence[float]) -> list[float]:
    """(r − mean) / std within the group; zeros where all are equal."""
    mean = sum(rewards) / len(rewards)
    std = (sum((value - mean) ** 2 for value in rewards) / len(rewards)) ** 0.5
    return [(value - mean) / (std + 1e-6) for value in rewards]


def make_batch(
    prompts: Sequence[list[int]], groups: Sequence[Sequence[GeneratedSample]], advantage: Sequence[Sequence[float]]
) -> PackedBatch:
    """All sequences end to end; the completions of a prompt share its tokens, so it is computed once."""
    sequences = []
    for prompt, group, values in zip(prompts, groups, advantage, strict=True):
        for sample, value in zip(group, values, strict=True):
            mask = [0] * len(prompt) + [1] * len(sample.token_ids)
            streams = {
                "advantages": [value * learned for learned in mask],
                "logprobs": [0.0] * len(prompt) + sample.logprobs,
            }
            sequences.append(TrainingSequence(prompt + sample.token_ids, mask, streams))
    return pack(sequences)


# Loss


def grpo_loss(model: LanguageModel, batch: PackedBatch, clip: float, kl: float) -> tuple[Tensor, float]:
    """mean over tokens of −min(r A, clip(r) A) + kl · (1/r − 1 + log r), with r the ratio to the policy that sampled;
    and the share of tokens that the clip holds back."""
    device = next(model.parameters()).device
    logprobs, _ = model(Inputs.of(batch, device), temperature=1.0)
    sampled = torch.from_numpy(batch.streams["logprobs"]).to(device)
    advantage = torch.from_numpy(batch.streams["advantages"]).to(device)
    log_ratio = logprobs - sampled
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    distance = torch.exp(-log_ratio) - 1 + log_ratio  # never negative, and its mean estimates the KL divergence
    held_back = (clipped * advantage < ratio * advantage).float().mean().item()
    return (kl * distance - gain).mean(), held_back


# The command line


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model directory; left out: a tiny model with random weights")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--group-size", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--updates", type=int, default=2, help="updates on each batch")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--kl", type=float, default=0.01, help="weight of the KL penalty")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_model(target: Path) -> Path:
    """That of the reverse-text example, from its script."""
    script = Path(__file__).parents[1] / "reverse_text" / "make_model.py"
    spec = importlib.util.spec_from_file_location("make_model", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(target)
    return target


if __name__ == "__main__":
    main()

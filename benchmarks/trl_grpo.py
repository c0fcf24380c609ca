"""The peer side of the CPU RL benchmark: TRL's GRPOTrainer with its transformers generation.

Owns one TRL run on a local model and two JSONL files of {"prompt", "answer"} lines, and prints its speed and
learning as one JSON line, the last. Knows nothing of Tandem; called in an environment that holds TRL.

    python benchmarks/trl_grpo.py MODEL --train train.jsonl --held-out held_out.jsonl
"""

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

Row = dict[str, Any]
Reward = Callable[[str, str], float]
WARM_UP_STEPS = 3  # not counted in the seconds per step


def matching_characters(completion: str, answer: str) -> float:
    """Characters of the answer found at the same position of the completion / length of the answer."""
    return sum(got == wanted for got, wanted in zip(completion, answer, strict=False)) / len(answer)


def load_reward(path: str | None) -> Reward:
    if path is None:
        return matching_characters
    module, _, function = path.partition(":")
    if not function:
        raise ValueError(f"--reward must be module:function, not {path!r}")
    return getattr(importlib.import_module(module), function)


def load_rows(path: Path) -> list[Row]:
    """Rows as TRL wants them: a conversation and the answer, which TRL hands on to the reward function."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]


def trl_reward(reward: Reward) -> Callable[..., list[float]]:
    def score(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [reward(text, wanted) for text, wanted in zip(texts, answer, strict=True)]

    return score


class HeldOut:
    """Mean reward of the greedy completions of the held-out prompts, generated in one batch."""

    def __init__(self, rows: list[Row], tokenizer: Any, reward: Reward, max_new_tokens: int) -> None:
        self.answers = [row["answer"] for row in rows]
        self.tokenizer, self.reward, self.max_new_tokens = tokenizer, reward, max_new_tokens
        chats = [row["prompt"] for row in rows]
        self.inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )

    def evaluate(self, model: PreTrainedModel) -> float:
        model.eval()
        tokens = model.generate(**self.inputs, do_sample=False, max_new_tokens=self.max_new_tokens)
        model.train()
        completions = tokens[:, self.inputs["input_ids"].shape[1] :]
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        return statistics.mean(map(self.reward, texts, self.answers))


class Clock(TrainerCallback):
    """Times every step from the end of the one before, data loading included, evaluation excluded."""

    def __init__(self, held_out: HeldOut, eval_every: int, target: float, stop_at_target: bool) -> None:
        self.held_out, self.eval_every = held_out, eval_every
        self.target, self.stop_at_target = target, stop_at_target
        self.step_s: list[float] = []
        self.curve: list[tuple[int, float, float]] = []  # (step, train seconds, held-out reward)

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        self._evaluate(0, kwargs["model"])
        self.resumed_at = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_s.append(time.perf_counter() - self.resumed_at)
        if state.global_step % self.eval_every == 0 or state.global_step == state.max_steps:
            self._evaluate(state.global_step, kwargs["model"])
            if self.stop_at_target and self.seconds_to_target is not None:
                control.should_training_stop = True
        self.resumed_at = time.perf_counter()

    def _evaluate(self, step: int, model: PreTrainedModel) -> None:
        reward = self.held_out.evaluate(model)
        self.curve.append((step, round(sum(self.step_s), 3), round(reward, 4)))
        print(f"step {step}  {sum(self.step_s):.1f} s  held-out reward {reward:.3f}", file=sys.stderr)

    @property
    def seconds_to_target(self) -> float | None:
        return next((seconds for _, seconds, reward in self.curve if reward >= self.target), None)


def make_config(args: argparse.Namespace, output_dir: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=args.prompts * args.group_size,
        num_generations=args.group_size,
        num_iterations=1,
        max_completion_length=args.max_completion_length,
        temperature=args.temperature,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=args.warmup_steps,
        adam_beta1=args.betas[0],
        adam_beta2=args.betas[1],
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        epsilon=args.epsilon,
        beta=0.0,
        loss_type=args.loss_type,
        scale_rewards="group",
        seed=args.seed,
        # What makes TRL quick on a CPU; bf16 and gradient checkpointing are on unless refused.
        use_cpu=True,
        use_vllm=False,
        bf16=False,
        gradient_checkpointing=False,
        optim=args.optim,
        cache_implementation=args.cache_implementation,
        torch_compile=args.torch_compile,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        logging_steps=args.log_every,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--train", type=Path, required=True, help="JSONL of prompt and answer")
    parser.add_argument("--held-out", type=Path, required=True, help="JSONL of prompt and answer")
    parser.add_argument("--reward", help="module:function(completion, answer) -> float in [0, 1]")
    parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.999))
    parser.add_argument("--cache-implementation", help="key-value cache of generate(), such as static")
    parser.add_argument("--torch-compile", action="store_true")
    parser.add_argument("--stop-at-target", action="store_true")
    numbers = {"steps": 200, "prompts": 16, "group-size": 8, "max-completion-length": 16, "seed": 0, "warmup-steps": 10}
    numbers |= {"threads": 2, "num-held-out": 128, "eval-every": 10, "log-every": 1000}
    rates = {"lr": 3e-4, "weight-decay": 0.0, "max-grad-norm": 1.0, "epsilon": 0.2}
    rates |= {"temperature": 1.0, "target": 0.9}
    names = {"loss-type": "dapo", "attention": "sdpa", "optim": "adamw_torch_fused"}
    for name, default in {**numbers, **rates, **names}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=" ")
    args = parser.parse_args()
    if args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be more than the {WARM_UP_STEPS} that are not timed, not {args.steps}")
    return args


def main(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    load_options = {"dtype": torch.float32, "attn_implementation": args.attention}
    model = AutoModelForCausalLM.from_pretrained(args.model, **load_options)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    reward = load_reward(args.reward)
    rows = load_rows(args.held_out)[: args.num_held_out]
    held_out = HeldOut(rows, tokenizer, reward, args.max_completion_length)
    clock = Clock(held_out, args.eval_every, args.target, args.stop_at_target)
    with tempfile.TemporaryDirectory() as output_dir:
        GRPOTrainer(
            model=model,
            reward_funcs=trl_reward(reward),
            args=make_config(args, output_dir),
            train_dataset=Dataset.from_list(load_rows(args.train)),
            processing_class=tokenizer,
            callbacks=[clock],
        ).train()
    timed = clock.step_s[WARM_UP_STEPS:] or clock.step_s  # the target may be reached before
    return {
        "samples_per_second": round(args.prompts * args.group_size / statistics.mean(timed), 2),
        "step_s_median": round(statistics.median(timed), 4),
        "step_s_mean": round(statistics.mean(timed), 4),
        "steps": len(clock.step_s),
        "seconds_to_target": clock.seconds_to_target,
        "target": args.target,
        "curve": clock.curve,
    }


if __name__ == "__main__":
    print(json.dumps(main(parse_args())))

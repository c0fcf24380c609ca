"""The peer side of the offline benchmark: TRL's SFTTrainer or DPOTrainer on a local model and a JSONL file.

Prints seconds of training, those of each step, and peak memory as one JSON line, the last. Knows nothing of Tandem.

    python benchmarks/trl_offline.py sft MODEL rows.jsonl --batch-size 8 --dtype float32
    python benchmarks/trl_offline.py sft MODEL rows.jsonl --gpu --batch-size 4 --seq-len 4096 --dtype bfloat16
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """Times every step, once the GPU is done with it."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.step_s.append(time.perf_counter() - self._began)


def make_trainer(args: argparse.Namespace, folder: str) -> Trainer:
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    options: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": args.batch_size,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "gradient_checkpointing": args.gradient_checkpointing,
        "bf16": args.dtype == "bfloat16",
        "use_cpu": not args.gpu,
        "max_steps": args.steps,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "max_length": args.seq_len,
    }
    # Float32 master weights either way; bf16 is autocast.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if args.kind == "sft":
        config = SFTConfig(**options, completion_only_loss="completion" in rows[0])
        return SFTTrainer(model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    config = DPOConfig(**options, beta=0.1, precompute_ref_log_probs=True)
    return DPOTrainer(model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["sft", "dpo"])
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=-1, help="default: all rows once")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="TRL's own default")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, folder)
        clock = Clock()
        trainer.add_callback(clock)
        started = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - started
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = torch.cuda.max_memory_allocated() if args.gpu else resident
    print(json.dumps({"seconds": seconds, "step_s": clock.step_s, "memory_bytes": memory, "losses": losses}))


if __name__ == "__main__":
    main()

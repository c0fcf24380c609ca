"""One node, split GPUs: training on some, inference on the others. Without GPUs, everything shares the CPU.

python examples/python/one_node.py --model outputs/reverse_text_sft/weights/latest
python examples/python/one_node.py --model DIR --training-gpus 0 1 2 3 --inference-gpus 4 5 6 7
"""

import argparse
import asyncio

from tandem import (
    DataBuffer,
    NativeEngine,
    PyTorchTrainingBackend,
    RLTrainingConfig,
    RolloutManager,
    run_rl_training,
)


async def main(args: argparse.Namespace) -> list[dict[str, float]]:
    training_backend = PyTorchTrainingBackend(
        model_name=args.model,
        world_size=len(args.training_gpus) or args.ranks,
        gpu_ids=args.training_gpus or None,
        strategy="fsdp",
        output_dir=args.output_dir,
        clean=True,
        optimizer={"lr": 2e-4},
    )
    inference_engines = [
        NativeEngine(model_name=args.model, gpu_id=gpu, seq_len=64) for gpu in args.inference_gpus or [None, None]
    ]
    config = RLTrainingConfig(num_steps=args.steps, sync_every=1, seq_len=64, max_tokens=16)
    metrics = await run_rl_training(
        backend=training_backend,
        rollout_manager=RolloutManager(),
        data_buffer=DataBuffer.from_env("reverse-text"),
        inference_engines=inference_engines,
        config=config,
    )
    for line in metrics:
        print(f"step {line['step']:3.0f}  reward {line['reward/mean']:.3f}  loss {line['loss']:+.4f}")
    return metrics


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output-dir", default="outputs/one_node")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2, help="trainer processes, where there are no GPUs")
    parser.add_argument("--training-gpus", type=int, nargs="*", default=[])
    parser.add_argument("--inference-gpus", type=int, nargs="*", default=[])
    return parser.parse_args(argv)


if __name__ == "__main__":
    asyncio.run(main(parse_arguments()))

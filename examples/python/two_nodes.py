"""Two nodes: training here, a node of inference workers through Ray. The model and the output directory are on a file
system that both see.

    ray start --head                                  # here, on node 1
    ray start --address NODE1:6379                    # on node 2
    python examples/python/two_nodes.py --model DIR --inference-node node2 --workers 8
"""

import argparse
import asyncio

from tandem import (
    Cluster,
    DataBuffer,
    NodeConfig,
    PyTorchTrainingBackend,
    RemoteRolloutManager,
    RLTrainingConfig,
    run_rl_training,
)


async def main(args: argparse.Namespace) -> list[dict[str, float]]:
    # Node 1: training, with one rank a GPU.
    training_backend = PyTorchTrainingBackend(
        model_name=args.model,
        world_size=len(args.training_gpus) or 1,
        gpu_ids=args.training_gpus or None,
        strategy="fsdp",
        output_dir=args.output_dir,
        clean=True,
        optimizer={"lr": 2e-4},
    )

    # Node 2: inference. `tandem.python.workers.inference` serves a model with one of our engines; a function of yours
    # that answers the same messages does as well: examples/python/inference_worker.py.
    inference_cluster = Cluster(
        nodes=[NodeConfig(host, num_workers=args.workers) for host in args.inference_node], address=args.address
    )
    inference_workers = inference_cluster.start(work_fn=args.work_fn)

    data_buffer = DataBuffer.from_env("reverse-text")
    config = RLTrainingConfig(num_steps=args.steps, sync_every=1, seq_len=64, max_tokens=16)
    rollout_manager = RemoteRolloutManager(workers=inference_workers, data_buffer=data_buffer, seq_len=64)
    try:
        metrics = await run_rl_training(backend=training_backend, rollout_manager=rollout_manager, config=config)
    finally:
        inference_cluster.stop()
    for line in metrics:
        print(f"step {line['step']:3.0f}  reward {line['reward/mean']:.3f}  loss {line['loss']:+.4f}")
    return metrics


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--inference-node", nargs="+", required=True, help="host names or addresses")
    parser.add_argument("--workers", type=int, default=1, help="of each inference node")
    parser.add_argument("--work-fn", default="tandem.python.workers.inference")
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("--output-dir", default="outputs/two_nodes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--training-gpus", type=int, nargs="*", default=[])
    return parser.parse_args(argv)


if __name__ == "__main__":
    asyncio.run(main(parse_arguments()))

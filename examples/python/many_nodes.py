"""Several training nodes and several inference nodes, all through Ray: one rank, or one engine, a worker.

    python examples/python/many_nodes.py --model DIR --workers 8 --training-node tr1 tr2 --inference-node inf1 inf2

The trainer's ranks find each other by the rendezvous that `Cluster` sets up, as under torchrun. If one of them dies, or
its node, all are started again on what is left, from the newest checkpoint.
"""

import argparse
import asyncio

from tandem import (
    Cluster,
    ClusterTrainingBackend,
    DataBuffer,
    NodeConfig,
    RemoteRolloutManager,
    RLTrainingConfig,
    run_rl_training,
)


async def main(args: argparse.Namespace) -> list[dict[str, float]]:
    training_cluster = Cluster(
        nodes=[NodeConfig(host, num_workers=args.workers) for host in args.training_node], address=args.address
    )
    inference_cluster = Cluster(
        nodes=[NodeConfig(host, num_workers=args.workers) for host in args.inference_node], address=args.address
    )
    with training_cluster, inference_cluster:
        training_workers = training_cluster.start(work_fn="tandem.python.workers.train")
        inference_workers = inference_cluster.start(work_fn="tandem.python.workers.inference")
        metrics = await run_rl_training(
            backend=ClusterTrainingBackend(
                training_workers,
                args.model,
                strategy="fsdp",
                output_dir=args.output_dir,
                clean=True,
                optimizer={"lr": 2e-4},
                checkpoint={"every": 5},
            ),
            rollout_manager=RemoteRolloutManager(inference_workers, DataBuffer.from_env("reverse-text"), seq_len=64),
            config=RLTrainingConfig(num_steps=args.steps, sync_every=1, seq_len=64, max_tokens=16),
        )
    for line in metrics:
        print(f"step {line['step']:3.0f}  reward {line['reward/mean']:.3f}  loss {line['loss']:+.4f}")
    return metrics


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--training-node", nargs="+", required=True, help="host names or addresses")
    parser.add_argument("--inference-node", nargs="+", required=True)
    parser.add_argument("--workers", type=int, default=1, help="of each node")
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("--output-dir", default="outputs/many_nodes")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args(argv)


if __name__ == "__main__":
    asyncio.run(main(parse_arguments()))

"""What a rollout costs the orchestrator: ten thousand in flight, against an HTTP engine that answers after a delay.

    python benchmarks/orchestrator_cpu.py                       # single turns, then conversations of four turns
    python benchmarks/orchestrator_cpu.py --rollouts 1000

Client, policy, environment process and rollout maker are those of a run; only the engine is played, by a process of its
own. Told are the CPU time of the orchestrator per finished rollout, its memory, and the longest stall of its event
loop. The environment's process, with the reward function, is not counted.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from tandem.config.client import ClientConfig
from tandem.data.tokenizer import Tokenizer
from tandem.envs.config import EnvConfig
from tandem.envs.process import open_environment
from tandem.orchestrator import event_loop
from tandem.orchestrator.claim import RunClaim
from tandem.orchestrator.client import InferenceClient
from tandem.orchestrator.conversations import open_episodes
from tandem.orchestrator.rollouts import RolloutMaker
from tandem.orchestrator.weight_sync import Policy
from tandem.types.identity import ServerIdentity
from tandem.types.rollout import Group, SamplingRequest
from tandem.utils.garbage import collect_by_the_clock
from tandem.utils.metrics import RunLog
from tandem.utils.ports import nearest_free_port
from tandem.utils.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 16
RUN = "benchmark"
TICK_S = 0.005
GROUP_SIZE = 8
NUM_TURNS = 4


def serve(port: int, vocabulary: int, delays_s: tuple[float, float]) -> None:
    """The engine: random tokens after a while."""
    identity = ServerIdentity("benchmark", "model", 0, (RUN,)).to_headers()

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(random.uniform(*delays_s))
        choices = [choice(index) for index in range(body["n"])]
        return web.json_response({"choices": choices}, headers=identity)

    def choice(index: int) -> dict[str, Any]:
        return {
            "index": index,
            "token_ids": [random.randrange(vocabulary) for _ in range(NEW_TOKENS)],
            "logprobs": {"token_logprobs": [-random.random() for _ in range(NEW_TOKENS)]},
            "weight_versions": [0] * NEW_TOKENS,
            "finish_reason": "stop",
        }

    async def well(request: web.Request) -> web.Response:
        return web.json_response({}, headers=identity)

    app = web.Application()
    app.add_routes(
        [
            web.get("/health", well),
            *(web.post(path, well) for path in ("/claim", "/release", "/update_weights")),
            web.post("/v1/completions", answer),
        ]
    )
    web.run_app(app, host="127.0.0.1", port=port, print=None, backlog=20_000)


class Stalls:
    """The longest time between two turns of the event loop, and the most CPU time that it took of its own: on a machine
    that others use too, the first is theirs as well."""

    longest_s = 0.0
    longest_cpu_s = 0.0

    async def watch(self) -> None:
        while True:
            before, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self.longest_s = max(self.longest_s, time.monotonic() - before - TICK_S)
            self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - cpu)


async def measure(url: str, model: Path, folder: Path, env: EnvConfig, num_rollouts: int) -> dict[str, float]:
    tokenizer = Tokenizer(model)
    client = InferenceClient(ClientConfig(base_url=url), RunClaim(RUN, "0" * 16, ""), url)
    async with open_environment(env) as environment:
        await client.wait_until_ready()
        policy = Policy([client], model, 0, RunLog(RunDir(folder), "orchestrator"))
        await policy.load(model, 0)
        maker = RolloutMaker(
            policy,
            environment,
            tokenizer,
            tries=1,
            record=lambda attempt: None,
            episodes=open_episodes(environment, tokenizer, seq_len=512),
        )
        tasks = environment.train_tasks[: num_rollouts // GROUP_SIZE]
        prompts = [tokenizer.encode_chat(task.messages, add_generation_prompt=True) for task in tasks]

        async def group(group_id: int) -> Group:
            sampling = SamplingRequest(GROUP_SIZE, NEW_TOKENS, temperature=1.0, seed=group_id)
            return await maker.make_group(tasks[group_id], prompts[group_id], group_id, sampling)

        stalls = Stalls()
        watching = [asyncio.ensure_future(collect_by_the_clock())]
        await asyncio.sleep(0)  # its first collection, of everything, is before the run
        watching += [asyncio.ensure_future(stalls.watch()), asyncio.ensure_future(policy.watch())]
        began, cpu = time.monotonic(), time.process_time()
        groups = await asyncio.gather(*(group(group_id) for group_id in range(len(tasks))))
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        for task in watching:
            task.cancel()
    await client.close()
    finished = sum(len(group.rollouts) for group in groups)
    return {
        "rollouts": finished,
        "turns": sum(len(rollout.turns) for group in groups for rollout in group.rollouts) / finished,
        "seconds": seconds,
        "CPU ms a rollout": 1000 * cpu / finished,
        "longest stall ms": 1000 * stalls.longest_s,
        "of CPU ms": 1000 * stalls.longest_cpu_s,
        "peak memory MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--delays", type=float, nargs=2, default=[4.0, 6.0], help="seconds that an answer takes")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    num_tasks = args.rollouts // GROUP_SIZE
    kinds = {
        "single turn": EnvConfig(id="arithmetic", args={"num_train": num_tasks}, score_timeout_s=600),
        f"{NUM_TURNS} turns": EnvConfig(
            id="guessing-game",
            args={"num_train": num_tasks, "max_turns": NUM_TURNS},
            turn_timeout_s=600,
            episode_timeout_s=3600,
        ),
    }
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [sys.executable, ROOT / "examples/reverse_text/make_model.py", folder / "model"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        vocabulary = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
        port = nearest_free_port("127.0.0.1", 8200)
        assert port is not None, "no port is free"
        engine = multiprocessing.get_context("spawn").Process(
            target=serve, args=(port, vocabulary, args.delays), daemon=True
        )
        engine.start()
        for kind, env in kinds.items():
            results[kind] = event_loop.run(
                measure(f"http://127.0.0.1:{port}", folder / "model", folder, env, args.rollouts)
            )
            print(f"{kind}: " + ", ".join(f"{name} {value:,.2f}" for name, value in results[kind].items()), flush=True)
        engine.terminate()
    if args.output:
        args.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

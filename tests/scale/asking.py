"""Asks a server for completions as the orchestrator does, and says how that ended. Run on a host of its own:

python asking.py URL MODEL FOLDER NUMBER [OUTAGE_S DEAD_S]     waits for a line before it asks
"""

import asyncio
import sys
from pathlib import Path

from tandem.config.client import ClientConfig
from tandem.orchestrator.claim import RunClaim
from tandem.orchestrator.client import InferenceClient, ServerLost
from tandem.orchestrator.weight_sync import Policy
from tandem.types.rollout import SamplingRequest
from tandem.utils import connections
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir

NEVER_S = 100_000


async def main(url: str, model: Path, folder: Path, number: int, outage_s: float) -> None:
    config = ClientConfig(base_url=url, timeout_s=NEVER_S, outage_timeout_s=outage_s)
    client = InferenceClient(config, RunClaim("mine-1", "0" * 16, ""), url)
    policy = Policy([client], model, 0, RunLog(RunDir(folder), "orchestrator"))
    await policy.load(model, 0)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    sampling = SamplingRequest(1, 4, temperature=1.0, seed=1)
    watching = asyncio.ensure_future(policy.watch())
    asking = asyncio.gather(*(policy.generate([token], sampling) for token in range(10, 10 + number)))
    try:
        await asyncio.wait([asking, watching], return_when=asyncio.FIRST_COMPLETED)
        print(f"{len(await asking) if asking.done() else await watching} answers", flush=True)
    except ServerLost as error:
        print(f"lost: {error}", flush=True)
    asking.cancel()
    watching.cancel()
    await client.close()


if __name__ == "__main__":
    url, model, folder, number, *limits = sys.argv[1:]
    if limits:
        connections.PROBE_S, connections.DEAD_S = 1, int(limits[1])
    asyncio.run(main(url, Path(model), Path(folder), int(number), float(limits[0]) if limits else 600))

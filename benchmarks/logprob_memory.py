"""Peak memory of log-probs and entropy, forward and backward: in chunks as the trainer does it, and the naive way.

    python benchmarks/logprob_memory.py                       # on a GPU if there is one

Hidden states of 4096 tokens, 1024 wide, times an output matrix of 152,000 rows. Naive: all logits at once, their
log-softmax, the label's entry and the entropy. Each way runs in a process of its own; what the inputs, the gradients
and the process itself take is subtracted.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.trainer.model.logprobs import token_logprobs

WAYS = ("naive", "chunked")


def naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    distribution = F.linear(hidden, weight).float().log_softmax(dim=-1)
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return distribution.gather(-1, labels[:, None]).squeeze(-1), entropy


def peak_bytes(device: torch.device) -> int:
    """Since the last call on a GPU, since the process began on a CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(way: str, args: argparse.Namespace) -> dict[str, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(args.tokens, args.hidden, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(args.vocabulary, args.hidden, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, args.vocabulary, (args.tokens,), device=device)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)

    def run(count: int) -> float:
        inputs = hidden[:count], weight, labels[:count]
        logprobs, _ = naive(*inputs) if way == "naive" else token_logprobs(*inputs, 1.0)
        (-logprobs.mean()).backward()
        return float(hidden.grad.float().norm())

    run(count=256)  # whatever is set up once
    hidden.grad.zero_()
    peak_bytes(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else peak_bytes(device)
    started = time.monotonic()
    gradient = run(args.tokens)
    seconds = time.monotonic() - started
    return {"bytes": peak_bytes(device) - before, "seconds": seconds, "gradient": gradient}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.way:
        print(json.dumps(measure(args.way, args)))
        return
    results = {}
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        results[way] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(f"{way:<8} {results[way]['bytes'] / 2**30:6.2f} GiB   {results[way]['seconds']:.2f} s", flush=True)
    ratio = results["naive"]["bytes"] / results["chunked"]["bytes"]
    print(f"the naive way takes {ratio:.1f} times the memory; gradients {[r['gradient'] for r in results.values()]}")


if __name__ == "__main__":
    main()

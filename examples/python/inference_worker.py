"""An inference worker of your own, without an engine: one token after the other, by the model that you load here.

    python examples/python/two_nodes.py … --work-fn examples.python.inference_worker.run

It answers the messages of `tandem.python.workers`. What the trainer needs of a completion: its tokens, the log-prob
that each was sampled with, and the version of the weights that sampled it.
"""

from pathlib import Path
from typing import Any

import torch

from tandem.data.tokenizer import Tokenizer
from tandem.models.attention import PackedAttention
from tandem.models.hf import load_decoder
from tandem.models.runtime import choose_device
from tandem.python.workers import Channel


def run(handle: Channel, rank: int, world_size: int) -> None:
    device = choose_device("auto")
    version = 0
    while True:
        message = handle.recv(max_size=10 * 1024 * 1024)
        if message["cmd"] == "init_engine":
            tokenizer = Tokenizer(Path(message["model_name"]))
            model = load_decoder(Path(message["model_name"]), torch.float32, device)
            handle.send({"status": "ready"})
        elif message["cmd"] == "update_weights":
            model = load_decoder(Path(message["path"]), torch.float32, device)
            version = message["version"]
            handle.send({"status": "loaded"})
        elif message["cmd"] == "generate":
            completions = [
                [complete(model, one, tokenizer, version, number) for number in range(one["sampling"]["n"])]
                for one in message["prompts"]
            ]
            handle.send({"completions": completions})


@torch.inference_mode()
def complete(model: Any, prompt: dict[str, Any], tokenizer: Tokenizer, version: int, number: int) -> dict[str, Any]:
    """One completion, with no KV cache: everything is computed again for every token."""
    sampling = prompt["sampling"]
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed((sampling["seed"] + number) % 2**63)
    ids: list[int] = list(prompt["prompt_ids"])
    token_ids: list[int] = []
    logprobs: list[float] = []
    while len(token_ids) < sampling["max_tokens"]:
        tokens = torch.tensor(ids + token_ids, device=device)
        positions = torch.arange(len(tokens), device=device)
        attention = PackedAttention.of(torch.tensor([len(tokens)]).numpy(), torch.tensor([-1]).numpy(), device, 0)
        hidden = model(tokens, positions, attention)[-1]
        scores = (hidden @ model.output_weight.T).float() / sampling["temperature"]
        distribution = torch.log_softmax(scores, dim=-1).cpu()
        token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
        token_ids.append(token)
        logprobs.append(float(distribution[token]))
        if token in tokenizer.eos_token_ids:
            break
    reason = "stop" if token_ids[-1] in tokenizer.eos_token_ids else "length"
    return {
        "token_ids": token_ids,
        "logprobs": logprobs,
        "versions": [version] * len(token_ids),
        "finish_reason": reason,
    }

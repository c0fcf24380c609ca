"""Reward models: a decoder with one number per token on top, in and out in Hugging Face format.

What is written loads with transformers' AutoModelForSequenceClassification; the score of a text is that of its last
token that is not padding.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tandem.models import ops
from tandem.models.decoder import AttentionContext, Decoder
from tandem.models.hf import (
    WeightMismatch,
    check_tensors,
    give_memory,
    load_decoder,
    named_tensors,
    read_tensors,
)
from tandem.models.padding import padding_token
from tandem.models.spec import ModelSpec, architecture_of
from tandem.utils.errors import UserError
from tandem.utils.files import read_json, read_table

HEAD = "score.weight"
CAUSAL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


class Scorer(nn.Module):
    def __init__(self, decoder: Decoder, padding: int | None) -> None:
        super().__init__()
        self.padding = padding
        decoder.lm_head = None  # a score does not go through the vocabulary
        self.decoder = decoder
        self.score = nn.Linear(decoder.spec.hidden_size, 1, bias=False, device=decoder.embed_tokens.weight.device)

    def forward(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """token_ids and positions (tokens,) -> scores (tokens,)."""
        return ops.linear(self.decoder(token_ids, positions, context), self.score.weight, None, None).squeeze(-1)

    def named_tensors(self, parameters: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The weights under their Hugging Face names; `parameters` stand in for the own ones, under their names."""
        given = dict(self.named_parameters()) if parameters is None else parameters
        head, prefix = given["score.weight"], "decoder."
        decoder = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
        return named_tensors(self.decoder, decoder) | {HEAD: head.detach()}


def new_scorer(model_dir: Path, dtype: torch.dtype, device: torch.device, seed: int) -> Scorer:
    """A language model with a fresh head (normal, standard deviation 0.02)."""
    padding = padding_token(read_json(model_dir / "config.json"))
    scorer = Scorer(load_decoder(model_dir, dtype, device), padding).to(dtype)
    with torch.no_grad():
        head = torch.empty(scorer.score.weight.shape).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))
        scorer.score.weight.copy_(head)
    return scorer


def load_scorer(model_dir: Path, dtype: torch.dtype, device: torch.device) -> Scorer:
    """A reward model that was written before."""
    spec = scorer_spec(model_dir)
    with torch.device("meta"):
        scorer = Scorer(Decoder(spec), padding_token(read_json(model_dir / "config.json")))
    tensors = read_tensors(model_dir)
    try:
        check_tensors(scorer.named_tensors(), tensors)
    except WeightMismatch as error:
        raise WeightMismatch(f"{model_dir}: {error}") from error
    give_memory(scorer, dtype, device)
    with torch.no_grad():
        for name, view in scorer.named_tensors().items():
            view.copy_(tensors[name])
    return scorer


def scorer_spec(model_dir: Path) -> ModelSpec:
    """The shape of the decoder below the head. Raises UserError where the directory holds no reward model."""
    path = model_dir / "config.json"
    if not path.exists():
        raise UserError(f"model.name = {str(model_dir)!r} holds no model: there is no config.json in it")
    config = read_table(path)
    architecture = architecture_of(config)
    if not architecture.endswith(CLASSIFIER):
        raise UserError(
            f"model.name = {str(model_dir)!r} is a {architecture}, not a reward model; train one with "
            "`align --loss.type reward`"
        )
    causal = architecture.removesuffix(CLASSIFIER) + CAUSAL
    return replace(ModelSpec.from_config(config | {"architectures": [causal]}), tied_embeddings=True)


def scorer_config(model_dir: Path) -> dict[str, Any]:
    """The config.json of a reward model made from the language model in `model_dir`."""
    config = read_json(model_dir / "config.json")
    architecture = config["architectures"][0].removesuffix(CAUSAL) + CLASSIFIER
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config | {"architectures": [architecture], "pad_token_id": padding_token(config), **labels}

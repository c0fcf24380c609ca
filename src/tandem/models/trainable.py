"""A model to train, by our decoder or by transformers (`model.impl`), whole or through an adapter (`lora`)."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.config.lora import LoRAConfig
from tandem.config.shared import ModelConfig
from tandem.models import hf, lora_training
from tandem.models.decoder import Decoder
from tandem.models.hf_model import HFDecoder, load_hf_model

logger = logging.getLogger(__name__)
NOT_EXACT = "log-probs of engine and trainer may differ by rounding"
Trainable = Decoder | HFDecoder


def load_trainable(
    model: ModelConfig, device: torch.device, lora: LoRAConfig | None = None, seed: int = 0
) -> Trainable:
    """In float32, whatever it computes in. With `lora`, only the adapter, which `seed` begins, takes gradients."""
    decoder = _load(model, torch.float32, device)
    if lora is None:
        return decoder
    if isinstance(decoder, HFDecoder):
        decoder.attach_lora(lora, seed)
    else:
        lora_training.attach_lora(decoder, lora, seed)
    return decoder


def load_frozen(model: ModelConfig, device: torch.device) -> Trainable:
    """To be asked and not trained: computes what the trainable one does, in less memory where that can be."""
    dtype = torch.float32 if model.impl == "hf" else getattr(torch, model.dtype)
    return _load(model, dtype, device).requires_grad_(False)


def reload_frozen(decoder: Trainable, model: ModelConfig, device: torch.device) -> None:
    """What is not trained, as the files of the model have it: it may have been rounded to be served."""
    weights = dict(_load(model, torch.float32, device).named_parameters())
    for name, parameter in decoder.named_parameters():
        if not parameter.requires_grad:
            parameter.data = weights[name].data


def make_batch_invariant(decoder: Trainable, device: torch.device) -> None:
    """Exact mode (`exact.py`), for models that have it on the device they compute on; said where one does not."""
    if isinstance(decoder, HFDecoder) or not decoder.make_batch_invariant(device):
        logger.warning("no kernels of exact mode for this model on %s: %s", device.type, NOT_EXACT)


def _load(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Trainable:
    """With weights in `dtype`, computing in the model's own."""
    if model.impl == "hf":
        decoder = load_hf_model(model.name, dtype, device, trust_remote_code=model.trust_remote_code)
    else:
        decoder = hf.load_decoder(model.name, dtype, device)
    decoder.compute_dtype = getattr(torch, model.dtype)
    return decoder


def whole_tensors(decoder: Trainable) -> dict[str, Tensor]:
    """The weights of a model without an adapter, under their Hugging Face names; all ranks have to ask."""
    return decoder.whole_tensors() if isinstance(decoder, HFDecoder) else hf.whole_tensors(decoder)


def stream_tensors(decoder: Trainable) -> Iterator[tuple[str, Tensor]]:
    """The same one after the other, so that nobody has to hold all of them; all ranks have to go along."""
    yield from decoder.whole_tensors().items() if isinstance(decoder, HFDecoder) else hf.stream_tensors(decoder)


def stream_merged(decoder: Trainable) -> Iterator[tuple[str, Tensor]]:
    """Those of `merged_tensors` one after the other; all ranks have to go along."""
    if isinstance(decoder, HFDecoder):
        yield from decoder.merged_tensors().items()
    else:
        yield from lora_training.stream_merged(decoder)


def merged_tensors(decoder: Trainable) -> dict[str, Tensor]:
    """The weights under their Hugging Face names, with the adapter in them; all ranks have to ask."""
    return decoder.merged_tensors() if isinstance(decoder, HFDecoder) else lora_training.merged_tensors(decoder)


def adapter_tensors(decoder: Trainable) -> dict[str, Tensor]:
    """What an adapter consists of, under PEFT's names; all ranks have to ask."""
    return decoder.adapter_tensors() if isinstance(decoder, HFDecoder) else lora_training.adapter_tensors(decoder)


def adapter_config(decoder: Trainable, lora: LoRAConfig, base_model: Path) -> dict[str, Any]:
    """What PEFT and the engines have to know of the adapter besides its tensors."""
    if isinstance(decoder, HFDecoder):
        return decoder.adapter_config(lora, base_model)
    return lora_training.adapter_config(lora, base_model, lora_training.targets_of(lora))

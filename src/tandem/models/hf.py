"""Weights in and out in Hugging Face format.

A fused parameter of ours holds several tensors of a file, stacked along the first dimension; both
directions go through one table, so that what is saved is byte for byte what was trained.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tandem.models.decoder import Decoder
from tandem.models.runtime import whole
from tandem.models.shards import OUTPUT, TensorHeaders, compare_tensors, weight_files
from tandem.models.spec import ModelSpec
from tandem.utils.errors import UserError
from tandem.utils.files import require_regular

EMBEDDING = "model.embed_tokens.weight"
# As headers of safetensors files call them.
DTYPES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}


class WeightMismatch(UserError):
    """Files whose tensors do not fit the model."""


def load_decoder(model_dir: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The model of a directory, in `dtype` on `device`."""
    with torch.device("meta"):
        decoder = Decoder(ModelSpec.load(model_dir))
    tensors = read_tensors(model_dir)
    try:
        check_tensors(named_tensors(decoder), tensors)
    except WeightMismatch as error:
        raise WeightMismatch(f"{model_dir}: {error}") from error
    give_memory(decoder, dtype, device)
    copy_weights(decoder, tensors)
    return decoder


def give_memory(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """To the parameters of a module that was made on the meta device; what is in it is left to chance. `to_empty` does
    the same by way of PyTorch's compiler, which takes a third of a second to import."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            empty = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(part, name, nn.Parameter(empty, parameter.requires_grad))


def new_decoder(spec: ModelSpec, seed: int) -> Decoder:
    """A decoder with fresh random weights (normal, standard deviation 0.02; norms at one, biases at zero)."""
    decoder = Decoder(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
    return decoder


def named_tensors(decoder: Decoder, parameters: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The weights under their Hugging Face names; slices of fused parameters are views.

    `parameters` stand in for the decoder's own, under its names.
    """
    given = dict(decoder.named_parameters()) if parameters is None else parameters
    return dict(_hf_views(decoder.spec, given))


def whole_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """The same where they may be divided among ranks. All of them have to ask."""
    return named_tensors(decoder, {name: whole(parameter) for name, parameter in decoder.named_parameters()})


def stream_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The same one parameter after the other: no more than one is whole at a time, unless the caller keeps them."""
    for name, parameter in decoder.named_parameters():
        yield from _hf_views(decoder.spec, {name: whole(parameter)})


def copy_weights(decoder: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the decoder's weights in place, after checking that every tensor is there and fits."""
    views = named_tensors(decoder)
    check_tensors(views, tensors)
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(tensors[name])
    decoder.repack()


def check_tensors(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise WeightMismatch unless `tensors` have the names and shapes of `expected`."""
    is_tied = OUTPUT not in expected
    try:
        compare_tensors(headers_of(expected), headers_of(tensors), tied=is_tied)
    except ValueError as error:
        raise WeightMismatch(str(error)) from error
    if is_tied and OUTPUT in tensors and not torch.equal(tensors[OUTPUT], tensors[EMBEDDING]):
        raise WeightMismatch(f"{OUTPUT} differs from {EMBEDDING}, yet tie_word_embeddings is true")


def headers_of(tensors: Mapping[str, Tensor]) -> TensorHeaders:
    return {name: (DTYPES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape)) for name, tensor in tensors.items()}


def read_tensors(model_dir: Path) -> dict[str, Tensor]:
    """All tensors of a directory, from one file or from shards."""
    return {name: tensor for path in weight_files(model_dir) for name, tensor in read_file(path).items()}


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file."""
    try:
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WeightMismatch(f"{path} cannot be read: {error}") from error


def _hf_views(spec: ModelSpec, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    qkv = {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
    gate_up = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
    fused = {"qkv_proj": qkv, "gate_up_proj": gate_up}
    for name, parameter in parameters.items():
        if ".lora_" in name:
            continue  # an adapter's: `lora_training.py` names those
        prefix = "" if name.startswith("lm_head") else "model."
        *path, module, kind = name.split(".")
        if module not in fused:
            yield prefix + name, parameter.detach()
            continue
        parts = parameter.detach().split(list(fused[module].values()))
        for part, view in zip(fused[module], parts, strict=True):
            yield prefix + ".".join([*path, part, kind]), view

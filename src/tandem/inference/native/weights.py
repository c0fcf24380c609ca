"""Weights that may be swapped in: everything that can be wrong with them is found before serving stops."""

from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from tandem.inference.engine import AdapterRefused, WeightUpdateRefused
from tandem.inference.weight_check import check_adapter_files, verify_files
from tandem.models.decoder import Decoder
from tandem.models.hf import check_tensors, named_tensors, read_tensors
from tandem.models.lora import AdapterWeights, read_adapter
from tandem.models.runtime import in_own_thread
from tandem.models.spec import ModelSpec


@in_own_thread
def read_checked_weights(path: Path, version: int, decoder: Decoder) -> dict[str, Tensor]:
    """The tensors of a published version that fits the model. Raises WeightUpdateRefused with the reason."""
    try:
        verify_files(path, version)
        if ModelSpec.load(path) != decoder.spec:
            raise WeightUpdateRefused(f"{path} / config.json describes another model than the one being served")
        tensors = read_tensors(path)
        check_tensors(named_tensors(decoder), tensors)
    except WeightUpdateRefused:
        raise
    except (ValueError, KeyError, OSError, SafetensorError) as error:
        raise WeightUpdateRefused(f"{path}: {error}") from error
    return tensors


@in_own_thread
def read_checked_adapter(path: Path, decoder: Decoder) -> AdapterWeights:
    """A LoRA adapter that fits the model. Raises AdapterRefused with the reason."""
    check_adapter_files(path)
    try:
        return read_adapter(path, decoder)
    except (ValueError, KeyError, OSError) as error:
        raise AdapterRefused(f"{path}: {error}") from error

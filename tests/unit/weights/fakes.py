"""What tests of weights have in place of a GPU, and how they see what an engine would serve."""

from collections.abc import Mapping

import torch

from tandem.models.decoder import Decoder
from tandem.models.hf import named_tensors
from tandem.weights.ways import Install


def copies_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_tensors(decoder).items()}


def installed(install: Install, decoder: Decoder, expected: Mapping[str, torch.Tensor]) -> None:
    """The decoder has these weights afterwards, whatever it had before."""
    for parameter in decoder.parameters():
        parameter.detach().zero_()
    install()
    found = named_tensors(decoder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


class OnGpu(torch.Tensor):
    """A tensor of this process's memory that says it lies on a GPU."""

    is_cuda = True
    device = torch.device("cuda")

    def cpu(self, *_: object) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.as_subclass(torch.Tensor)

    def numpy(self, **_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise TypeError("it is not in the memory of the machine")

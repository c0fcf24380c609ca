"""Tensors that may be divided over the ranks (DTensors), and modules that FSDP has made of others.

To import them takes a second of CPU time, which a rank by itself need not spend: where nobody has imported them, there
are none.
"""

import sys

from torch import Tensor, nn


def is_divided(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be divided."""
    return tensor.to_local() if is_divided(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def reshard(module: nn.Module) -> None:
    """Have the parts of FSDP's modules in place of what they gathered for a pass."""
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule

        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

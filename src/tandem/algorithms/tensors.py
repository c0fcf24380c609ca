"""Tensors for code that is imported without torch: their type, and what they have no method for."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

__all__ = ["Tensor", "log_sigmoid"]


def log_sigmoid(logits: Tensor) -> Tensor:
    """log σ(z)."""
    from torch.nn import functional  # where there is a tensor, torch has been imported

    return functional.logsigmoid(logits)

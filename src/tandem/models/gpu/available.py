"""Whether there are Triton kernels for a tensor. Imports Triton only where they could run."""

import functools
import importlib.util
import logging
import os

import torch
from torch import Tensor

from tandem.models.cpu.library import SWITCH

logger = logging.getLogger(__name__)


def has_kernels(x: Tensor) -> bool:
    """By its device alone. What torch.compile traces is left to it: it fuses PyTorch's operations by itself."""
    return x.is_cuda and not torch.compiler.is_compiling() and is_installed()


@functools.cache
def is_installed() -> bool:
    if os.environ.get(SWITCH) == "0":
        logger.info("%s=0: no Triton kernels, PyTorch's own operations are slower", SWITCH)
        return False
    if importlib.util.find_spec("triton") is None:
        logger.warning("Triton is not installed (pip install triton): PyTorch's own operations are slower on a GPU")
        return False
    return True

"""Kernels that are put on the GPU while the one before them still runs, and wait there for its end (programmatic
dependent launch): between two kernels the GPU then idles a microsecond less, of which a decoding step has some two
hundred.

A kernel calls `wait_for_previous` before it touches memory, and is launched with `early(device)`. It lets the next one
in only when it has itself waited: were it to do so before, kernels that can do nothing yet would pile up on the GPU.
So all kernels but the one right before have ended when a kernel starts, and what they wrote may be read before the
wait. cuBLAS takes no part: what follows it starts at its end.
"""

# pyright: reportAttributeAccessIssue=false
# It knows no Triton.

from functools import cache

import torch
import triton
import triton.language as tl

FIRST_CAPABILITY = (9, 0)  # Hopper; older cards cannot


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def early(device: torch.device) -> dict[str, bool]:
    """How to launch a kernel that has a parameter EARLY."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FIRST_CAPABILITY or torch.version.hip:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}

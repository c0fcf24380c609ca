"""Which GPUs a process of a run sees."""

import os
from collections.abc import Sequence

from tandem.utils.devices import VISIBLE, named_gpus
from tandem.utils.errors import UserError


def gpu_environment(gpu_ids: Sequence[int] | None, option: str) -> dict[str, str]:
    """What a process needs in its environment to see these GPUs alone, counted among those that we see. None: all."""
    if gpu_ids is None:
        return {}
    if len(set(gpu_ids)) < len(gpu_ids) or any(number < 0 for number in gpu_ids):
        raise UserError(f"{option} = {list(gpu_ids)} names a GPU twice, or a negative one; give each once")
    visible = named_gpus(os.environ)
    if visible is None:
        return {VISIBLE: ",".join(map(str, gpu_ids))}
    if max(gpu_ids, default=0) >= len(visible):
        raise UserError(
            f"{option} = {list(gpu_ids)}, but {VISIBLE} = {os.environ[VISIBLE]!r} shows {len(visible)} GPUs; "
            f"give numbers below {len(visible)}"
        )
    return {VISIBLE: ",".join(visible[number] for number in gpu_ids)}

"""Options of which GPUs each process of `rl` gets."""

from typing import Annotated, Any

from pydantic import BeforeValidator

from tandem.config.base import Config


def read_gpus(value: Any) -> int | list[int] | None:
    """A count (2), or numbers of GPUs ([0, 1]; on a command line 0,1 and, of one alone, 1,). Raises ValueError."""
    if value is None or value == "None":
        return None
    is_list = isinstance(value, list) or (isinstance(value, str) and ("," in value or value.startswith("[")))
    parts = value.strip("[]").split(",") if isinstance(value, str) else value if is_list else [value]
    texts = [str(part).strip() for part in parts if str(part).strip()]
    if not texts or not all(text.isdecimal() for text in texts) or (not is_list and int(texts[0]) == 0):
        raise ValueError(f"{value!r} is neither a number of GPUs, as in 2, nor a list of them, as in 0,1")
    return [int(text) for text in texts] if is_list else int(texts[0])


Gpus = Annotated[int | list[int] | None, BeforeValidator(read_gpus)]


class GpuConfig(Config):
    """GPUs of each process, where there are any."""

    inference: Gpus = None
    """GPUs for inference: how many, or which, as in [0, 1]; 0 is the first of CUDA_VISIBLE_DEVICES. The native engine
    runs one server on each, on ports from server.port on. vLLM is one server with data parallelism over them. None: 1,
    or what vLLM's flags ask for."""

    trainer: Gpus = None
    """GPUs of the trainer: how many, or which. One rank runs on each. None: parallel.ranks."""

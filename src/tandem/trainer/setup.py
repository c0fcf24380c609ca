"""Device, threads and determinism, the same for every kind of training."""

import torch

from tandem.config.shared import Device
from tandem.utils.errors import UserError


def choose_device(device: Device) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda', but no GPU is visible; the nearest valid choice is 'cpu' (or 'auto')")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def setup_torch(*, threads: int | None, seed: int, deterministic: bool) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic)

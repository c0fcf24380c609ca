"""What tests of weights have in place of a GPU."""

import torch


class OnGpu(torch.Tensor):
    """A tensor of this process's memory that says it lies on a GPU."""

    is_cuda = True
    device = torch.device("cuda")

    def cpu(self, *_: object) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.as_subclass(torch.Tensor)

    def numpy(self, **_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise TypeError("it is not in the memory of the machine")

"""The recipe itself; tests/unit/trainer/model/test_precision.py has it in a model."""

import gc
import threading

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tandem.models.recompute import keeping, recomputed, recomputing


def doubled(x: Tensor, weight: Tensor, made: list[StorageWeakRef]) -> Tensor:
    """What is multiplied is a part of a tensor, transposed. `made`: how often the whole was made, and whether it is
    still there."""

    def compute() -> list[Tensor]:
        y = 2 * x
        made.append(StorageWeakRef(y.untyped_storage()))
        return [y]

    (y,) = compute()
    with recomputed([y], compute):
        return y.T[1:] @ weight


@pytest.mark.parametrize(("way", "times"), [(recomputing, 2), (keeping, 1), (lambda forward: forward, 1)])
def test_a_view_is_made_again_where_it_is_wanted(way, times: int) -> None:
    x, weight = (torch.arange(12.0).view(shape).requires_grad_() for shape in ((3, 4), (3, 4)))
    made: list[StorageWeakRef] = []
    out = way(doubled)(x, weight, made)
    assert made[0].expired() == (way is recomputing)
    out.sum().backward()
    assert len(made) == times
    assert x.grad is not None and weight.grad is not None
    assert torch.equal(x.grad[:, 1:], 2 * weight.detach().sum(1, keepdim=True).expand(3, 3)) and not x.grad[:, 0].any()
    assert torch.equal(weight.grad, 2 * x.detach()[:, 1:].sum(1, keepdim=True).expand(3, 4))


def test_nothing_is_recomputed_without_gradients() -> None:
    made: list[StorageWeakRef] = []
    with torch.no_grad():
        recomputing(doubled)(torch.ones(3, 4), torch.ones(3, 4), made)
    assert len(made) == 1


def test_it_ends_with_the_call_and_belongs_to_its_thread() -> None:
    seen: list[bool] = []

    def fails() -> Tensor:
        other = threading.Thread(target=lambda: seen.append(is_on()))
        other.start()
        other.join()
        seen.append(is_on())
        raise RuntimeError("told")

    with pytest.raises(RuntimeError, match="told"):
        recomputing(fails)()
    assert [*seen, is_on()] == [False, True, False]


def is_on() -> bool:
    made: list[StorageWeakRef] = []
    out = doubled(torch.ones(3, 4), torch.ones(3, 4, requires_grad=True), made)
    return made[0].expired() and out.requires_grad


def test_what_an_operation_keeps_of_its_own_output_is_freed_with_it() -> None:
    def exponential(x: Tensor) -> Tensor:
        with recomputed([torch.ones(1)], list):
            return x.exp()

    gc.disable()
    try:
        out = recomputing(exponential)(torch.ones(8, requires_grad=True))
        storage = StorageWeakRef(out.untyped_storage())
        del out
        assert storage.expired()
    finally:
        gc.enable()

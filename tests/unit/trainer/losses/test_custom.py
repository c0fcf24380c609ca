"""What a loss function of a user's own may return, and what is said of anything else."""

import re

import pytest
import torch

from tandem.algorithms.losses.kind import Losses
from tandem.algorithms.metrics import mean_of
from tandem.trainer.losses.custom import CustomLossFailed, compute_custom, require_gradient
from tandem.utils.errors import UserError

TWO = torch.tensor([0.0, -1.5])


def given(returned: object) -> Losses:
    return compute_custom(lambda streams: returned, None, 2, "own:loss", "token")


def test_one_loss_for_each_token_and_metrics_are_taken_as_they_are() -> None:
    losses = Losses(TWO, {"own/mean": mean_of(TWO)})
    assert given(losses) is losses
    assert compute_custom(lambda streams: Losses(2 * streams), TWO, 2, "own:loss", "token").losses.tolist() == [
        0.0,
        -3.0,
    ]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned NoneType; return tandem.trainer.losses.Losses"),
        (TWO, "returned Tensor; return tandem.trainer.losses.Losses"),
        (Losses([0.0, 1.0]), "returned losses as list; return a tensor, one loss per token"),  # type: ignore[arg-type]
        (Losses(TWO, [mean_of(TWO)]), "returned metrics as list; return a dict of them by name"),  # type: ignore[arg-type]
        (Losses(TWO.sum()), "returned losses of shape (); return one per token: (2,)"),
        (Losses(TWO[:1]), "returned losses of shape (1,); return one per token: (2,)"),
        (Losses(torch.tensor([0.0, float("nan")])), "returned 1 of 2 losses that are not finite"),
        (Losses(TWO / 0), "returned 2 of 2 losses that are not finite"),
        (
            Losses(TWO, {"a": mean_of(TWO), "b": TWO.mean()}),  # type: ignore[dict-item]
            "returned metrics['b'] as Tensor; make it with mean_of, maximum_of or loss_part of tandem.trainer.losses",
        ),
        *(
            (Losses(TWO, {name: mean_of(TWO)}), f"returned a metric called {name!r}, which is taken; name it otherwise")
            for name in ("loss", "step", "time")
        ),
    ],
)
def test_anything_else_is_refused(returned: object, message: str) -> None:
    with pytest.raises(UserError, match=rf"^loss\.type = 'own:loss' {re.escape(message)}$"):
        given(returned)


def test_what_the_function_raises_is_told_with_its_place() -> None:
    def fails(streams: None) -> Losses:
        raise KeyError("b")

    with pytest.raises(CustomLossFailed, match=r"^loss\.type = 'own:loss' failed: KeyError: 'b' .*in fails\)\n  File "):
        compute_custom(fails, None, 2, "own:loss", "token")


def test_a_full_gpu_is_no_failure_of_the_function() -> None:
    def fills(streams: None) -> Losses:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        compute_custom(fills, None, 2, "own:loss", "token")


def test_a_loss_needs_a_gradient_where_gradients_are_taken() -> None:
    require_gradient(TWO.clone().requires_grad_(), "own:loss")
    with torch.no_grad():
        require_gradient(TWO, "own:loss")
    with pytest.raises(UserError, match=r"^loss\.type = 'own:loss' returned losses without a gradient"):
        require_gradient(TWO, "own:loss")

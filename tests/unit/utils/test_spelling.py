"""A near name is offered only where the letters say so."""

import pytest

from tandem.utils.spelling import nearest


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("prot", ["host", "port"], "port"),
        ("max_stepz", ["max_steps", "max_restarts"], "max_steps"),
        ("dpp", ["dpo", "ipo", "kto"], "dpo"),
        ("exact", ["exact_match", "numeric"], "exact_match"),
        ("max", ["max_steps", "max_restarts"], None),
        ("k4", ["k1", "k2"], None),
        ("environment", ["deployment"], None),
        ("save_interval", ["trainer"], None),
        ("save", ["seed", "show"], None),
        ("anything", [], None),
    ],
)
def test_a_slip_or_a_beginning(name: str, known: list[str], meant: str | None) -> None:
    assert nearest(name, known) == meant

"""Addresses of Ray clusters that cannot be: told at once, where Ray would try for minutes."""

from types import SimpleNamespace

import pytest
from tests.ports import free_port

from tandem.launch.ray import cluster
from tandem.utils.errors import UserError


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("10.0.0.1", "is neither 'auto' nor HOST:PORT"),
        ("local", "is neither 'auto' nor HOST:PORT"),
        ("127.0.0.1:FREE", r"no Ray cluster answers there \(.*refused"),
        ("127.0.0.1:99999", "no Ray cluster answers there"),
    ],
)
def test_an_address_where_nothing_is_is_refused(address: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "import_ray", lambda: SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(UserError, match=message):
        cluster.connect(address.replace("FREE", str(free_port())))

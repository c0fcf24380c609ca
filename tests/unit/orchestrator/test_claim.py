"""What a run tells its servers of itself."""

import os
import socket
from pathlib import Path

import pytest

from tandem.orchestrator.claim import RunClaim
from tandem.types.openai import ClaimRequest


def claim_of(root: Path) -> RunClaim:
    return RunClaim.of(root, root / "key.txt")


def test_every_start_has_a_name_of_its_own_and_all_have_one_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = claim_of(Path())
    assert list(tmp_path.iterdir()) == []  # who only looks writes nothing
    first.keep(tmp_path / "key.txt")
    assert (tmp_path / "key.txt").stat().st_mode & 0o777 == 0o600, "it is the user's alone"
    second = claim_of(tmp_path)
    assert first.lease == second.lease and first.name != second.name
    assert first.place == f"{tmp_path} on {socket.gethostname()}"
    assert claim_of(tmp_path / "other").lease != first.lease


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b"short", b"x" * 500])
def test_a_key_that_is_damaged_is_replaced(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "key.txt").write_bytes(damage)
    assert claim_of(tmp_path).lease.isalnum() and len(claim_of(tmp_path).lease) == 32


@pytest.mark.parametrize("name", [b"caf\xe9", "界".encode(), b"x" * 200, b"a\nb"])
def test_servers_take_claims_from_any_directory(tmp_path: Path, name: bytes) -> None:
    deep = tmp_path
    for _ in range(8):
        deep /= os.fsdecode(name)
    ClaimRequest.model_validate(claim_of(deep).body)
    ClaimRequest.model_validate_json(ClaimRequest.model_validate(claim_of(deep).body).model_dump_json())

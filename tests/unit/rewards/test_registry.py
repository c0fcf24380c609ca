"""What a table of options becomes, and where it is called."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from tandem.rewards import registry
from tandem.rewards.code import CodeReward
from tandem.rewards.config import AnyReward
from tandem.rewards.registry import is_slow, make_call
from tandem.utils.errors import UserError

BRING = str(Path(__file__).with_name("bring.py"))


def parse(**table: Any) -> Any:
    return TypeAdapter(AnyReward).validate_python(table)


@pytest.mark.parametrize(
    ("table", "slow"),
    [
        ({"type": "exact_match"}, False),
        ({"type": "exact_match", "extract": ".*"}, True),
        ({"type": "length", "most": 3}, False),
        ({"type": "xml", "tags": ["a"]}, False),
        *(({"type": name}, True) for name in ("math", "lcs")),
        ({"type": "regex", "pattern": "a"}, True),
        ({"type": "json_schema", "json_schema": {}}, True),
        ({"type": "remote", "base_url": "http://x"}, False),
        ({"type": f"{BRING}:brief"}, True),
        ({"type": f"{BRING}:Scorer"}, True),
        ({"type": f"{BRING}:AsyncScorer"}, False),
        *(({"type": f"{BRING}:{name}"}, False) for name in ("waits", "called")),
    ],
)
def test_what_searches_and_what_users_bring_is_called_in_another_process_unless_it_is_async(
    table: dict[str, Any], slow: bool
) -> None:
    config = parse(**table)
    assert is_slow(config, make_call(config, make=False)) == slow


def test_code_has_the_options_of_its_table_and_no_sandbox_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(type="code", partial=True, timeout_s=7, memory_mb=100)
    monkeypatch.setattr(registry, "why_unprotected", lambda: None)
    made = make_call(config).function
    assert isinstance(made, CodeReward)
    assert (made.partial, made.timeout_s, made.memory_mb, made.allow_unprotected) == (True, 7.0, 100, False)
    monkeypatch.setattr(registry, "why_unprotected", lambda: "there are no namespaces")
    with pytest.raises(UserError, match="'code' cannot run programs safely: there are no namespaces"):
        make_call(config)
    made = make_call(parse(type="code", allow_unprotected=True)).function
    assert isinstance(made, CodeReward) and made.allow_unprotected

"""The ledger of tokens and versions."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.serving.vllm.versions import UncountedTokens, VersionLedger, listen, place_of

ID = "tandem" + "0123456789abcdef" * 2
OTHER = "tandem" + "f" * 32


@dataclass
class Output:
    request_id: str
    new_token_ids: list[int] = field(default_factory=lambda: [1])


@pytest.mark.parametrize(
    ("engine_id", "place"),
    [
        (f"cmpl-{ID}-0-1a2b3c4d", (ID, (0, 0))),
        (f"cmpl-{ID}-12-1a2b3c4d", (ID, (12, 0))),
        (f"3_cmpl-{ID}-2-1a2b3c4d", (ID, (2, 3))),
        (f"chatcmpl-{ID}-1a2b3c4d", (ID, (0, 0))),
        (f"1_chatcmpl-{ID}-1a2b3c4d", (ID, (0, 1))),
        (f"cmpl-the-client's own-{ID}-0-1a2b3c4d", (ID, (0, 0))),
        ("cmpl-somebody-0-1a2b3c4d", None),
        ("", None),
    ],
)
def test_vllms_request_ids_lead_back_to_ours(engine_id: str, place: object) -> None:
    assert place_of(engine_id) == place


def test_tokens_belong_to_the_version_that_was_loaded_when_they_came() -> None:
    ledger = VersionLedger()
    ledger.mark(3)
    tracked = ledger.open(ID)
    one, two = f"0_cmpl-{ID}-0-aaaaaaaa", f"1_cmpl-{ID}-0-aaaaaaaa"
    ledger.count([Output(one), Output(two), Output(one, [1, 2]), Output(f"cmpl-{OTHER}-0-aaaaaaaa"), Output("x")])
    ledger.mark(4)
    ledger.mark(5)  # nothing came in between
    ledger.count([Output(two), Output(two, [])])
    ledger.count([Output(f"7_cmpl-{ID}-0-aaaaaaaa", [1, 2])])
    assert tracked.versions((0, 0), 3) == [3, 3, 3]
    assert tracked.versions((0, 1), 2) == [3, 5]
    assert tracked.versions((0, 1), 1, first=1) == [5]
    assert tracked.versions((0, 7), 2) == [5, 5], "a sample without tokens before the update"
    with pytest.raises(UncountedTokens, match=r"3 tokens of \(0, 1\) answered, 2 counted"):
        tracked.versions((0, 1), 2, first=1)
    ledger.close(ID)
    ledger.count([Output(one)])  # late, of a client that went away
    assert ledger._places == {} and ledger._tracked == {}


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 2), st.integers(1, 3))), max_size=40))
def test_any_order_of_tokens_and_updates(events: list[tuple[int, int] | None]) -> None:
    """None is an update; (sample, n) are n tokens of a sample. The truth is written down token by token."""
    ledger = VersionLedger()
    tracked = ledger.open(ID)
    truth: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in events:
        if event is None:
            ledger.mark(ledger.version + 1)
        else:
            sample, num_tokens = event
            ledger.count([Output(f"{sample}_cmpl-{ID}-0-aaaaaaaa", [9] * num_tokens)])
            truth[sample] += [ledger.version] * num_tokens
    for sample, versions in truth.items():
        assert tracked.versions((0, sample), len(versions)) == versions


def test_an_adapter_has_versions_of_its_own() -> None:
    ledger = VersionLedger()
    ledger.mark(3)
    ledger.mark_adapter("policy", 7)
    ledger.mark_adapter("follows", None)
    base, policy, follows = "a" * 32, "b" * 32, "c" * 32
    tracked = {
        name: ledger.open(f"tandem{name}", model)
        for name, model in ((base, "the-model"), (policy, "policy"), (follows, "follows"))
    }

    def count_all() -> None:
        ledger.count([Output(f"cmpl-tandem{name}-0-aaaaaaaa") for name in tracked])

    count_all()
    ledger.mark_adapter("policy", 8)
    count_all()
    ledger.mark(4)  # whole weights below the adapters
    count_all()
    assert tracked[base].versions((0, 0), 3) == [3, 3, 4]
    assert tracked[policy].versions((0, 0), 3) == [7, 8, 8]
    assert tracked[follows].versions((0, 0), 3) == [3, 3, 4]


def test_listening_counts_before_anybody_takes_an_item_out() -> None:
    @dataclass
    class Outputs:
        outputs: list[Output]

    queue: asyncio.Queue[object] = asyncio.Queue()
    seen: list[str] = []
    listen(queue, lambda outputs: seen.extend(output.request_id for output in outputs))
    queue.put_nowait(Outputs([Output("a"), Output("b")]))
    queue.put_nowait(RuntimeError("the engine died"))
    assert seen == ["a", "b"] and queue.qsize() == 2

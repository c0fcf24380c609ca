"""Sampling against numbers worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.sampler import SamplingRows, invert_cdf, sample, splitmix64, splitmix64_of_one, uniforms
from tandem.models import exact
from tandem.models.cpu import kernels

# exp of these are 1, 2, 4, 1: probabilities 1/8, 2/8, 4/8, 1/8.
LOGITS = [math.log(1), math.log(2), math.log(4), math.log(1)]


def rows(
    count: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    num_top: int = 0,
    *,
    raw: bool = False,
    kept: bool = False,
) -> SamplingRows:
    """Rows that differ in their position only, so that each draws another number."""
    return SamplingRows(
        temperature=np.full(count, temperature, np.float32),
        top_p=np.full(count, top_p, np.float32),
        top_k=np.full(count, top_k, np.int64),
        min_p=np.full(count, min_p, np.float32),
        raw_logprobs=np.full(count, raw),
        num_top=np.full(count, num_top, np.int64),
        wants_kept=np.full(count, kept),
        seed=np.full(count, 11, np.uint64),
        sample_index=np.zeros(count, np.uint64),
        position=np.arange(count),
    )


def draw(logits: list[float], settings: SamplingRows) -> tuple[np.ndarray, np.ndarray]:
    drawn = sample(torch.tensor([logits] * len(settings.position)), settings)
    return drawn.tokens, drawn.logprobs


def frequencies(tokens: np.ndarray, vocab_size: int = 4) -> list[float]:
    return (np.bincount(tokens, minlength=vocab_size) / len(tokens)).tolist()


@pytest.mark.parametrize(
    ("options", "is_plain"),
    [
        ({}, True),
        ({"temperature": 0.5}, True),
        ({"top_k": 1}, False),
        ({"top_p": 0.999}, False),
        ({"min_p": 0.001}, False),
        ({"raw": True}, False),
        ({"num_top": 1}, False),
    ],
)
def test_rows_are_plain_if_none_asks_for_anything_but_a_temperature(options, is_plain: bool) -> None:
    asked, plain = rows(1, **options), rows(1)
    fields = {name: np.concatenate([getattr(plain, name), getattr(asked, name)]) for name in vars(plain)}
    assert plain.are_plain and SamplingRows(**fields).are_plain == is_plain


def test_rows_that_are_plain_are_drawn_by_the_kernels_and_others_by_torch_with_the_same_numbers() -> None:
    logits = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0)) * 3
    plain = rows(300, temperature=0.7)
    plain.seed[:], plain.sample_index[:] = np.arange(300), np.arange(300)[::-1]
    u = uniforms(plain.seed, plain.sample_index, plain.position)
    distribution = (logits / 0.7).log_softmax(1)
    expected = invert_cdf(distribution, u)
    by_torch = sample(logits, plain, logits)
    assert by_torch.tokens.tolist() == expected[:, 0].tolist()
    assert by_torch.logprobs.tolist() == distribution.gather(1, expected)[:, 0].tolist()
    assert (by_torch.tokens.dtype, by_torch.logprobs.dtype) == (np.int64, np.float32)
    assert by_torch.top_tokens.shape == by_torch.top_logprobs.shape == (0, 0)
    if (fast := kernels.find(logits)) is not None:
        drawn = sample(logits, plain)
        tokens, logprobs = fast.draw(logits, torch.from_numpy(plain.temperature), torch.from_numpy(u))
        assert drawn.tokens.tolist() == tokens.tolist()
        assert drawn.logprobs.tolist() == logprobs.tolist() != by_torch.logprobs.tolist()
        assert (drawn.tokens.dtype, drawn.logprobs.dtype) == (np.int64, np.float32)


@pytest.mark.skipif(kernels.find(torch.empty(0)) is None, reason="exact mode needs compiled kernels")
@pytest.mark.parametrize("raw", [False, True])
def test_exact_log_probs_are_those_of_exact_mode(raw: bool) -> None:
    logits = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0)) * 3
    settings = rows(300, temperature=0.7, top_k=5, raw=raw, kept=True)
    settings.wants_kept[0] = False
    usual, batch_invariant = sample(logits, settings), sample(logits, settings, batch_invariant=True)
    assert (batch_invariant.tokens == usual.tokens).all()
    assert batch_invariant.logprobs == pytest.approx(usual.logprobs, abs=1e-5)
    temperature, tokens = torch.full((300,), 1.0 if raw else 0.7), torch.from_numpy(usual.tokens)
    expected = exact.token_logprobs(logits, tokens, temperature)
    assert batch_invariant.logprobs.tolist() == expected.tolist() != usual.logprobs.tolist()
    left = torch.full_like(logits, -torch.inf).scatter_(1, (top := logits.topk(5)).indices, top.values)
    expected = exact.token_logprobs(left, tokens, torch.full((300,), 0.7)).tolist()
    assert [kept and kept.logprob for kept in batch_invariant.kept] == [None, *expected[1:]]
    assert [kept and kept.logprob for kept in usual.kept] != [None, *expected[1:]]


def test_each_row_has_options_of_its_own() -> None:
    """Greedy, at temperature 2, at temperature 1/2 with raw log-probs, and with log-probs of two alternatives."""
    logits = torch.tensor([LOGITS, LOGITS[1:] + LOGITS[:1], LOGITS, LOGITS] * 50)
    settings = rows(200)
    settings.temperature[0::4], settings.temperature[1::4], settings.temperature[2::4] = 0, 2, 0.5
    settings.raw_logprobs[2::4] = True
    settings.num_top[3::4] = 2
    settings.num_top[2::4] = 1
    drawn = sample(logits, settings)
    assert set(drawn.tokens[0::4].tolist()) == {2}
    assert drawn.logprobs[0::4] == pytest.approx(math.log(0.5))
    roots = np.sqrt([2, 4, 1, 1])
    assert set(drawn.tokens[1::4].tolist()) == {0, 1, 2, 3}
    assert drawn.logprobs[1::4] == pytest.approx(np.log(roots / roots.sum())[drawn.tokens[1::4]], abs=1e-6)
    usual = np.log([0.125, 0.25, 0.5, 0.125])
    for at in (2, 3):
        assert drawn.logprobs[at::4] == pytest.approx(usual[drawn.tokens[at::4]], abs=1e-6)
    assert drawn.top_tokens[3::4].tolist() == [[2, 1]] * 50
    assert (drawn.top_tokens.dtype, drawn.top_logprobs.dtype) == (np.int64, np.float32)
    all_greedy = rows(2, temperature=0, num_top=1)
    assert sample(logits[:2], all_greedy).tokens.tolist() == [2, 1]


def test_log_probs_at_one_temperature_above_one() -> None:
    tokens, logprobs = draw(LOGITS, rows(20, temperature=2, top_p=0.999))
    roots = np.sqrt([1, 2, 4, 1])
    assert logprobs == pytest.approx(np.log(roots / roots.sum())[tokens], abs=1e-6)


def test_half_precision_is_widened_first() -> None:
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    settings = rows(50, top_k=9, num_top=3, kept=True)
    half, whole = sample(logits, settings), sample(logits.float(), settings)
    assert half.logprobs.tolist() == whole.logprobs.tolist()
    assert [kept and kept.logprob for kept in half.kept] == [kept and kept.logprob for kept in whole.kept]


def test_greedy_takes_the_likeliest_with_its_logprob_at_temperature_one() -> None:
    tokens, logprobs = draw(LOGITS, rows(3, temperature=0.0))
    assert tokens.tolist() == [2, 2, 2]
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 3)


def test_frequencies_and_logprobs_follow_the_distribution() -> None:
    tokens, logprobs = draw(LOGITS, rows(20_000))
    assert frequencies(tokens) == pytest.approx([0.125, 0.25, 0.5, 0.125], abs=0.015)
    expected = np.log([0.125, 0.25, 0.5, 0.125])
    assert logprobs == pytest.approx(expected[tokens], abs=1e-6)


def test_temperature_sharpens_draws_and_logprobs() -> None:
    # At temperature 1/2 the weights 1, 2, 4, 1 are squared: 1, 4, 16, 1 of 22.
    tokens, logprobs = draw(LOGITS, rows(20_000, temperature=0.5))
    assert frequencies(tokens) == pytest.approx([1 / 22, 4 / 22, 16 / 22, 1 / 22], abs=0.015)
    assert logprobs == pytest.approx(np.log([1 / 22, 4 / 22, 16 / 22, 1 / 22])[tokens], abs=1e-6)


def test_top_k_keeps_the_k_likeliest_and_leaves_logprobs_alone() -> None:
    tokens, logprobs = draw(LOGITS, rows(20_000, top_k=2))
    assert frequencies(tokens) == pytest.approx([0, 1 / 3, 2 / 3, 0], abs=0.015)
    assert logprobs == pytest.approx(np.log([0.125, 0.25, 0.5, 0.125])[tokens], abs=1e-6)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    # 0.5 alone is below 0.6; with the next 0.25 it is reached.
    tokens, _ = draw(LOGITS, rows(20_000, top_p=0.6))
    assert frequencies(tokens) == pytest.approx([0, 1 / 3, 2 / 3, 0], abs=0.015)
    tokens, _ = draw(LOGITS, rows(100, top_p=0.5))
    assert set(tokens.tolist()) == {2}
    for least in (1e-9, 0.0):
        tokens, _ = draw(LOGITS, rows(100, top_p=least))
        assert set(tokens.tolist()) == {2}


def test_top_p_counts_among_what_top_k_left() -> None:
    # Of the two likeliest, 2/3 and 1/3 remain; 0.6 is reached by the first alone.
    tokens, _ = draw(LOGITS, rows(100, top_p=0.6, top_k=2))
    assert set(tokens.tolist()) == {2}


def test_only_rows_that_ask_are_truncated() -> None:
    settings = rows(4000)
    settings.top_k[::2] = 1
    tokens, _ = draw(LOGITS, settings)
    assert set(tokens[::2].tolist()) == {2}
    assert frequencies(tokens[1::2]) == pytest.approx([0.125, 0.25, 0.5, 0.125], abs=0.04)


def test_a_draw_does_not_depend_on_its_place_in_the_batch() -> None:
    settings = rows(50)
    together, _ = draw(LOGITS, settings)
    for at in (0, 17, 49):
        fields = {name: getattr(settings, name)[at : at + 1] for name in SamplingRows.__dataclass_fields__}
        alone, _ = draw(LOGITS, SamplingRows(**fields))
        assert alone[0] == together[at]


def test_seed_sample_and_position_each_change_the_draw() -> None:
    def u(seed: int, index: int, position: int) -> float:
        return uniforms(np.array([seed], np.uint64), np.array([index], np.uint64), np.array([position]))[0]

    assert len({u(1, 0, 0), u(2, 0, 0), u(1, 1, 0), u(1, 0, 1), u(2**64 - 1, 0, 0)}) == 5
    state = splitmix64_of_one(splitmix64_of_one(splitmix64_of_one(1) ^ 2) ^ 3)
    assert u(1, 2, 3) == (state >> 40) / 2**24


def test_splitmix64_gives_the_published_sequence() -> None:
    # First outputs for seed 1234567, from the reference implementation.
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = np.uint64(1234567) + np.arange(2, dtype=np.uint64) * golden
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973]
    assert [splitmix64_of_one(state) for state in states.tolist()] == splitmix64(states).tolist()


@given(u=st.floats(0, 1, width=32, exclude_max=True), zeros=st.integers(1, 5), scale=st.floats(1e-3, 50))
def test_a_token_of_probability_zero_is_never_drawn(u: float, zeros: int, scale: float) -> None:
    pattern = [-math.inf] * zeros + [scale, -math.inf, 0.0] + [-math.inf] * zeros
    logprobs = torch.tensor([pattern]).log_softmax(-1)
    assert invert_cdf(logprobs, np.array([u], np.float32)).item() in {zeros, zeros + 2}


def test_the_largest_uniform_number_draws_the_last_token_that_can_be_drawn() -> None:
    """Whatever the probabilities add up to after rounding: a little less than 1, or more."""
    logits = torch.randn(2000, 50, generator=torch.Generator().manual_seed(0))
    logits[:, 40:] = -math.inf
    logprobs = logits.log_softmax(-1)
    totals = logprobs.exp().cumsum(-1)[:, -1]
    assert (totals < 1).any() and (totals > 1).any()
    assert (invert_cdf(logprobs, np.full(2000, 1 - 2**-24, np.float32)) == 39).all()


def test_the_cumulative_distribution_is_inverted_from_below() -> None:
    # Cumulative 1/8, 3/8, 7/8, 1: a border belongs to the token above it.
    logprobs = torch.tensor([LOGITS] * 6).log_softmax(-1)
    u = np.array([0.0, 0.12, 0.126, 0.374, 0.376, 0.9999999], np.float32)
    assert invert_cdf(logprobs, u)[:, 0].tolist() == [0, 0, 1, 1, 2, 3]


def test_rows_that_are_no_numbers_have_no_logprob() -> None:
    logits = torch.tensor([LOGITS, [math.nan] * 4])
    drawn = sample(logits, rows(2))
    tokens, logprobs = drawn.tokens, drawn.logprobs
    assert np.isfinite(logprobs).tolist() == [True, False]
    assert (tokens < 4).all()


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    # Probabilities 1/8, 2/8, 4/8, 1/8: at least 0.4 of 4/8 have the second and third.
    tokens, _ = draw(LOGITS, rows(20_000, min_p=0.4))
    assert frequencies(tokens) == pytest.approx([0, 1 / 3, 2 / 3, 0], abs=0.015)


def test_raw_logprobs_are_those_of_temperature_one() -> None:
    tokens, logprobs = draw(LOGITS, rows(100, temperature=0.5, raw=True))
    assert logprobs == pytest.approx(np.log([0.125, 0.25, 0.5, 0.125])[tokens], abs=1e-6)


def test_top_logprobs_come_in_order_and_belong_to_the_reported_distribution() -> None:
    drawn = sample(torch.tensor([LOGITS] * 2), rows(2, temperature=0.5, num_top=2, top_k=1))
    assert drawn.top_tokens.tolist() == [[2, 1]] * 2
    assert drawn.top_logprobs == pytest.approx(np.log([[16 / 22, 4 / 22]] * 2), abs=1e-6)
    assert sorted(sample(torch.tensor([LOGITS]), rows(1, num_top=9)).top_tokens[0].tolist()) == [0, 1, 2, 3]


def test_adjusted_logits_decide_the_draw_and_leave_the_logprob() -> None:
    adjusted = torch.tensor([[0.0, -torch.inf, -torch.inf, -torch.inf]] * 50)
    for temperature in (0.0, 1.0):
        drawn = sample(torch.tensor([LOGITS] * 50), rows(50, temperature), adjusted)
        assert set(drawn.tokens.tolist()) == {0}
        assert drawn.logprobs == pytest.approx(np.log(0.125), abs=1e-6)


def test_top_logprobs_are_those_of_the_model_whatever_the_logits_were_adjusted_to() -> None:
    adjusted = torch.tensor([[0.0, -torch.inf, -torch.inf, -torch.inf]])
    drawn = sample(torch.tensor([LOGITS]), rows(1, num_top=2), adjusted)
    assert drawn.top_tokens.tolist() == [[2, 1]]
    assert drawn.top_logprobs == pytest.approx(np.log([[0.5, 0.25]]), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 2}, {1: 2 / 6, 2: 4 / 6}),
        ({"top_p": 0.6}, {1: 2 / 6, 2: 4 / 6}),
        ({"min_p": 0.5}, {1: 2 / 6, 2: 4 / 6}),
        ({"top_p": 0.4}, {2: 1.0}),
        ({"top_k": 3}, {0: 1 / 7, 1: 2 / 7, 2: 4 / 7}),  # of equal ones the first
        ({"top_k": 2, "temperature": 0.5}, {1: 4 / 20, 2: 16 / 20}),
    ],
)
def test_the_kept_tokens_are_reported_with_the_log_prob_among_them(options, expected: dict[int, float]) -> None:
    drawn = sample(torch.tensor([LOGITS] * 40), rows(40, **options, kept=True))
    assert set(drawn.tokens.tolist()) == expected.keys()
    for token, kept in zip(drawn.tokens.tolist(), drawn.kept, strict=True):
        assert kept is not None and kept.token_ids.tolist() == list(expected)
        assert isinstance(kept.token_ids, np.ndarray)
        assert isinstance(kept.logprob, float) and math.exp(kept.logprob) == pytest.approx(expected[token])


def test_of_many_that_are_equally_likely_the_first_are_kept() -> None:
    (kept,) = sample(torch.zeros(1, 100), rows(1, top_k=3, kept=True)).kept
    assert kept is not None and kept.token_ids.tolist() == [0, 1, 2]


def test_a_top_p_of_one_cuts_nothing_though_the_likeliest_rounds_to_all() -> None:
    (kept,) = sample(torch.tensor([[0.0, 40.0, 0.0, 0.0]]), rows(1, top_k=3, kept=True)).kept
    assert kept is not None and kept.token_ids.tolist() == [0, 1, 2]


def test_kept_tokens_are_reported_to_rows_that_ask() -> None:
    settings = rows(4, top_k=2, kept=True)
    settings.wants_kept[[0, 2]] = False
    drawn = sample(torch.tensor([LOGITS] * 4), settings)
    assert [kept is not None for kept in drawn.kept] == [False, True, False, True]
    for num_top in (0, 2):
        drawn = sample(torch.tensor([LOGITS] * 4), replace(settings, num_top=np.full(4, num_top)))
        assert drawn.of(np.ones(4, np.bool_)) is drawn
        of_two = drawn.of(np.array([False, True, True, False]))
        assert [kept is not None for kept in of_two.kept] == [True, False]
        assert of_two.tokens.tolist() == drawn.tokens[1:3].tolist()
        assert of_two.logprobs.tolist() == drawn.logprobs[1:3].tolist()
        assert of_two.top_tokens.tolist() == drawn.top_tokens[1:3].tolist()
        assert of_two.top_logprobs.tolist() == drawn.top_logprobs[1:3].tolist()
    assert not sample(torch.tensor([LOGITS] * 4), rows(4, top_k=2)).kept


def test_with_adjusted_logits_the_log_prob_among_the_kept_tokens_is_that_of_the_model() -> None:
    adjusted = torch.tensor([[9.0, 9.0, -9.0, -9.0]])
    (kept,) = sample(torch.tensor([LOGITS]), rows(1, top_k=2, kept=True), adjusted).kept
    assert kept is not None and kept.token_ids.tolist() == [0, 1]
    assert math.exp(kept.logprob) in (pytest.approx(1 / 3), pytest.approx(2 / 3))

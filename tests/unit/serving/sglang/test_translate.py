"""Requests in SGLang's words and answers in ours; the answers are ones SGLang 0.5.23 gave."""

from pathlib import Path
from typing import Any

import pytest

from tandem.config.sglang import SGLangConfig
from tandem.engine.protocol import (
    EngineError,
    GeneratedSample,
    GenerationRequest,
    PromptLogprob,
    Sampling,
    UnusableWeights,
)
from tandem.serving.sglang.probe import version_numbers
from tandem.serving.sglang.translate import (
    Abilities,
    Adapter,
    Sample,
    check_request,
    ending,
    prompt_logprobs,
    sample_seed,
    token_versions,
)
from tandem.serving.updates import EngineLost

ANSWER: dict[str, Any] = {
    "finish_reason": {"type": "length", "length": 3},
    "prompt_tokens": 4,
    "weight_version": "default",
    "input_token_logprobs": [[None, 5, None], [-4.5, 6, None], [-4.75, 7, None], [-4.25, 8, None]],
    "output_token_logprobs": [[-4.25, 34, None], [-4.5, 52, None], [-5.0, 90, None]],
    "output_token_logprobs_length": 3,
    "input_top_logprobs": [
        None,
        [[-4.0, 5, None], [-4.125, 85, None]],
        [[-4.0, 3, None], [-4.75, 7, None]],
        [[-4.25, 8, None], [-4.5, 74, None]],
    ],
    "output_top_logprobs": [
        [[-3.5, 3, None], [-3.75, 16, None]],
        [[-3.25, 34, None], [-3.5, 11, None]],
        [[-3.0, 52, None], [-4.0, 11, None]],
    ],
    "completion_tokens": 3,
    "cached_tokens": 0,
    "weight_versions": [{"version": "default", "start": 0, "end": 3}],
}


def request(**options: Any) -> GenerationRequest:
    wrapping = {
        name: options.pop(name)
        for name in ("raw_logprobs", "top_logprobs", "prompt_logprobs", "adapter")
        if name in options
    }
    given: dict[str, Any] = {"max_tokens": 8} | options
    return GenerationRequest([1, 2, 3], Sampling(**given), **wrapping)


def test_a_body_says_every_sampling_field() -> None:
    asked = GenerationRequest(
        [5, 6, 7],
        Sampling(
            max_tokens=20, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, presence_penalty=0.5,
            frequency_penalty=-0.5, logit_bias=((9, -3.0),), stop_token_ids=(11, 12), stop=("\n\n",),
        ),
        n=2,
        top_logprobs=4,
    )  # fmt: skip
    assert Sample(asked, 1, rid="r1").body(stream=False) == {
        "rid": "r1",
        "input_ids": [5, 6, 7],
        "sampling_params": {
            "n": 1,
            "max_new_tokens": 20,
            "min_new_tokens": 0,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "logit_bias": {"9": -3.0},
            "stop": ["\n\n"],
            "stop_token_ids": [11, 12],
            "ignore_eos": False,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "top_logprobs_num": 4,
        "lora_path": None,
        "stream": False,
    }


def test_no_limit_to_the_likeliest_tokens_is_minus_one_at_sglang() -> None:
    params = Sample(request()).body(stream=True)["sampling_params"]
    assert (params["top_k"], params["stop"], params["stop_token_ids"], params["logit_bias"]) == (-1, None, None, None)


def test_samples_of_one_request_are_drawn_with_seeds_of_their_own() -> None:
    asked = GenerationRequest([1], Sampling(4, seed=7), n=2, first_index=6)
    bodies = [Sample(asked, index, seed=7).body(stream=False) for index in (0, 1)]
    seeds = [body["sampling_params"]["sampling_seed"] for body in bodies]
    assert seeds == [sample_seed(7, 6), sample_seed(7, 7)]
    assert len({sample_seed(seed, index) for seed in range(50) for index in range(50)}) == 2500
    assert all(0 <= sample_seed(seed, 0) < 2**63 for seed in range(100))


def test_only_the_first_sample_asks_for_the_prompts_logprobs() -> None:
    asked = request(prompt_logprobs=0)
    adapter = Adapter("a-1", Path("a"), None)
    first, second = (Sample(asked, index, adapter=adapter).body(stream=False) for index in (0, 1))
    assert (first["logprob_start_len"], first["top_logprobs_num"], first["lora_path"]) == (0, 1, "a-1")
    assert "logprob_start_len" not in second and second["top_logprobs_num"] == 0


@pytest.mark.parametrize(
    ("options", "abilities", "named"),
    [
        ({"repetition_penalty": 1.1}, {}, "repetition_penalty"),
        ({"presence_penalty": 0.5}, {}, "allow_adjusted_logprobs"),
        ({"frequency_penalty": 0.5}, {}, "allow_adjusted_logprobs"),
        ({"logit_bias": ((1, 2.0),)}, {}, "allow_adjusted_logprobs"),
        ({"min_tokens": 2}, {}, "allow_adjusted_logprobs"),
        ({"ignore_eos": True, "stop_token_ids": (4,)}, {}, "ignore_eos"),
        ({"stop": ("x",), "min_tokens": 1}, {}, "min_tokens"),
        ({"stop": ("x",) * 33}, {}, "33 strings"),
        ({"stop": ("x",)}, {"has_tokenizer": False}, "--skip-tokenizer-init"),
        ({"temperature": 1e-7}, {}, "temperature"),
        ({"seed": 1}, {}, "--enable-deterministic-inference"),
        ({"min_p": 0.1}, {"deterministic": True}, "min_p"),
        ({"temperature": 0.7, "raw_logprobs": True}, {}, "SGLANG_RETURN_ORIGINAL_LOGPROB=1"),
        ({"temperature": 0.7}, {"logprobs_at_temperature": False}, "SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ({"temperature": 0.7, "top_k": 1}, {}, "top_k = 1"),
    ],
)  # fmt: skip
def test_what_sglang_would_do_otherwise_is_refused(options: Any, abilities: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_request(request(**options), Abilities(**abilities), SGLangConfig())


@pytest.mark.parametrize(
    ("options", "abilities", "limits"),
    [
        ({"temperature": 0.7}, {}, {}),
        ({"temperature": 0.7, "raw_logprobs": True}, {"logprobs_at_temperature": False}, {}),
        ({"temperature": 1.0, "raw_logprobs": True}, {}, {}),
        ({"temperature": 0.0, "seed": 1, "raw_logprobs": True}, {}, {}),
        ({"temperature": 0.7, "top_k": 1, "raw_logprobs": True}, {}, {}),
        ({"seed": 1}, {"deterministic": True}, {}),
        ({"seed": 1}, {}, {"allow_unseeded": True}),
        ({"min_tokens": 2, "logit_bias": ((1, 2.0),), "presence_penalty": -2.0}, {}, {"allow_adjusted_logprobs": True}),
    ],
)  # fmt: skip
def test_what_sglang_does_as_asked_is_taken(options: Any, abilities: Any, limits: Any) -> None:
    check_request(request(**options), Abilities(**abilities), SGLangConfig(**limits))


def test_raw_logprobs_of_the_likeliest_token_are_asked_for_at_temperature_zero() -> None:
    asked = request(temperature=0.7, top_k=1, raw_logprobs=True)
    assert Sample(asked).body(stream=False)["sampling_params"]["temperature"] == 0.0


def test_tokens_and_alternatives_of_a_whole_answer() -> None:
    sample = Sample(request(top_logprobs=1))
    assert sample.add(ANSWER) == 0
    assert sample.part(0, [4, 4, 5], ("length", None)) == GeneratedSample(
        [34, 52, 90], [-4.25, -4.5, -5.0], [4, 4, 5], "length", None, [[(3, -3.5)], [(34, -3.25)], [(52, -3.0)]]
    )


def test_the_new_tokens_of_a_stream_come_last_whether_it_repeats_the_others_or_not() -> None:
    names = ("output_token_logprobs", "output_top_logprobs")
    first = ANSWER | {name: ANSWER[name][:2] for name in names} | {"output_token_logprobs_length": 2}
    newest = ANSWER | {name: ANSWER[name][2:] for name in names}
    for second in (ANSWER, newest):
        sample = Sample(request(top_logprobs=2))
        assert (sample.add(first), sample.add(second), sample.add(second)) == (0, 2, 3)
        expected = GeneratedSample([90], [-5.0], [7], None, None, [[(52, -3.0), (11, -4.0)]])
        assert sample.part(2, [6, 6, 7]) == expected
        assert sample.part(3, [6, 6, 7]) == GeneratedSample([], [], [], None, None, [])


def test_tokens_of_an_adapter_carry_its_version() -> None:
    sample = Sample(request(), adapter=Adapter("a-1", Path("a"), 9))
    sample.add(ANSWER)
    assert sample.part(1, [4, 4, 5]).versions == [9, 9]


def test_an_answer_with_too_few_logprobs_is_an_error() -> None:
    with pytest.raises(EngineError, match="3 log-probs where 4 of 4"):
        Sample(request()).add(ANSWER | {"output_token_logprobs_length": 4})


def test_logprobs_that_are_no_numbers_mean_unusable_weights() -> None:
    with pytest.raises(UnusableWeights):
        Sample(request()).add(ANSWER | {"output_token_logprobs": [[None, 1, None]] * 3})


def test_prompt_logprobs_begin_at_the_second_token_and_rank_what_sglang_lists() -> None:
    assert prompt_logprobs(ANSWER, 1) == [
        PromptLogprob(6, -4.5, None, [(5, -4.0)]),
        PromptLogprob(7, -4.75, 2, [(3, -4.0)]),
        PromptLogprob(8, -4.25, 1, [(8, -4.25)]),
    ]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ({"type": "length", "length": 8}, ("length", None)),
        ({"type": "stop", "matched": 2}, ("stop", None)),
        ({"type": "stop", "matched": 7}, ("stop", 7)),
        ({"type": "stop", "matched": 9}, ("stop", None)),  # an EOS that only SGLang knows
        ({"type": "stop", "matched": "\n"}, ("stop", "\n")),
        ({"type": "abort", "message": "Abort", "status_code": None, "err_type": None}, ("abort", None)),
    ],
)
def test_endings(reason: Any, expected: Any) -> None:
    assert ending(reason, Sampling(8, stop_token_ids=(2, 7), stop=("\n",)), {2}) == expected


def test_an_end_that_nobody_asked_for_is_an_error() -> None:
    with pytest.raises(EngineError, match="out of memory"):
        ending({"type": "abort", "message": "out of memory", "status_code": 500}, Sampling(8), {2})
    with pytest.raises(UnusableWeights):
        ending({"type": "stop", "matched": "NaN happened"}, Sampling(8), {2})


def test_versions_follow_sglangs_spans() -> None:
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 9}]
    meta = {"weight_version": "5", "weight_versions": spans}
    assert token_versions(meta, 4, {"4": 4, "5": 5}, oldest=4) == [4, 4, 5, 5]
    empty = {"weight_version": "4", "weight_versions": [{"version": "4", "start": 0, "end": 0}]}
    assert token_versions(empty, 0, {"4": 4}, oldest=4) == []


def test_without_spans_every_token_counts_as_of_the_oldest_version() -> None:
    assert token_versions({"weight_version": "5"}, 3, {"4": 4, "5": 5}, oldest=4) == [4, 4, 4]
    assert token_versions({"weight_version": "default"}, 2, {"default": 0, "5": 5}, oldest=5) == [0, 0]


def test_weights_that_were_not_put_there_from_here_are_an_error() -> None:
    with pytest.raises(EngineLost, match="'9'"):
        token_versions({"weight_version": "9"}, 2, {"default": 0}, oldest=0)


@pytest.mark.parametrize(
    ("text", "numbers"), [("0.5.23", (0, 5, 23)), ("0.5.10.post1", (0, 5, 10)), ("0.6.0rc1", (0, 6, 0))]
)
def test_version_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert version_numbers(text) == numbers

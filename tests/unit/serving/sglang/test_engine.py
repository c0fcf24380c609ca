"""The whole engine over HTTP, in front of a server that follows SGLang's API and computes nothing."""

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.asking import ask
from tests.unit.serving.sglang.fake_server import EOS, FakeSGLang

from tandem.engine.protocol import (
    EngineBusy,
    EngineError,
    GeneratedSample,
    GenerationRequest,
    GenerationResult,
    Outcome,
    Sampling,
    UnusableWeights,
)
from tandem.serving.sglang import engine as engine_module
from tandem.serving.sglang.engine import SGLangEngine
from tandem.utils.errors import UserError
from tandem.weights.versions import AdapterRefused, WeightUpdateRefused

MakeEngine = Callable[..., SGLangEngine]
Publish = Callable[[int], Path]
PROMPT = [5, 6, 7, 8]


def sampling(max_tokens: int = 8) -> Sampling:
    return Sampling(max_tokens, ignore_eos=True)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.002)


def until_drawn(server: FakeSGLang, num_tokens: int, num_requests: int = 1) -> None:
    """Until so many requests run and each has so many tokens."""

    def is_reached() -> bool:
        return [len(running.tokens) for running in list(server.running.values())] == [num_tokens] * num_requests

    until(is_reached, f"{num_tokens} tokens of {num_requests} requests")


# Generating.


def test_samples_come_back_with_logprobs_versions_and_alternatives(make_engine: MakeEngine) -> None:
    engine = make_engine()
    result = ask(engine, GenerationRequest(PROMPT, sampling(3), n=2, top_logprobs=2)).result(10)
    expected = GeneratedSample(
        [10, 11, 12], [-1.0, -1.001, -1.002], [0, 0, 0], "length", None, [[(60, -1.0), (61, -2.0)]] * 3
    )
    assert result == GenerationResult([expected, expected], num_cached_tokens=3)
    stats = engine.stats
    assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.generated_tokens) == (4, 3, 6)
    assert (stats.finished, stats.num_running, stats.num_waiting) == ({"length": 2}, 0, 0)


def test_prompt_logprobs(make_engine: MakeEngine) -> None:
    result = ask(make_engine(), GenerationRequest(PROMPT, sampling(1), n=2, prompt_logprobs=0)).result(10)
    assert result.prompt_logprobs is not None
    assert [(entry.token_id, entry.logprob, entry.top) for entry in result.prompt_logprobs] == [
        (6, -0.5, []),
        (7, -1.0, []),
        (8, -1.5, []),
    ]


@pytest.mark.parametrize("is_incremental", [False, True])
def test_a_stream_tells_every_token_once_and_ends_with_the_reason(
    make_engine: MakeEngine, sglang: FakeSGLang, is_incremental: bool
) -> None:
    sglang.is_incremental = is_incremental
    engine = make_engine()
    parts: list[tuple[int, GeneratedSample]] = []
    request = GenerationRequest(PROMPT, sampling(5), n=2, top_logprobs=1)
    result = ask(engine, request, lambda index, part: parts.append((index, part))).result(10)
    for index, sample in enumerate(result.samples):
        mine = [part for place, part in parts if place == index]
        assert [token for part in mine for token in part.token_ids] == sample.token_ids == [10, 11, 12, 13, 14]
        assert [logprob for part in mine for logprob in part.logprobs] == sample.logprobs
        assert sum(len(part.top_logprobs or []) for part in mine) == 5
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + ["length"]


def test_a_stop_token_is_told_and_eos_is_not(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    engine = make_engine()
    sglang.script = [30, 31, 32]
    stopped = ask(engine, GenerationRequest(PROMPT, Sampling(8, stop_token_ids=(31,)))).result(10).samples[0]
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == ([30, 31], "stop", 31)
    sglang.script = [30, EOS]
    ended = ask(engine, GenerationRequest(PROMPT, Sampling(8))).result(10).samples[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([30, EOS], "stop", None)


def test_what_sglang_cannot_do_is_refused_before_it_is_sent(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    engine = make_engine()
    sent = len(sglang.calls)
    with pytest.raises(ValueError, match="repetition_penalty"):
        ask(engine, GenerationRequest(PROMPT, Sampling(4, repetition_penalty=1.2)))
    assert len(sglang.calls) == sent


def test_seeds_are_sent_only_where_sglang_draws_by_them(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    engine = make_engine(allow_unseeded=True)
    ask(engine, GenerationRequest(PROMPT, Sampling(2, seed=1))).result(10)
    assert "sampling_seed" not in sglang.calls[-1][1]["sampling_params"]


def test_requests_without_a_seed_do_not_all_draw_the_same(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    sglang.info["enable_deterministic_inference"] = True
    engine = make_engine()
    for _ in range(2):
        ask(engine, GenerationRequest(PROMPT, Sampling(2), n=2)).result(10)
    seeds = [body["sampling_params"]["sampling_seed"] for route, body in sglang.calls[-4:] if route == "/generate"]
    assert len(set(seeds)) == 4


def test_a_cancelled_request_is_aborted_at_sglang_and_never_answered(
    make_engine: MakeEngine, sglang: FakeSGLang
) -> None:
    engine = make_engine()
    sglang.limit = 2
    answers: list[Outcome] = []
    number = engine.submit(GenerationRequest(PROMPT, sampling(), n=2), answers.append)
    until_drawn(sglang, 2, num_requests=2)
    rids = set(sglang.running)
    engine.cancel(number)
    until(lambda: not sglang.running, "the requests to end")
    until(lambda: {body["rid"] for route, body in list(sglang.calls) if route == "/abort_request"} == rids, "aborts")
    assert answers == [] and engine.stats.num_running == 0


def test_weights_that_give_no_numbers_are_an_error_of_the_weights(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    engine = make_engine()
    sglang.ending = {"type": "stop", "matched": "NaN happened"}
    with pytest.raises(UnusableWeights):
        ask(engine, GenerationRequest(PROMPT, sampling())).result(10)
    assert engine.failure is None


def test_a_request_that_sglang_drops_is_answered_with_its_reason(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    engine = make_engine()
    sglang.ending = {"type": "abort", "message": "out of memory", "status_code": 500, "err_type": None}
    with pytest.raises(EngineError, match="out of memory"):
        ask(engine, GenerationRequest(PROMPT, sampling(), n=3)).result(10)


def test_an_answer_that_cannot_be_read_costs_its_request_only(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    engine = make_engine()
    sglang.ending = {"kind": "a word SGLang does not use"}
    with pytest.raises(KeyError, match="type"):
        ask(engine, GenerationRequest(PROMPT, sampling(), n=2)).result(10)
    sglang.ending = None
    assert ask(engine, GenerationRequest(PROMPT, sampling(2))).result(10) and engine.failure is None


def test_requests_after_a_failure_and_after_the_end_are_answered_why(
    make_engine: MakeEngine, sglang: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "WATCH_S", 0.02)
    engine = make_engine()
    sglang.label = "default-again"
    until(lambda: engine.failure is not None, "the engine to fail")
    for end in (lambda: None, engine.stop, engine.stop):  # stopping twice is stopping once
        end()
        with pytest.raises(EngineError, match="'default-again' instead of 'default'"):
            ask(engine, GenerationRequest(PROMPT, sampling())).result(10)
        with pytest.raises(EngineError, match="'default-again' instead of 'default'"):
            engine.resume()


def test_a_lost_connection_is_answered_with_an_error(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    engine = make_engine()
    sglang.limit = 2
    whole = ask(engine, GenerationRequest(PROMPT, sampling()))
    stream = ask(engine, GenerationRequest(PROMPT, sampling()), lambda index, part: None)
    until_drawn(sglang, 2, num_requests=2)
    sglang.stop()
    for future in (whole, stream):
        with pytest.raises(EngineError, match="/generate"):
            future.result(10)


def test_stopping_answers_what_waits_and_leaves_sglang_running(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    engine = make_engine()
    sglang.limit = 2
    running = ask(engine, GenerationRequest(PROMPT, sampling()))
    until_drawn(sglang, 2)
    engine.pause()
    held = ask(engine, GenerationRequest(PROMPT, sampling()))
    until(lambda: engine.stats.num_waiting == 1, "the second request")
    engine.stop()
    for future in (running, held, ask(engine, GenerationRequest(PROMPT, sampling()))):
        with pytest.raises(EngineError, match="shutting down"):
            future.result(10)
    until(lambda: not sglang.running, "the request to be aborted")
    assert not sglang.is_paused
    with pytest.raises(EngineError, match="shutting down"):
        engine.pause()


# Pausing and new weights.


def test_a_pause_holds_what_runs_and_what_comes(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    engine = make_engine()
    sglang.limit = 2
    running = ask(engine, GenerationRequest(PROMPT, sampling(4)))
    until_drawn(sglang, 2)
    engine.pause()
    sglang.limit = None
    waiting = ask(engine, GenerationRequest(PROMPT, sampling(4)))
    until(lambda: engine.stats.num_waiting == 1, "the second request")
    assert engine.paused and not running.done() and not waiting.done()
    assert sglang.routes().count("/generate") == 2  # one of them while probing
    engine.resume()
    assert running.result(10) and waiting.result(10) and not engine.paused
    assert engine.stats.preemptions == 1


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_pause_that_ends_what_runs(make_engine: MakeEngine, sglang: FakeSGLang, mode: str) -> None:
    engine = make_engine()
    sglang.limit = 2
    running = ask(engine, GenerationRequest(PROMPT, sampling(4)))
    until_drawn(sglang, 2)
    pausing = threading.Thread(target=engine.pause, args=(mode,))
    pausing.start()
    if mode == "wait":
        time.sleep(0.05)
        assert pausing.is_alive() and not engine.paused
        sglang.limit = None
    sample = running.result(10).samples[0]
    pausing.join()
    assert engine.paused
    assert (len(sample.token_ids), sample.finish_reason) == ((4, "length") if mode == "wait" else (2, "abort"))
    with pytest.raises(EngineBusy, match="paused"):
        engine.pause("wait")


def test_an_update_is_one_operation_and_its_tokens_carry_their_versions(
    make_engine: MakeEngine, sglang: FakeSGLang, publish: Publish
) -> None:
    engine = make_engine()
    sglang.limit = 2
    future = ask(engine, GenerationRequest(PROMPT, sampling(8), n=2))
    until_drawn(sglang, 2, num_requests=2)
    sglang.calls.clear()
    new = publish(3)
    engine.update_weights(new, 3)
    assert sglang.routes() == [
        "/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation",
    ]  # fmt: skip
    assert sglang.calls[0][1] == {"mode": "retract"}
    assert sglang.calls[2][1] == {
        "model_path": str(new), "weight_version": "3", "flush_cache": False, "abort_all_requests": False,
    }  # fmt: skip
    assert (engine.version, engine.paused) == (3, False)
    sglang.limit = 5
    until_drawn(sglang, 5, num_requests=2)
    engine.update_weights(publish(4), 4)
    sglang.limit = None
    for sample in future.result(10).samples:
        assert sample.versions == [0, 0, 3, 3, 3, 4, 4, 4]
        assert [round(-1 - logprob) for logprob in sample.logprobs] == [0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("streams", [False, True])
def test_a_server_that_does_not_tell_spans_gets_the_oldest_version(
    make_engine: MakeEngine, sglang: FakeSGLang, publish: Publish, streams: bool
) -> None:
    sglang.tells_spans = False
    engine = make_engine()
    sglang.limit = 2
    parts: list[GeneratedSample] = []
    future = ask(
        engine, GenerationRequest(PROMPT, sampling(4)), (lambda _, part: parts.append(part)) if streams else None
    )
    until_drawn(sglang, 2)
    engine.update_weights(publish(3), 3)
    engine.update_weights(publish(1), 1)
    sglang.limit = None
    assert future.result(10).samples[0].versions == [0, 0, 0, 0]
    assert {version for part in parts for version in part.versions} <= {0}
    assert ask(engine, GenerationRequest(PROMPT, sampling(2))).result(10).samples[0].versions == [1, 1]


def test_parts_of_a_stream_never_look_newer_than_they_are(
    make_engine: MakeEngine, sglang: FakeSGLang, publish: Publish
) -> None:
    engine = make_engine()
    sglang.limit = 2
    parts: list[GeneratedSample] = []
    future = ask(engine, GenerationRequest(PROMPT, sampling(6)), lambda _, part: parts.append(part))
    until_drawn(sglang, 2)
    engine.update_weights(publish(3), 3)
    sglang.limit = None
    versions = future.result(10).samples[0].versions
    assert versions == [0, 0, 3, 3, 3, 3]
    told = [version for part in parts for version in part.versions]
    assert len(told) == 6 and all(mine <= exact for mine, exact in zip(told, versions, strict=True))


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_an_update_that_ends_what_runs(
    make_engine: MakeEngine, sglang: FakeSGLang, publish: Publish, mode: str
) -> None:
    engine = make_engine()
    sglang.limit = 2
    future = ask(engine, GenerationRequest(PROMPT, sampling(4)))
    until_drawn(sglang, 2)
    updating = threading.Thread(target=engine.update_weights, args=(publish(2), 2, mode))
    updating.start()
    if mode == "wait":
        until(lambda: not engine._backend.sending.is_set(), "the update to begin")
        later = ask(engine, GenerationRequest(PROMPT, sampling(2)))
        sglang.limit = None
        assert later.result(10).samples[0].versions == [2, 2]
    sample = future.result(10).samples[0]
    updating.join()
    assert set(sample.versions) == {0} and sample.finish_reason == ("length" if mode == "wait" else "abort")
    assert engine.version == 2 and not sglang.is_paused


def test_an_update_of_a_paused_engine_leaves_it_paused(
    make_engine: MakeEngine, sglang: FakeSGLang, publish: Publish
) -> None:
    engine = make_engine()
    engine.pause()
    with pytest.raises(EngineBusy, match="paused"):
        engine.update_weights(publish(1), 1, "wait")
    engine.update_weights(publish(2), 2)
    assert engine.paused and sglang.is_paused and engine.version == 2
    engine.resume()
    assert ask(engine, GenerationRequest(PROMPT, sampling(2))).result(10).samples[0].versions == [2, 2]


def test_damaged_or_foreign_weights_are_refused_before_sglang_hears_of_them(
    make_engine: MakeEngine, sglang: FakeSGLang, publish: Publish
) -> None:
    engine = make_engine()
    sglang.calls.clear()
    cut = publish(1)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(WeightUpdateRefused, match="bytes"):
        engine.update_weights(cut, 1)
    with pytest.raises(WeightUpdateRefused, match="version 2, not 3"):
        engine.update_weights(publish(2), 3)
    with pytest.raises(WeightUpdateRefused, match="no directory"):
        engine.update_weights(cut / "nowhere", 1)
    assert sglang.calls == [] and engine.version == 0


def test_where_sglang_cannot_flush_nothing_changes(
    make_engine: MakeEngine, sglang: FakeSGLang, publish: Publish
) -> None:
    sglang.flushes_while_held = False
    engine = make_engine()
    sglang.limit = 2
    future = ask(engine, GenerationRequest(PROMPT, sampling(4)))
    until_drawn(sglang, 2)
    with pytest.raises(EngineBusy, match="mode wait or abort"):
        engine.update_weights(publish(1), 1)
    assert (engine.version, sglang.num_updates, sglang.is_paused) == (0, 0, False)
    sglang.limit = None
    assert future.result(10).samples[0].versions == [0] * 4
    engine.update_weights(publish(2), 2)
    assert engine.version == 2


def test_a_load_that_fails_brings_the_old_weights_back(
    make_engine: MakeEngine, sglang: FakeSGLang, publish: Publish
) -> None:
    engine = make_engine()
    engine.update_weights(publish(1), 1)
    served, bad = sglang.model_path, publish(2)
    sglang.failing_paths = {str(bad)}
    with pytest.raises(WeightUpdateRefused, match="version 1 was loaded again"):
        engine.update_weights(bad, 2)
    assert (sglang.model_path, sglang.label, engine.version, engine.failure) == (served, "1", 1, None)
    assert ask(engine, GenerationRequest(PROMPT, sampling(2))).result(10).samples[0].versions == [1, 1]


def test_if_the_old_weights_do_not_come_back_the_engine_has_failed(
    make_engine: MakeEngine, sglang: FakeSGLang, publish: Publish, tiny_model: Path
) -> None:
    engine = make_engine()
    bad = publish(2)
    sglang.limit = 1
    running = ask(engine, GenerationRequest(PROMPT, sampling()))
    until_drawn(sglang, 1)
    sglang.failing_paths = {str(bad), str(tiny_model)}
    with pytest.raises(EngineError, match="what SGLang serves is not known"):
        engine.update_weights(bad, 2)
    assert engine.failure is not None and "loading" in engine.failure
    with pytest.raises(EngineError, match="not known"):
        running.result(10)
    with pytest.raises(EngineError, match="not known"):
        ask(engine, GenerationRequest(PROMPT, sampling())).result(10)


def test_a_connection_lost_during_an_update_is_a_failure(
    make_engine: MakeEngine, sglang: FakeSGLang, publish: Publish
) -> None:
    engine = make_engine()
    sglang.stop()
    with pytest.raises(EngineError, match="pause_generation"):
        engine.update_weights(publish(1), 1)


def test_a_server_that_comes_back_with_other_weights_is_noticed(
    make_engine: MakeEngine, sglang: FakeSGLang, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "WATCH_S", 0.02)
    engine = make_engine()
    engine.update_weights(publish(1), 1)
    sglang.label = "default"
    until(lambda: engine.failure is not None, "the engine to fail")
    assert "'default' instead of '1'" in str(engine.failure)


def test_a_server_that_goes_away_is_noticed(
    make_engine: MakeEngine, sglang: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "WATCH_S", 0.02)
    engine = make_engine()
    sglang.stop()
    until(lambda: engine.failure is not None, "the engine to fail")
    assert "is gone" in str(engine.failure)


def test_an_answer_by_unknown_weights_fails_the_engine(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    engine = make_engine()
    sglang.label = "somebody-else"
    with pytest.raises(EngineError, match="'somebody-else'"):
        ask(engine, GenerationRequest(PROMPT, sampling(2))).result(10)
    until(lambda: engine.failure is not None, "the engine to fail")


def test_the_cache_is_flushed_on_request_unless_something_runs(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    engine = make_engine()
    engine.reset_prefix_cache()
    assert sglang.num_flushes == 1
    sglang.limit = 1
    future = ask(engine, GenerationRequest(PROMPT, sampling(2)))
    until_drawn(sglang, 1)
    with pytest.raises(EngineBusy):
        engine.reset_prefix_cache()
    sglang.limit = None
    future.result(10)


# Adapters.


@pytest.fixture
def adapter_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_adapters_are_loaded_replaced_and_unloaded(
    make_engine: MakeEngine, sglang: FakeSGLang, adapter_dir: Path
) -> None:
    sglang.info["enable_lora"] = True
    engine = make_engine()
    engine.load_adapter("mine", adapter_dir, 5)
    assert engine.adapters == {"mine": str(adapter_dir)}
    with pytest.raises(AdapterRefused, match="already"):
        engine.load_adapter("mine", adapter_dir)
    sglang.limit = 1
    request = GenerationRequest(PROMPT, sampling(3), adapter="mine")
    running = ask(engine, request)
    until_drawn(sglang, 1)
    engine.load_adapter("mine", adapter_dir, 6, replace=True)
    sglang.limit = None
    assert running.result(10).samples[0].versions == [5, 5, 5]
    assert ask(engine, request).result(10).samples[0].versions == [6, 6, 6]
    until(lambda: len(sglang.adapters) == 1, "the first adapter to be unloaded")
    sglang.limit = 1
    cut = ask(engine, request)
    until_drawn(sglang, 1)
    engine.unload_adapter("mine")
    assert cut.result(10).samples[0].finish_reason == "abort"
    assert engine.adapters == {} == sglang.adapters
    with pytest.raises(AdapterRefused, match="no adapter named 'mine'"):
        ask(engine, request)


def test_wait_loads_an_adapter_after_requests_have_ended(
    make_engine: MakeEngine, sglang: FakeSGLang, adapter_dir: Path
) -> None:
    sglang.info["enable_lora"] = True
    engine = make_engine()
    engine.load_adapter("mine", adapter_dir, 5)
    sglang.limit = 1
    request = GenerationRequest(PROMPT, sampling(3), adapter="mine")
    running = ask(engine, request)
    until_drawn(sglang, 1)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(engine.load_adapter, "mine", adapter_dir, 6, replace=True, mode="wait")
        until(lambda: not engine._backend.sending.is_set(), "sending to pause")
        later = ask(engine, request)
        assert not loading.done() and len(sglang.adapters) == 1
        sglang.limit = None
        loading.result(10)
    assert running.result(10).samples[0].versions == [5, 5, 5]
    assert later.result(10).samples[0].versions == [6, 6, 6]
    engine.pause()
    with pytest.raises(EngineBusy, match="resume it first"):
        engine.load_adapter("mine", adapter_dir, 7, replace=True, mode="wait")
    engine.resume()


def test_requests_held_by_a_pause_end_with_their_adapter(
    make_engine: MakeEngine, sglang: FakeSGLang, adapter_dir: Path
) -> None:
    sglang.info["enable_lora"] = True
    engine = make_engine()
    engine.load_adapter("mine", adapter_dir)
    engine.pause()
    held = ask(engine, GenerationRequest(PROMPT, sampling(3), adapter="mine"))
    engine.unload_adapter("mine")
    engine.resume()
    assert held.result(10).samples == [GeneratedSample([], [], [], "abort")]


def test_adapters_that_cannot_be_loaded_are_refused(
    make_engine: MakeEngine, sglang: FakeSGLang, adapter_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(AdapterRefused, match="--enable-lora"):
        make_engine().load_adapter("mine", adapter_dir)
    sglang.info["enable_lora"] = True
    engine = make_engine()
    with pytest.raises(AdapterRefused, match=r"adapter_config\.json"):
        engine.load_adapter("mine", tmp_path)
    sglang.failing_paths = {str(adapter_dir)}
    with pytest.raises(AdapterRefused, match="incompatible rank"):
        engine.load_adapter("mine", adapter_dir)
    assert engine.adapters == {}


# Probing.


def test_a_server_that_is_not_there_is_waited_for_and_named(
    tiny_model: Path, make_engine: MakeEngine, sglang: FakeSGLang
) -> None:
    sglang.url = "http://127.0.0.1:9"
    with pytest.raises(UserError, match=r"waited 0\.3 s for the SGLang server at http://127\.0\.0\.1:9"):
        make_engine(startup_timeout_s=0.3)


def test_a_server_that_was_left_paused_is_resumed(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    sglang.is_paused = True
    engine = make_engine()
    assert ask(engine, GenerationRequest(PROMPT, sampling(2))).result(10)


@pytest.mark.parametrize(
    ("info", "options", "named"),
    [
        ({"version": "0.5.6"}, {}, "0.5.6 is too old"),
        ({"max_req_input_len": 200}, {}, "seq_len = 256 is more than the 200 tokens"),
        ({"preferred_sampling_params": '{"top_p": 0.5}'}, {}, "--preferred-sampling-params"),
        ({"disaggregation_mode": "decode"}, {}, "--disaggregation-mode"),
    ],
)
def test_a_server_that_cannot_be_ours_is_refused(
    make_engine: MakeEngine, sglang: FakeSGLang, info: dict[str, object], options: dict[str, object], named: str
) -> None:
    sglang.info |= info
    with pytest.raises(UserError, match=named):
        make_engine(**options)


def test_another_model_is_refused(
    make_engine: MakeEngine, sglang: FakeSGLang, tiny_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    sglang.model_path = str(other)
    with pytest.raises(UserError, match=f"not model.name = '{tiny_model}'"):
        make_engine()
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"vocab_size": 102', '"vocab_size": 103'))
    sglang.label = "7"
    with pytest.raises(UserError, match="vocab_size is 103"):
        make_engine()


def test_a_later_version_of_the_model_is_taken_up(
    make_engine: MakeEngine, sglang: FakeSGLang, publish: Publish
) -> None:
    sglang.model_path, sglang.label = str(publish(7)), "7"
    engine = make_engine()
    assert engine.version == 7
    assert ask(engine, GenerationRequest(PROMPT, sampling(2))).result(10).samples[0].versions == [7, 7]


def test_the_key_is_sent_and_a_wrong_one_is_named(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    sglang.api_key = "right"
    assert make_engine("right").version == 0
    with pytest.raises(UserError, match=r"sglang\.api_key_var"):
        make_engine("wrong")


def test_original_logprobs_are_noticed(make_engine: MakeEngine, sglang: FakeSGLang) -> None:
    sglang.logprobs_are_original = True
    engine = make_engine()
    with pytest.raises(ValueError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
        ask(engine, GenerationRequest(PROMPT, Sampling(2, temperature=0.5)))
    assert ask(engine, GenerationRequest(PROMPT, Sampling(2, temperature=0.5), raw_logprobs=True)).result(10)

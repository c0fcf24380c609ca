"""An idle engine on a GPU lets a burst of requests arrive before its first step. The clock is a fake: with each wait,
the next request comes."""

from collections.abc import Callable
from concurrent.futures import Future

import pytest
from tests.patience import PATIENCE

from tandem.engine import engine as engine_module
from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import GenerationRequest, Outcome, Sampling

NUM_ROWS = 8
REQUEST = GenerationRequest([5, 6, 7], Sampling(2, ignore_eos=True))


@pytest.mark.parametrize(("burst", "first_step"), [(1, 1), (5, 5), (20, NUM_ROWS)])
def test_the_first_step_has_the_whole_burst(
    burst: int, first_step: int, make_engine: Callable[..., NativeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_engine(max_sequences=NUM_ROWS)
    first.stop()  # its thread may not have looked for work yet, and would compute beside the one below
    core = first.core
    engine = NativeEngine(core, 0, pytest.fail, gather=True)
    answers: list[Future[Outcome]] = []
    num_waiting: list[int] = []
    step = core.step

    def submit() -> None:
        answers.append(Future())
        engine.submit(REQUEST, answers[-1].set_result)

    def counted_step() -> None:
        num_waiting.append(core.scheduler.num_waiting)
        step()

    monkeypatch.setattr(engine_module, "sleep", lambda seconds: submit() if len(answers) < burst else None)
    monkeypatch.setattr(core, "step", counted_step)
    engine.start()
    submit()
    answers[0].result(60 * PATIENCE)
    assert num_waiting[0] == first_step
    engine.stop()

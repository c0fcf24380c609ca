"""Requests to an engine, as futures."""

from concurrent.futures import Future

from tandem.engine.protocol import Engine, GenerationRequest, GenerationResult, OnPart, Outcome


def ask(engine: Engine, request: GenerationRequest, on_part: OnPart | None = None) -> "Future[GenerationResult]":
    future: Future[GenerationResult] = Future()

    def settle(outcome: Outcome) -> None:
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    engine.submit(request, settle, on_part)
    return future

"""Routes that generate."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.inference.api.answers import Answers, ChatAnswers, TextAnswers, whole_answer
from tandem.inference.api.errors import NotServed
from tandem.inference.api.messages import conversation_size
from tandem.inference.api.prompts import num_characters, uses_tools
from tandem.inference.api.routing import exact_router
from tandem.inference.api.served import Served
from tandem.inference.api.streaming import ChunkWriter, start_stream
from tandem.inference.api.structures import asked_structure, chat_structure
from tandem.inference.api.submission import generate
from tandem.inference.engine import AdapterRefused, GenerationRequest
from tandem.inference.responses import Answer
from tandem.types.chat import ChatCompletionRequest
from tandem.types.openai import CompletionRequest


def generation_routes(served: Served) -> APIRouter:
    routes = exact_router()
    prompts, texts, tokenizer = served.prompts, served.texts, served.tokenizer

    @routes.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continue one prompt or several."""
        grammar = await served.structures.compile(asked_structure(body))
        work = partial(prompts.completion_requests, body, served.adapter(body.model), grammar)
        requests = await served.encoders.run(num_characters(body), work)
        return await answer(served, TextAnswers(tokenizer, texts, body), requests, http)

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, http: Request) -> Response:
        """Answer a conversation."""
        reader = prompts.chat.call_format() if uses_tools(body) else None
        grammar = await served.structures.compile(chat_structure(body, prompts.chat))
        work = partial(prompts.chat_request, body, served.adapter(body.model), grammar)
        request = await served.encoders.run(conversation_size(body.messages, body), work)
        return await answer(served, ChatAnswers(tokenizer, texts, body, reader), [request], http)

    return routes


async def answer(served: Served, answers: Answers, requests: list[GenerationRequest], http: Request) -> Response:
    model = requests[0].adapter or served.model
    try:
        if answers.body.stream:
            writer = ChunkWriter(answers, model, requests)
            return await start_stream(served.admission, served.metrics, writer, http)
        with served.admission.admitted(requests):
            results = await generate(served.engine, requests, http)
    except AdapterRefused as error:  # unloaded since the request came
        raise NotServed(str(error)) from error
    return Answer(whole_answer(answers, model, requests, results))

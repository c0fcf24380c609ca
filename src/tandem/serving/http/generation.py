"""The routes that generate."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from tandem.engine.protocol import GenerationRequest
from tandem.serving.http.answers import Answers, ChatAnswers, TextAnswers, whole_answer
from tandem.serving.http.context import ApiContext
from tandem.serving.http.errors import NotServed
from tandem.serving.http.messages import conversation_size
from tandem.serving.http.prompts import num_characters, uses_tools
from tandem.serving.http.routing import NOT_SERVED, TOO_MUCH, Endpoint
from tandem.serving.http.schemas import ChatCompletion, TextCompletion
from tandem.serving.http.streaming import ChunkWriter, start_stream
from tandem.serving.http.structures import asked_structure, chat_structure
from tandem.serving.http.submission import generate
from tandem.types.chat import ChatCompletionRequest
from tandem.types.openai import CompletionRequest
from tandem.utils.serving.responses import Answer
from tandem.weights.versions import AdapterRefused


class Generation:
    def __init__(self, context: ApiContext) -> None:
        self.context = context

    def endpoints(self) -> list[Endpoint]:
        text, chat = (CompletionRequest, TextCompletion), (ChatCompletionRequest, ChatCompletion)
        routes = (("/v1/completions", self.completions, *text), ("/v1/chat/completions", self.chat_completions, *chat))
        return [
            Endpoint("POST", path, handler, answer, body=body, statuses=NOT_SERVED | TOO_MUCH, may_stream=True)
            for path, handler, body, answer in routes
        ]

    async def completions(self, body: CompletionRequest, http: Request) -> Response:
        """Continue one prompt or several."""
        context = self.context
        grammar = await context.structures.compile(asked_structure(body))
        work = partial(context.prompts.completion_requests, body, context.adapter(body.model), grammar)
        requests = await context.encoders.run(num_characters(body), work)
        return await self._answer(TextAnswers(context.tokenizer, context.texts, body), requests, http)

    async def chat_completions(self, body: ChatCompletionRequest, http: Request) -> Response:
        """Answer a conversation."""
        context, prompts = self.context, self.context.prompts
        reader = prompts.chat.call_format() if uses_tools(body) else None
        grammar = await context.structures.compile(chat_structure(body, prompts.chat))
        work = partial(prompts.chat_request, body, context.adapter(body.model), grammar)
        request = await context.encoders.run(conversation_size(body.messages, body), work)
        return await self._answer(ChatAnswers(context.tokenizer, context.texts, body, reader), [request], http)

    async def _answer(self, answers: Answers, requests: list[GenerationRequest], http: Request) -> Response:
        context = self.context
        model = requests[0].adapter or context.model
        try:
            if answers.body.stream:
                writer = ChunkWriter(answers, model, requests)
                return await start_stream(context.admission, context.metrics, writer, http)
            with context.admission.admitted(requests):
                results = await generate(context.engine, requests, http)
        except AdapterRefused as error:  # unloaded since the request came
            raise NotServed(str(error)) from error
        return Answer(whole_answer(answers, model, requests, results))

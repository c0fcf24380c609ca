"""What goes wrong with a request, and the answer it gets: OpenAI's shape, with the field it is about."""

from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tandem.engine.protocol import EngineBusy, EngineError, UnusableWeights
from tandem.engine.structure import StructureRefused
from tandem.utils.serving.responses import error_answer
from tandem.weights.versions import AdapterRefused, WeightUpdateRefused

RETRY_AFTER_S = 1
PROMPT_FORMS = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
# Fields that other servers know; whoever sends one should learn why it is refused here.
REFUSED = {
    "suffix": "text cannot be inserted, only continued",
    "use_beam_search": "there is no beam search",
    "length_penalty": "there is no beam search",
    "allowed_token_ids": "use structured_outputs, or logit_bias, which can make tokens unlikely",
    "bad_words": "use structured_outputs, or logit_bias, which can make tokens unlikely",
    "structural_tag": "use tools, or structured_outputs.grammar",
    "disable_additional_properties": "say additionalProperties = false in the schema",
    "guided_decoding_backend": "there is one",
    "guided_whitespace_pattern": "use structured_outputs.whitespace_pattern",
    "chat_template": "the server has one for all requests: `inference --chat-template FILE`",
    "documents": "give documents within the messages, or through chat_template_kwargs",
    "functions": "use tools",
    "function_call": "use tools and tool_calls",
    "image_url": "only text is supported",
    "modalities": "only text is supported",
    "audio": "only text is supported",
    "reasoning_effort": "use chat_template_kwargs, if the model's chat template has such a switch",
}


class InvalidRequest(Exception):
    """The query or the body is not of the shape its route takes: what pydantic says of it, and the body."""

    def __init__(self, errors: Sequence[Any], body: Any) -> None:
        super().__init__(errors)
        self.errors = errors
        self.body = body


class BadRequest(ValueError):
    """Refused with the field that is wrong, if it is one."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class NotServed(ValueError):
    """The request names a model or an adapter that is not here."""

    def __init__(self, message: str, param: str = "model") -> None:
        super().__init__(message)
        self.param = param


class QueueFull(RuntimeError):
    """So many requests wait already that this one should come back later."""


class ClientGone(Exception):
    """The client is gone: there is no one to answer."""


# What an engine refuses to change: the status, the field that is wrong, and the code.
REFUSALS: dict[type[Exception], tuple[int, str | None, str]] = {
    WeightUpdateRefused: (400, "path", "weights_refused"),
    AdapterRefused: (400, "lora_path", "adapter_refused"),
    EngineBusy: (409, None, "engine_busy"),
}


def answer_refusal(error: Exception) -> Response:
    status, param, code = next(known for kind, known in REFUSALS.items() if isinstance(error, kind))
    return error_answer(status, str(error), param=param, code=code)


def engine_status(error: Exception) -> tuple[int, str]:
    """Status and code for what the engine could not do."""
    if isinstance(error, StructureRefused):
        return 400, "structure_refused"
    if isinstance(error, AdapterRefused):
        return 400, "adapter_refused"
    return (500, "unusable_weights") if isinstance(error, UnusableWeights) else (503, "engine_failed")


async def invalid(_: Request, error: InvalidRequest) -> Response:
    message, param = explain_invalid(error.errors, error.body)
    return error_answer(400, message, param=param)


async def refused(_: Request, error: BadRequest) -> Response:
    return error_answer(400, str(error), param=error.param)


async def change_refused(_: Request, error: Exception) -> Response:
    return answer_refusal(error)


async def not_served(_: Request, error: NotServed) -> Response:
    return error_answer(404, str(error), param=error.param, code="model_not_found")


async def queue_full(_: Request, error: QueueFull) -> Response:
    answer = error_answer(429, str(error), code="queue_full")
    answer.headers["Retry-After"] = str(RETRY_AFTER_S)
    return answer


async def engine_failed(_: Request, error: Exception) -> Response:
    status, code = engine_status(error)
    return error_answer(status, str(error), code=code)


async def client_gone(_: Request, error: ClientGone) -> Response:
    return error_answer(499, "the client closed the connection")


async def http_error(http: Request, error: HTTPException) -> Response:
    message = f"there is no route {http.url.path}" if error.detail == "Not Found" else error.detail
    answer = error_answer(error.status_code, message)
    answer.headers.update(error.headers or {})
    return answer


async def unexpected(_: Request, error: Exception) -> Response:
    return error_answer(500, f"the server failed on this request: {type(error).__name__}", code="internal_error")


ERROR_HANDLERS: dict[Any, Any] = {
    InvalidRequest: invalid,
    BadRequest: refused,
    **dict.fromkeys(REFUSALS, change_refused),
    NotServed: not_served,
    QueueFull: queue_full,
    StructureRefused: engine_failed,
    EngineError: engine_failed,
    ClientGone: client_gone,
    HTTPException: http_error,
    Exception: unexpected,
}
"""What Starlette answers each error with."""


def explain_invalid(errors: Sequence[Any], body: Any = None) -> tuple[str, str | None]:
    """One sentence about the first thing that is wrong, and the field it is about."""
    first, *others = most_telling(errors, body)
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
    path = path_of(first, body)
    if not path:
        return "the body must be a JSON object, sent with the header 'Content-Type: application/json'", None
    field, whole = path[0], ".".join(path)
    if first["type"] == "extra_forbidden":
        why = REFUSED.get(path[-1])
        return (f"{whole!r} is not supported: {why}" if why else f"unknown field {whole!r}"), field
    if first["type"] == "missing":
        return f"field {whole!r} is missing", field
    if field == "prompt":
        return f"prompt {PROMPT_FORMS}", field
    messages = [error["msg"].removeprefix("Value error, ") for error in (first, *others)]
    return f"{whole}: {', or '.join(messages)}", field


def most_telling(errors: Sequence[Any], body: Any) -> list[Any]:
    """Of the first field that is wrong, what is said of the deepest place: where a field has several forms, the one
    that was meant. Several errors if that leaves several forms."""
    field = errors[0]["loc"][:2]
    paths = [(path_of(error, body), error) for error in errors if error["loc"][:2] == field]
    deepest = max((path for path, _ in paths), key=len)
    return [error for path, error in paths if path == deepest]


def path_of(error: Any, body: Any) -> list[str]:
    """The keys that lead to what is wrong. Pydantic also tells which form of a field it tried: that is no key of the
    body."""
    source, *location = error["loc"]
    if source != "body" or not isinstance(body, dict) or not location:
        return [str(part) for part in location]
    *way, last = location
    path: list[str] = []
    here = body
    for part in way if error["type"] == "missing" else location:
        if (isinstance(here, dict) and part in here) or (isinstance(here, list) and isinstance(part, int)):
            path.append(str(part))
            here = here[part]
    return [*path, str(last)] if error["type"] == "missing" else path

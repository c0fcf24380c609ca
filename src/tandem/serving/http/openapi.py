"""The OpenAPI document, true to what is accepted and answered: FastAPI's own, but for the answers.

Answers are plain dicts; tests hold them against the schemas here.
"""

from typing import Any

from fastapi import FastAPI

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
TRUTH: Schema = {"type": "boolean"}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def table(always: dict[str, Schema], sometimes: dict[str, Schema] | None = None) -> Schema:
    return {"type": "object", "required": list(always), "properties": {**always, **(sometimes or {})}}


def values(schema: Schema) -> Schema:
    """A table whose keys are not known beforehand."""
    return {"type": "object", "additionalProperties": schema}


TOKEN_IDS = list_of(WHOLE)
FINISH_REASON = {"enum": ["stop", "length", "tool_calls", "abort"]}
STOP_REASON = {"anyOf": [TEXT, WHOLE, {"type": "null"}], "description": "The stop string or token, if one ended it."}
PROMPT_LOGPROBS = list_of(
    or_null(values(table({"logprob": NUMBER, "rank": or_null(WHOLE), "decoded_token": TEXT})))
) | {"description": "For each token of the prompt but the first, by id."}
VERSIONS = TOKEN_IDS | {"description": "Version of the weights behind each token."}
USAGE = table(
    {
        "prompt_tokens": WHOLE,
        "completion_tokens": WHOLE,
        "total_tokens": WHOLE,
        "prompt_tokens_details": table({"cached_tokens": WHOLE}),
    }
)
TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": TOKEN_IDS}
CHAT_LOGPROBS = table({"content": list_of(table({**TOKEN, "top_logprobs": list_of(table(TOKEN))}))})
TEXT_LOGPROBS = table(
    {
        "tokens": list_of(TEXT),
        "token_logprobs": list_of(or_null(NUMBER)),
        "top_logprobs": or_null(list_of(or_null(values(NUMBER)))),
        "text_offset": TOKEN_IDS,
    }
)
CALL = table({"id": TEXT, "type": {"const": "function"}, "function": table({"name": TEXT, "arguments": TEXT})})
MESSAGE = table({"role": {"const": "assistant"}, "content": or_null(TEXT)}, {"tool_calls": list_of(CALL)})


def completion(kind: str, choice: Schema, extras: dict[str, Schema]) -> Schema:
    envelope = {"id": TEXT, "object": {"const": kind}, "created": WHOLE, "model": TEXT}
    return table({**envelope, "choices": list_of(choice), "usage": USAGE}, extras)


ENDING = {"index": WHOLE, "finish_reason": FINISH_REASON, "stop_reason": STOP_REASON}
OF_TOKENS = {
    "token_ids": TOKEN_IDS,
    "weight_versions": VERSIONS,
    "kept_token_ids": list_of(TOKEN_IDS),
    "kept_logprobs": list_of(NUMBER),
}
OF_PROMPT = {"prompt_token_ids": TOKEN_IDS, "prompt_logprobs": PROMPT_LOGPROBS}
MODEL = table(
    {
        "id": TEXT,
        "object": {"const": "model"},
        "created": WHOLE,
        "owned_by": TEXT,
        "root": TEXT,
        "parent": or_null(TEXT),
        "max_model_len": WHOLE,
    }
)
LOADED = table({"lora_name": TEXT, "lora_path": TEXT})
UNLOADED = table({"lora_name": TEXT})
ANSWERS: dict[str, Schema] = {
    "/v1/completions": completion(
        "text_completion",
        table({**ENDING, "text": TEXT, "logprobs": or_null(TEXT_LOGPROBS)}, OF_TOKENS | OF_PROMPT),
        {},
    ),
    "/v1/chat/completions": completion(
        "chat.completion",
        table({**ENDING, "message": MESSAGE, "logprobs": or_null(CHAT_LOGPROBS)}, OF_TOKENS),
        OF_PROMPT,
    ),
    "/v1/models": table({"object": {"const": "list"}, "data": list_of(MODEL)}),
    "/v1/models/{model}": MODEL,
    "/health": table({"status": {"const": "ok"}, "version": WHOLE, "model": TEXT, "paused": TRUTH}),
    "/version": table({"version": TEXT}),
    "/is_paused": table({"is_paused": TRUTH}),
    "/pause": table({"status": {"const": "paused"}, "paused": TRUTH}),
    "/resume": table({"status": {"const": "resumed"}, "paused": TRUTH}),
    "/claim": table({"run": TEXT}),
    "/release": table({"released": {"const": True}}),
    "/update_weights": table({"version": WHOLE}),
    "/reset_prefix_cache": table({"success": TRUTH}),
    "/load_lora_adapter": LOADED,
    "/v1/load_lora_adapter": LOADED,
    "/unload_lora_adapter": UNLOADED,
    "/v1/unload_lora_adapter": UNLOADED,
    "/tokenize": table(
        {"count": WHOLE, "max_model_len": WHOLE, "tokens": TOKEN_IDS, "token_strs": or_null(list_of(TEXT))}
    ),
    "/detokenize": table({"prompt": TEXT}),
    "/tokenizer_info": table({"tokenizer_class": TEXT}) | {"description": "And all of tokenizer_config.json."},
}


ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "The field it is about."},
                "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        }
    },
}
OF_ALL = {
    "400": "A field or a query parameter is wrong or unknown; `param` names it.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body does not say that it is JSON.",
    "500": "A fault of the server.",
    "503": "The engine has failed or is shutting down.",
}
TOO_MUCH = {"429": "Too many requests wait; come back after Retry-After seconds."}
NO_MODEL = {"404": "The model is not served here."}
NO_ADAPTER = {"404": "The adapter is not loaded."}
BUSY = {"409": "The engine is busy with something that contradicts this, or another run holds the server."}
GENERATION = ("/v1/completions", "/v1/chat/completions")
OPEN = ("/health",)
MORE: dict[str, dict[str, str]] = {
    **dict.fromkeys((*GENERATION, "/tokenize"), NO_MODEL | TOO_MUCH),
    **dict.fromkeys(("/v1/models/{model}", "/detokenize"), NO_MODEL),
    **dict.fromkeys(("/claim", "/pause", "/update_weights", "/load_lora_adapter", "/v1/load_lora_adapter"), BUSY),
    **dict.fromkeys(("/unload_lora_adapter", "/v1/unload_lora_adapter"), NO_ADAPTER),
}
"""Statuses beside those that all routes have."""
# Its failure has a shape of its own.
UNHEALTHY = table({"status": {"const": "failed"}, "reason": TEXT, "version": WHOLE, "model": TEXT, "paused": TRUTH})


def describe(app: FastAPI, *, needs_key: bool) -> None:
    """Have the app publish its document with the errors it gives, in the shape it gives them."""
    default = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = default()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.pop("HTTPValidationError", None)
            schemas.pop("ValidationError", None)
            schemas["Error"] = ERROR_SCHEMA
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    _state_answers(path, operation, needs_key=needs_key)
            if needs_key:
                document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi


def _state_answers(path: str, operation: dict[str, Any], *, needs_key: bool) -> None:
    answers = operation["responses"]
    answers.pop("422", None)
    _state_success(path, answers["200"])
    errors = OF_ALL | MORE.get(path, {})
    if needs_key and path not in OPEN:
        errors["401"] = "The API key is missing or wrong."
        operation["security"] = [{"key": []}]
    if not needs_key and path not in OPEN:
        errors["403"] = "A web page asks, or the server is called by a name that is not its own."
    schema = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status, text in errors.items():
        answers[status] = {"description": text, "content": schema}
    if path == "/health":
        failed = {"application/json": {"schema": UNHEALTHY}}
        answers["503"] = {"description": "The engine has failed.", "content": failed}


def _state_success(path: str, answer: dict[str, Any]) -> None:
    if path in ANSWERS:
        answer["content"] = {"application/json": {"schema": ANSWERS[path]}}
    else:
        answer["content"] = {"text/plain": {"schema": TEXT}}
    if path in GENERATION:
        answer["content"]["text/event-stream"] = {"schema": TEXT}

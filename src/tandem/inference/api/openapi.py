"""The OpenAPI document, true to what is accepted and answered: FastAPI's own, but for the answers."""

from typing import Any

from fastapi import FastAPI

from tandem.inference.api.answer_schemas import ANSWERS, TEXT, TRUTH, WHOLE, table

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
NO_ADAPTER = {"404": "The adapter is not loaded."}
NO_MODEL = {"404": "The model is not served here."}
NO_ADAPTER = {"404": "The adapter is not loaded."}
BUSY = {"409": "The engine is busy with something that contradicts this."}
GENERATION = ("/v1/completions", "/v1/chat/completions")
OPEN = ("/health",)
MORE: dict[str, dict[str, str]] = {
    **dict.fromkeys((*GENERATION, "/tokenize"), NO_MODEL | TOO_MUCH),
    **dict.fromkeys(("/v1/models/{model}", "/detokenize"), NO_MODEL),
    **dict.fromkeys(("/pause", "/update_weights", "/load_lora_adapter", "/v1/load_lora_adapter"), BUSY),
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

"""The OpenAPI document, true to what is accepted and answered: FastAPI's own, but for the errors."""

from typing import Any

from fastapi import FastAPI

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
OF_BODIES = {
    "400": "A field is wrong or unknown; `param` names it.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body does not say that it is JSON.",
}
OF_GENERATION = {
    "404": "The model is not served here.",
    "429": "Too many requests wait; come back after Retry-After seconds.",
    "503": "The engine has failed or is shutting down.",
}
GENERATION = ("/v1/completions", "/v1/chat/completions")
OPEN = ("/health",)


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
                    _state_errors(path, operation, needs_key=needs_key)
            if needs_key:
                document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi


def _state_errors(path: str, operation: dict[str, Any], *, needs_key: bool) -> None:
    answers = operation["responses"]
    answers.pop("422", None)
    errors = dict(OF_BODIES) if "requestBody" in operation else {}
    if path in GENERATION:
        errors |= OF_GENERATION
        answers["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    if needs_key and path not in OPEN:
        errors["401"] = "The API key is missing or wrong."
        operation["security"] = [{"key": []}]
    if not needs_key and path not in OPEN:
        errors["403"] = "A web page asks, or the server is called by a name that is not its own."
    schema = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status, text in errors.items():
        answers[status] = {"description": text, "content": schema}

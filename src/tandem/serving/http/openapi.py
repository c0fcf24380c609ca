"""/openapi.json, made from the endpoints and their models, and the pages that show it."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from tandem.serving.http.routing import Endpoint
from tandem.serving.http.schemas import Error
from tandem.utils.serving.auth import OPEN_PATHS

Schema = dict[str, Any]

PLACE = "#/components/schemas/{model}"
TEXT: Schema = {"type": "string"}
COMMON = {
    400: "A field or a query parameter is wrong or unknown; `param` names it.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body does not say that it is JSON.",
    500: "A fault of the server.",
    503: "The engine has failed or is shutting down.",
}
NO_KEY = {401: "The API key is missing or wrong."}
FOREIGN = {403: "A web page asks, or the server is called by a name that is not its own."}
CDN = "https://cdn.jsdelivr.net/npm"
SWAGGER = f"""<!DOCTYPE html>
<title>TITLE - Swagger UI</title>
<link rel="stylesheet" href="{CDN}/swagger-ui-dist@5/swagger-ui.css">
<div id="swagger-ui"></div>
<script src="{CDN}/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({{url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true}})</script>
"""
REDOC = f"""<!DOCTYPE html>
<title>TITLE - ReDoc</title>
<redoc spec-url="/openapi.json"></redoc>
<script src="{CDN}/redoc@2/bundles/redoc.standalone.js"></script>
"""


def package_version() -> str:
    try:
        return version("tandem-rl")
    except PackageNotFoundError:  # run from its source, not installed
        return "unknown"


def documented(
    endpoints: Sequence[Endpoint], *, title: str, needs_key: bool, common: Mapping[int, str] = COMMON
) -> list[BaseRoute]:
    """The endpoints, then the routes that describe them. `common`: errors that all of them may give."""

    @cache
    def description() -> Schema:
        operations = [(each, _operation(each, common, needs_key=needs_key)) for each in endpoints]
        return describe(operations, {"title": title, "version": package_version()}, needs_key=needs_key)

    async def openapi(_: Request) -> Response:
        return JSONResponse(description())  # orjson writes no integer of more than 64 bits

    pages = {"/docs": SWAGGER, "/redoc": REDOC}
    shown = [Route(path, HTMLResponse(page.replace("TITLE", title)), methods=["GET"]) for path, page in pages.items()]
    return [*endpoints, Route("/openapi.json", openapi), *shown]


def describe(operations: Iterable[tuple[Endpoint, Schema]], info: Schema, *, needs_key: bool) -> Schema:
    """The document."""
    paths: dict[str, Schema] = {}
    models: dict[type[BaseModel] | None, None] = {Error: None}
    for endpoint, operation in operations:
        if endpoint.include_in_schema:
            paths.setdefault(endpoint.path_format, {})[endpoint.method.lower()] = operation
            models |= dict.fromkeys((endpoint.body, endpoint.answer, endpoint.failure))
    _, definitions = models_json_schema([(model, "validation") for model in models if model], ref_template=PLACE)
    components: Schema = {"schemas": definitions["$defs"]}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(endpoint: Endpoint, common: Mapping[int, str], *, needs_key: bool) -> Schema:
    path, method = endpoint.path_format, endpoint.method.lower()
    operation: Schema = {
        "summary": endpoint.name.replace("_", " ").title(),
        "operationId": re.sub(r"\W", "_", f"{endpoint.name}{path}") + f"_{method}",
        "responses": _answers(endpoint, common, needs_key=needs_key),
    }
    if text := inspect.getdoc(endpoint.handler):
        operation["description"] = text
    if parameters := _parameters(endpoint):
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = _body(endpoint.body, is_needed=endpoint.needs_body)
    if needs_key and path not in OPEN_PATHS:
        operation["security"] = [{"key": []}]
    return operation


def _parameters(endpoint: Endpoint) -> list[Schema]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "title": name.title()}}
        for name in endpoint.param_convertors
    ]
    fields = endpoint.query.model_json_schema(ref_template=PLACE).get("properties", {})
    in_query = [
        {"name": name, "in": "query", "required": False, "schema": {k: v for k, v in each.items() if k != "default"}}
        for name, each in fields.items()
    ]
    return in_path + in_query


def _body(model: type[BaseModel], *, is_needed: bool) -> Schema:
    if is_needed:
        return {"content": _json(_place(model)), "required": True}
    return {"content": _json({"anyOf": [_place(model), {"type": "null"}], "title": "Body"})}


def _answers(endpoint: Endpoint, common: Mapping[int, str], *, needs_key: bool) -> Schema:
    is_open = endpoint.path in OPEN_PATHS
    errors = {**common, **endpoint.statuses} | ({} if is_open else NO_KEY if needs_key else FOREIGN)
    answers: Schema = {
        str(status): {"description": text, "content": _json(_place(Error))} for status, text in errors.items()
    }
    content = {"text/plain": {"schema": TEXT}} if endpoint.answer is None else _json(_place(endpoint.answer))
    if endpoint.may_stream:
        content["text/event-stream"] = {"schema": TEXT}
    answers["200"] = {"description": "Successful Response", "content": content}
    if endpoint.failure is not None:
        answers["503"] = {"description": "The engine has failed.", "content": _json(_place(endpoint.failure))}
    return answers


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _place(model: type[BaseModel]) -> Schema:
    return {"$ref": PLACE.format(model=model.__name__)}

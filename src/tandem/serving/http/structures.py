"""From the fields of a request to the grammar its completions must follow."""

import asyncio
import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tandem.engine.structure import Kind, Structure, StructureRefused
from tandem.serving.http.errors import BadRequest, QueueFull
from tandem.serving.http.messages import ChatPrompts
from tandem.serving.http.prompts import uses_tools
from tandem.types.chat import ChatCompletionRequest, FunctionDefinition, NamedTool
from tandem.types.openai import GenerationOptions, JsonObjectFormat, JsonSchema, JsonSchemaFormat, StructuredOutputs

if TYPE_CHECKING:
    from tandem.engine.grammars import Grammar, Grammars

MAX_COMPILE_S = 5.0
NUM_THREADS = 2
ANY_OBJECT = {"type": "object"}
FIELDS = {
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
}
Given = tuple[str, Kind, str]
"""Field, kind and text of a structure."""


class Structures:
    """Compiles outside the event loop."""

    def __init__(self, grammars: "Grammars | str", max_compile_s: float = MAX_COMPILE_S) -> None:
        """`grammars`: or why there are none."""
        self._grammars = grammars
        self._max_compile_s = max_compile_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammars")

    async def compile(self, structure: Structure | None) -> "Grammar | None":
        if structure is None:
            return None
        if isinstance(self._grammars, str):
            raise BadRequest(f"{structure.param} is not supported: {self._grammars}", structure.param)
        known = self._grammars.known(structure)
        if known is not None:
            return known
        job = self._threads.submit(self._grammars.compile, structure)
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(job)), self._max_compile_s)
        except StructureRefused as error:
            raise BadRequest(f"{structure.param} cannot be enforced: {error}", structure.param) from error
        except TimeoutError as error:
            raise self._too_long(job, structure.param) from error

    def _too_long(self, job: "Future[Grammar]", param: str) -> Exception:
        if job.cancel():  # it has not begun
            return QueueFull("structures of other requests are being compiled; come back later")
        job.add_done_callback(Future.exception)  # it ends by itself; its outcome is not needed
        return BadRequest(f"{param} takes more than {self._max_compile_s:g} s to compile; simplify it", param)


def asked_structure(body: GenerationOptions) -> Structure | None:
    """What the text of a completion must be; None: anything."""
    if body.model_fields_set.isdisjoint(FIELDS):
        return None
    given = [*_from_response_format(body), *_from_structured_outputs(body.structured_outputs), *_from_guided(body)]
    if not given:
        return None
    if len({param for param, _, _ in given}) > 1:
        raise BadRequest(f"{given[0][0]} and {given[1][0]} are both given; give one of them", given[1][0])
    if body.ignore_eos:
        raise BadRequest(
            f"ignore_eos contradicts {given[0][0]}: a completion ends where its structure does", "ignore_eos"
        )
    return Structure(*given[0])


def chat_structure(body: ChatCompletionRequest, chat: ChatPrompts) -> Structure | None:
    """The same for a message, which may be, or have to be, a call of tools."""
    structure = asked_structure(body)
    if not body.tools:
        if body.tool_choice not in ("none", "auto"):
            raise BadRequest("tool_choice needs tools", "tool_choice")
        return structure
    if not uses_tools(body):
        return structure
    functions = [tool.function for tool in body.tools]
    if body.tool_choice != "auto":
        return _enforced_call(body, functions, structure, chat)
    if structure is not None:
        return replace(structure, calls=chat.call_format().grammar(functions, several=body.parallel_tool_calls))
    if any(function.strict for function in functions):
        message = (
            "strict functions are available where a call is enforced: set tool_choice to required or to a function"
        )
        raise BadRequest(message, "tools")
    return None


def _enforced_call(
    body: ChatCompletionRequest, functions: list[FunctionDefinition], structure: Structure | None, chat: ChatPrompts
) -> Structure:
    if structure is not None:
        message = f"tool_choice enforces a call, which leaves no text for {structure.param}; give one of them"
        raise BadRequest(message, "tool_choice")
    if body.ignore_eos:
        raise BadRequest("ignore_eos contradicts tool_choice: a message ends after its calls", "ignore_eos")
    several = body.parallel_tool_calls
    if isinstance(body.tool_choice, NamedTool):
        name, several = body.tool_choice.function.name, False
        functions = [function for function in functions if function.name == name]
        if not functions:
            raise BadRequest(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
    return Structure("tool_choice", calls=chat.call_format().grammar(functions, several=several))


def _from_response_format(body: GenerationOptions) -> list[Given]:
    if isinstance(body.response_format, JsonSchemaFormat):
        return [("response_format", "json", schema_text(body.response_format.json_schema.schema_, "response_format"))]
    if isinstance(body.response_format, JsonObjectFormat):
        return [("response_format", "json", json.dumps(ANY_OBJECT))]
    return []


def _from_structured_outputs(asked: StructuredOutputs | None) -> list[Given]:
    if asked is None:
        return []
    param = "structured_outputs"
    layout: dict[str, Any] = {}
    if asked.disable_any_whitespace:
        layout["whitespace_flexible"] = False
    if asked.whitespace_pattern is not None:
        layout["whitespace_pattern"] = asked.whitespace_pattern
    given: list[Given] = []
    if asked.json_ is not None:
        given.append((param, "json", schema_text(asked.json_, param, layout)))
    if asked.json_object:
        given.append((param, "json", schema_text(ANY_OBJECT, param, layout)))
    given += _texts(param, asked.regex, asked.choice, asked.grammar)
    if len(given) != 1:
        forms = "json, regex, choice, grammar, json_object"
        raise BadRequest(f"structured_outputs: give one of {forms}; {len(given)} are given", param)
    if layout and given[0][1] != "json":
        raise BadRequest(f"structured_outputs: whitespace belongs to JSON, not to a {given[0][1]}", param)
    return given


def _from_guided(body: GenerationOptions) -> list[Given]:
    given: list[Given] = []
    if body.guided_json is not None:
        given.append(("guided_json", "json", schema_text(body.guided_json, "guided_json")))
    for kind in ("regex", "choice", "grammar"):
        given += _texts(f"guided_{kind}", **{kind: getattr(body, f"guided_{kind}")})
    return given


def _texts(
    param: str, regex: str | None = None, choice: list[str] | None = None, grammar: str | None = None
) -> list[Given]:
    given: list[Given] = []
    if regex is not None:
        given.append((param, "regex", regex))
    if choice is not None:
        given.append((param, "choice", json.dumps(choice)))
    if grammar is not None:
        given.append((param, "grammar", grammar))
    return given


def schema_text(schema: JsonSchema, param: str, layout: dict[str, Any] | None = None) -> str:
    """The schema with how JSON is laid out, which llguidance reads from the schema itself."""
    try:
        whole = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(whole, dict):
            raise BadRequest(f"{param}: a JSON schema is an object", param)
        if layout:
            own = whole.get("x-guidance")
            whole = whole | {"x-guidance": (own if isinstance(own, dict) else {}) | layout}
        return json.dumps(whole)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadRequest(f"{param}: the schema is not JSON: {error}", param) from error

"""Tool calls in the text a model writes: which format its chat template teaches, and reading it as it grows.

A call is told once it is complete; what may be the beginning of one is held back. What looks like a call and is
none is given out as text. The server reads calls here, and so do environments.
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.data.text_stream import overlap
from tandem.data.tokenizer import Tokenizer
from tandem.types.chat import FunctionDefinition

BEGIN, END = "<tool_call>", "</tool_call>"
LIST_MARK = "[TOOL_CALLS]"
LEADING_MARKS = ("<|python_tag|>", '"name": function name, "parameters"')
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class FoundCall:
    name: str
    arguments: str  # JSON

    def as_message(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


Found = tuple[str, list[FoundCall]]
"""Text outside of calls, and calls."""


class CallReader(Protocol):
    """Reads the text of one sample."""

    def push(self, text: str) -> Found: ...

    def finish(self) -> Found: ...


class CallFormat(Protocol):
    """How a model writes calls. Called, it gives a reader."""

    def __call__(self) -> CallReader: ...

    def grammar(self, functions: Sequence[FunctionDefinition], *, several: bool) -> str:
        """What a text that calls one of these functions, or several times, must be: a Lark grammar."""
        ...


def read_text(calls: CallFormat, text: str) -> Found:
    """All of a text at once."""
    reader = calls()
    (content, found), (rest, more) = reader.push(text), reader.finish()
    return content + rest, [*found, *more]


OTHER_TEMPLATE = "give one that has, in a format of docs/inference.md, with --chat-template FILE"


def choose_format(tokenizer: Tokenizer) -> CallFormat | str:
    """How this model writes calls, or why tools cannot be used with it."""
    template = tokenizer.template(with_tools=True)
    if template is None or "tools" not in template.variables:
        return f"the model's chat template has no tools; {OTHER_TEMPLATE}"
    if BEGIN in template.text and "<function=" not in template.text:
        if tokenizer.decode(tokenizer.encode(BEGIN)) != BEGIN:
            return f"{BEGIN} is a special token of this model, which its text leaves out"
        return TaggedCalls
    if LIST_MARK in template.text:
        return ListedCalls
    if any(mark in template.text for mark in LEADING_MARKS):
        return LeadingCalls
    return f"the model's chat template has tools in a format that we cannot read; {OTHER_TEMPLATE}"


class TaggedCalls:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, anywhere in the text: Hermes, Qwen."""

    @classmethod
    def grammar(cls, functions: Sequence[FunctionDefinition], *, several: bool) -> str:
        rules = call_rules(functions, "arguments") + f'tagged: "{BEGIN}\\n" call "\\n{END}"\n'
        return rules + ('start: tagged ("\\n" tagged)*\n' if several else "start: tagged\n")

    def __init__(self) -> None:
        self._text = ""
        self._after_call = False

    def push(self, text: str) -> Found:
        self._text += text
        content, calls = "", []
        while True:
            outside, begin, rest = self._text.partition(BEGIN)
            if not begin:
                keep = len(outside) - overlap(outside, (BEGIN,))
                content += self._tidy(outside[:keep])
                self._text = outside[keep:]
                return content, calls
            inside, end, after = rest.partition(END)
            content += self._tidy(outside)
            if not end:
                self._text = begin + inside
                return content, calls
            call = read_call(inside)
            if call is None:
                content += self._tidy(begin + inside + end)
            else:
                calls.append(call)
                self._after_call = True
            self._text = after

    def finish(self) -> Found:
        left, self._text = self._text, ""
        # Cut off, or ended without its end tag, a call may be whole all the same.
        call = read_call(left.removeprefix(BEGIN)) if left.startswith(BEGIN) else None
        return ("", [call]) if call else (self._tidy(left), [])

    def _tidy(self, content: str) -> str:
        """Line breaks behind a call are no content."""
        if self._after_call:
            content = content.lstrip()
            self._after_call = not content
        return content


class LeadingCalls:
    """The text is nothing but calls: {"name": …, "parameters": {…}} one or more, separated by ;, or a list of
    them: Llama 3. A special token before them leaves no text."""

    @classmethod
    def grammar(cls, functions: Sequence[FunctionDefinition], *, several: bool) -> str:
        return call_rules(functions, "parameters") + ('start: call ("; " call)*\n' if several else "start: call\n")

    def __init__(self) -> None:
        self._text = ""
        self._is_content = False

    def push(self, text: str) -> Found:
        if self._is_content:
            return text, []
        self._text += text
        begins = self._text.lstrip()
        self._is_content = bool(begins) and begins[0] not in "{["
        return (self._release(), []) if self._is_content else ("", [])

    def finish(self) -> Found:
        calls = read_calls(self._text)
        return ("", calls) if calls else (self._release(), [])

    def _release(self) -> str:
        text, self._text = self._text, ""
        return text


class ListedCalls(LeadingCalls):
    """[{"name": …, "arguments": {…}}, …] and nothing else: Mistral."""

    @classmethod
    def grammar(cls, functions: Sequence[FunctionDefinition], *, several: bool) -> str:
        return call_rules(functions, "arguments") + (
            'start: "[" call (", " call)* "]"\n' if several else 'start: "[" call "]"\n'
        )


def call_rules(functions: Sequence[FunctionDefinition], arguments: str) -> str:
    """The rule `call`: {"name": …, "arguments": …} of one of the functions, with arguments that follow its schema."""
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
    for index, function in enumerate(functions):
        schema = NO_ARGUMENTS if function.parameters is None else {"type": "object"} | function.parameters
        # Cut as JSON is: where an answer in JSON may come instead, both are then open until they differ.
        parts = ("{", '"name"', ":", " ", f'"{function.name}"', ",", " ", f'"{arguments}"', ":", " ")
        head = " ".join(json.dumps(part) for part in parts)
        rules.append(f'call_{index}: {head} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return "\n".join(rules) + "\n"


def read_calls(text: str) -> list[FoundCall] | None:
    """All of the text as calls, or None."""
    decoder, rest, values = json.JSONDecoder(), text.strip(), []
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        values += value if isinstance(value, list) else [value]
        rest = rest[end:].strip().removeprefix(";").strip()
    calls = [as_call(value) for value in values]
    return [call for call in calls if call] if all(calls) else None


def read_call(text: str) -> FoundCall | None:
    try:
        return as_call(json.loads(text))
    except (ValueError, RecursionError):
        return None


def as_call(value: Any) -> FoundCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return FoundCall(value["name"], arguments)

"""What every route answers with status 200, for the OpenAPI document. Answers are plain dicts; tests hold them against
these schemas."""

from typing import Any

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
OF_TOKENS = {"token_ids": TOKEN_IDS, "weight_versions": VERSIONS}
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

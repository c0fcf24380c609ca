"""What /pause is asked for; by our own routes and by vLLM's middleware."""

from typing import Any

from tandem.serving.http.errors import BadRequest
from tandem.types.openai import PauseRequest


def pause_request(body: PauseRequest | None, **query: Any) -> PauseRequest:
    """Options in the query or in the body. None: not given in the query."""
    asked = body or PauseRequest()
    given = {name: value for name, value in query.items() if value is not None}
    for name, value in given.items():
        if name in asked.model_fields_set and getattr(asked, name) != value:
            raise BadRequest(f"{name} is {value!r} in the query and {getattr(asked, name)!r} in the body", name)
    return asked.model_copy(update=given)

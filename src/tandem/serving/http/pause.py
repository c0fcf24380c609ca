"""What /pause is asked for; by our own routes and by vLLM's middleware."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from tandem.engine.protocol import UpdateMode
from tandem.serving.http.errors import BadRequest
from tandem.types.openai import PauseRequest


class PauseQuery(BaseModel):
    """What /pause takes in its query, as vLLM does."""

    model_config = ConfigDict(extra="forbid")

    mode: UpdateMode | None = None
    clear_cache: bool | None = None


def pause_request(body: PauseRequest | None, query: Mapping[str, Any]) -> PauseRequest:
    """Options in the query or in the body."""
    asked = body or PauseRequest()
    given = PauseQuery.model_validate(dict(query)).model_dump(exclude_none=True)
    for name, value in given.items():
        if name in asked.model_fields_set and getattr(asked, name) != value:
            raise BadRequest(f"{name} is {value!r} in the query and {getattr(asked, name)!r} in the body", name)
    return asked.model_copy(update=given)

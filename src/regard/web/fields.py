"""The fields of a request: an unknown one is refused by its name, as the command line refuses an unknown option."""

from typing import Any

from fastapi import Request
from pydantic import BaseModel, model_validator

from ..errors import SpecError, nearest


class Fields(BaseModel):
    """The JSON object that a request sends."""

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown_fields(cls, given: Any) -> Any:
        known = cls.model_fields
        if isinstance(given, dict) and (unknown := [name for name in given if name not in known]):
            raise ValueError(f"unknown field {unknown[0]!r:.100}; {nearest(unknown[0], known)}")
        return given


def refuse_query(request: Request) -> None:
    """Requests to the API have their fields in the body; of the address they read the token only."""
    unknown = [name for name in request.query_params if name != "token"]
    if unknown and request.url.path.startswith("/api"):
        raise SpecError(
            f"the address has {unknown[0]!r:.100}, which is not read; send fields as JSON in the body"
        )

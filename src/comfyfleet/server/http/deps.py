"""FastAPI dependencies for the control plane and the current time, and the error responses in the
OpenAPI document."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, TypeAlias

from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.local_access import LocalAccess


def plane_of(request: Request) -> ControlPlane:
    plane: ControlPlane = request.app.state.plane
    return plane


def now_of(request: Request) -> datetime:
    return plane_of(request).clock()


def local_access_of(request: Request) -> LocalAccess | None:
    """Returns the keyless access for the user of `comfyfleet up`, or None under other commands."""
    local: LocalAccess | None = request.app.state.local
    return local


async def is_catalogue_public(request: Request) -> bool:
    """Checks whether a visitor may see effects without signing in.

    A setting allows this for everyone. The user who started `comfyfleet up` is always allowed to
    see them.
    """
    local = local_access_of(request)
    return plane_of(request).settings.public_catalogue or (
        local is not None and await local.admits(request)
    )


# These dependencies are coroutines, because FastAPI would run plain functions in a thread.
async def _plane(request: Request) -> ControlPlane:
    return plane_of(request)


async def _now(request: Request) -> datetime:
    return now_of(request)


# Annotations for endpoint parameters. Endpoints open their own transactions, because a dependency
# that yields one would commit only after the response was sent.
PlaneDep: TypeAlias = Annotated[ControlPlane, Depends(_plane)]
NowDep: TypeAlias = Annotated[datetime, Depends(_now)]


COMPONENTS = "#/components/schemas/"


class Problem(BaseModel):
    model_config = ConfigDict(frozen=True)

    code: str = Field(description="A stable code for programs. See the reference of error codes.")
    message: str = Field(description="A description of the error for people.")
    details: dict[str, Any] = Field(
        description="More information, such as the invalid field or the limit that was exceeded."
    )


class ProblemAnswer(BaseModel):
    model_config = ConfigDict(frozen=True)

    error: Problem


_NEEDED = {"required_tokens": 5, "balance": 2}
_EXAMPLES: Mapping[int, tuple[str, Mapping[str, tuple[str, Mapping[str, Any]]]]] = {
    400: (
        "The request body can't be parsed",
        {"invalid_input": ("There was an error parsing the body", {})},
    ),
    401: (
        "The key is missing, unknown, expired or revoked",
        {"unauthenticated": ("this key is unknown", {})},
    ),
    403: (
        "The key is valid, but doesn't permit this request",
        {"forbidden": ("this key doesn't have the scope write", {"scope": "write"})},
    ),
    404: (
        "The object doesn't exist, or you don't have access to it",
        {"not_found": ("job 6a1f… was not found", {})},
    ),
    409: (
        "The request conflicts with the current state",
        {
            "conflict": (
                "idempotency_key was already used for a different request",
                {"field": "idempotency_key"},
            )
        },
    ),
    413: (
        "The request body or file is too large",
        {"limit_exceeded": ("a file can have at most 2,147,483,648 bytes", {"field": "size"})},
    ),
    422: (
        "The input is invalid, or can't be accepted at the moment",
        {
            "invalid_input": ("size: must be above 0", {"fields": []}),
            "invalid_value": ("the property steps: 0 is below 1", {"property": "steps"}),
            "insufficient_tokens": ("Insufficient token balance.", _NEEDED),
        },
    ),
    429: (
        "A limit is reached. Retry after the seconds in the Retry-After header",
        {
            "too_many_calls": ("rate limit exceeded for this key", {"retry_after_seconds": 0.5}),
            "queue_full": ("the tenant's queue is full", {"retry_after_seconds": 30}),
        },
    ),
    503: (
        "Part of the service is unavailable. Retry after the seconds in the Retry-After header",
        {"unavailable": ("the database can't be reached", {})},
    ),
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns error responses for `responses=` of a route or router."""
    return {status: _described(status) for status in statuses}


def _described(status: int) -> dict[str, Any]:
    description, codes = _EXAMPLES[status]
    examples = {
        code: {"value": {"error": {"code": code, "message": message, "details": dict(details)}}}
        for code, (message, details) in codes.items()
    }
    content = {"schema": {"$ref": f"{COMPONENTS}ProblemAnswer"}, "examples": examples}
    return {"description": description, "content": {"application/json": content}}


def install(app: FastAPI) -> None:
    """Adds one schema for all errors to the OpenAPI document.

    If the schema were the `model` of each response, FastAPI would build it for every route and
    delay the route's first call.
    """
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        described = ProblemAnswer.model_json_schema(ref_template=f"{COMPONENTS}{{model}}")
        schemas = {**described.pop("$defs"), "ProblemAnswer": described}
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]

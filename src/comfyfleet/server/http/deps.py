"""FastAPI dependencies (the control plane, the current time), and error responses in the OpenAPI document."""

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
    """Returns the access without a key that `comfyfleet up` gives to its own user."""
    local: LocalAccess | None = request.app.state.local
    return local


async def is_catalogue_public(request: Request) -> bool:
    """Whether effects are shown to visitors who have not signed in: by a setting, or to the user who started
    `comfyfleet up`."""
    local = local_access_of(request)
    return plane_of(request).settings.public_catalogue or (
        local is not None and await local.admits(request)
    )


# Coroutines, because FastAPI would run plain functions in a thread.
async def _plane(request: Request) -> ControlPlane:
    return plane_of(request)


async def _now(request: Request) -> datetime:
    return now_of(request)


# `async def endpoint(plane: PlaneDep, now: NowDep)`. The endpoint opens its transactions itself:
# a dependency that yields one would commit only after the response was sent.
PlaneDep: TypeAlias = Annotated[ControlPlane, Depends(_plane)]
NowDep: TypeAlias = Annotated[datetime, Depends(_now)]


COMPONENTS = "#/components/schemas/"


class Problem(BaseModel):
    model_config = ConfigDict(frozen=True)

    code: str = Field(description="Stable; see the reference of error codes.")
    message: str = Field(description="For people.")
    details: dict[str, Any] = Field(description="The field, the limit, or whatever explains it.")


class ProblemAnswer(BaseModel):
    model_config = ConfigDict(frozen=True)

    error: Problem


_NEEDED = {"required_tokens": 5, "balance": 2}
_EXAMPLES: Mapping[int, tuple[str, Mapping[str, tuple[str, Mapping[str, Any]]]]] = {
    400: (
        "The body can't be read",
        {"invalid_input": ("There was an error parsing the body", {})},
    ),
    401: (
        "The key is missing, unknown, expired or revoked",
        {"unauthenticated": ("this key is unknown", {})},
    ),
    403: (
        "The key is valid, but does not allow this",
        {"forbidden": ("this key has no scope write", {"scope": "write"})},
    ),
    404: (
        "It does not exist, or belongs to somebody else",
        {"not_found": ("there is no job 6a1f…", {})},
    ),
    409: (
        "The request conflicts with the current state",
        {
            "conflict": (
                "idempotency_key was used for another request",
                {"field": "idempotency_key"},
            )
        },
    ),
    413: (
        "Larger than allowed",
        {"limit_exceeded": ("a file has at most 2,147,483,648 bytes", {"field": "size"})},
    ),
    422: (
        "The input is not valid, or not possible at the moment",
        {
            "invalid_input": ("size: must be above 0", {"fields": []}),
            "invalid_value": ("the property steps: 0 is below 1", {"property": "steps"}),
            "insufficient_tokens": ("Insufficient token balance.", _NEEDED),
        },
    ),
    429: (
        "A limit is reached; Retry-After says when to retry",
        {
            "too_many_calls": ("this key calls too often", {"retry_after_seconds": 0.5}),
            "queue_full": ("the queue of this tenant is full", {"retry_after_seconds": 30}),
        },
    ),
    503: (
        "A part of the service can't be reached; Retry-After says when to retry",
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

    As `model` of each response, FastAPI would build it for every route and delay each route's first
    call.
    """
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        described = ProblemAnswer.model_json_schema(ref_template=f"{COMPONENTS}{{model}}")
        schemas = {**described.pop("$defs"), "ProblemAnswer": described}
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]

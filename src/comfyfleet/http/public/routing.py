"""What all parts of the customers' API have in common."""

from typing import Annotated, TypeAlias

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict

from comfyfleet.http.json_body import JsonRoute
from comfyfleet.http.problems import problems
from comfyfleet.http.values import Body as Body
from comfyfleet.http.values import Text as Text

PAGE_MAX = 100
PAGE_USUAL = 20
WAIT_SECONDS_MAX = 60


Limit: TypeAlias = Annotated[int, Query(ge=1, le=PAGE_MAX, description="At most so many.")]
Wait: TypeAlias = Annotated[
    float,
    Query(
        ge=0, le=WAIT_SECONDS_MAX, description="Answer when it has ended, or so many seconds on."
    ),
]


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


def public_router(tag: str) -> APIRouter:
    return APIRouter(
        prefix="/api",
        tags=[tag],
        route_class=JsonRoute,
        responses=problems(400, 401, 403, 413, 422, 429, 503),
    )

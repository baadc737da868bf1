"""What all parts of the customers' API have in common."""

from typing import Annotated, TypeAlias

from fastapi import APIRouter, Query
from pydantic import AfterValidator, BaseModel, ConfigDict

from comfyfleet.http.problems import problems
from comfyfleet.kernel.texts import problem_with_text

PAGE_MAX = 100
PAGE_USUAL = 20
ROW_ID_MAX = 2**63 - 1
WAIT_SECONDS_MAX = 60


def _storable(text: str) -> str:
    if problem := problem_with_text(text):
        raise ValueError(problem)
    return text


# A text that every database can keep and compare with.
Text: TypeAlias = Annotated[str, AfterValidator(_storable)]
Limit: TypeAlias = Annotated[int, Query(ge=1, le=PAGE_MAX, description="At most so many.")]
Wait: TypeAlias = Annotated[
    float,
    Query(
        ge=0, le=WAIT_SECONDS_MAX, description="Answer when it has ended, or so many seconds on."
    ),
]


class Body(BaseModel):
    """What a customer sends. Fields that we don't know are let through."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


def public_router(tag: str) -> APIRouter:
    return APIRouter(
        prefix="/api", tags=[tag], responses=problems(400, 401, 403, 413, 422, 429, 503)
    )

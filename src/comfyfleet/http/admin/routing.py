"""What all parts of the operators' API have in common."""

from typing import Annotated, TypeAlias

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict

from comfyfleet.http.auth import admin, owner
from comfyfleet.http.json_body import JsonRoute
from comfyfleet.http.values import Body as Body

PREFIX = "/api/admin"
PAGE_MAX = 1000
# Who acts, for the audit; asking for it also asks for the key.
Operator: TypeAlias = Annotated[str, Depends(admin)]
Owner: TypeAlias = Annotated[str, Depends(owner)]


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


def admin_router(below: str = "") -> APIRouter:
    return APIRouter(
        prefix=PREFIX + below,
        tags=["admin"],
        dependencies=[Depends(admin)],
        route_class=JsonRoute,
    )

"""Who is signed in in a browser."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from pydantic import Field

from comfyfleet.api.account import Scope
from comfyfleet.api.admin import Role
from comfyfleet.api.values import OPEN_ENUM, Response


class SessionKind(StrEnum):
    CUSTOMER = "customer"
    OPERATOR = "operator"


class SessionTenant(Response):
    id: UUID
    name: str


class SessionUser(Response):
    id: UUID
    name: str | None = None
    email: str | None = None


class SignInWays(Response):
    """By which ways somebody can sign in here."""

    key: bool = Field(description="`POST /api/session` with a key.")
    one_click: bool = Field(
        description="`POST /api/session/local`: with the address that `comfyfleet up` has printed."
    )
    oidc: bool = Field(description="`/auth/oidc/start`: with the operator's identity provider.")
    oidc_name: str | None = Field(default=None, description="What that provider is called.")


class SessionAnswer(Response):
    """Who is signed in: a customer (`tenant`, `user`, `scopes`), an operator (`operator`, `role`), or one person
    as both."""

    signed_in: bool
    kind: Annotated[SessionKind, OPEN_ENUM] | None = Field(
        default=None, description="`operator` for a person who is both; null: nobody is signed in."
    )
    kinds: tuple[Annotated[SessionKind, OPEN_ENUM], ...] = ()
    tenant: SessionTenant | None = None
    user: SessionUser | None = None
    scopes: tuple[Annotated[Scope, OPEN_ENUM], ...] = ()
    operator: str | None = Field(
        default=None, description="As the audit names the operator.", examples=["operator:ada"]
    )
    role: Annotated[Role, OPEN_ENUM] | None = None
    csrf: str | None = Field(
        default=None, description="To be sent as `X-CSRF-Token` with every change."
    )
    expires_at: datetime | None = Field(
        default=None, description="When somebody has to sign in again."
    )
    public_catalogue: bool = Field(
        default=False, description="Whether `GET /api/catalogue` shows effects to anybody."
    )
    ways: SignInWays

"""The user of a browser session."""

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
    """The available sign-in methods."""

    key: bool = Field(description="Whether `POST /api/session` accepts a key.")
    one_click: bool = Field(
        description="Whether `POST /api/session/local` accepts the secret in the URL printed by "
        "`comfyfleet up`."
    )
    oidc: bool = Field(description="Whether `/auth/oidc/start` signs in with an identity provider.")
    oidc_name: str | None = Field(default=None, description="The name of the identity provider.")


class SessionAnswer(Response):
    """The signed-in user: a customer (`tenant`, `user`, `scopes`), an operator (`operator`,
    `role`), or one person who is both."""

    signed_in: bool
    kind: Annotated[SessionKind, OPEN_ENUM] | None = Field(
        default=None,
        description="The kind of user: `operator` for a person who is both. null if nobody is "
        "signed in.",
    )
    kinds: tuple[Annotated[SessionKind, OPEN_ENUM], ...] = ()
    tenant: SessionTenant | None = None
    user: SessionUser | None = None
    scopes: tuple[Annotated[Scope, OPEN_ENUM], ...] = ()
    operator: str | None = Field(
        default=None, description="The operator's name in the audit log.", examples=["operator:ada"]
    )
    role: Annotated[Role, OPEN_ENUM] | None = None
    csrf: str | None = Field(
        default=None, description="Send this as `X-CSRF-Token` with every change."
    )
    expires_at: datetime | None = Field(default=None, description="When the session expires.")
    public_catalogue: bool = Field(
        default=False, description="Whether `GET /api/catalogue` shows effects to everyone."
    )
    ways: SignInWays

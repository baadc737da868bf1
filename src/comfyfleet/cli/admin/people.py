"""Whose wallet or key a command is about."""

from typing import Annotated

from cyclopts import Parameter

from comfyfleet.cli.admin.client import Control
from comfyfleet.kernel.errors import InvalidInput

TenantId = Annotated[str, Parameter(help="The tenant's id.")]
UserId = Annotated[
    str | None, Parameter(metavar="ID", help="Which user, if the tenant has several.")
]


def user_of(plane: Control, tenant: str, user: str | None) -> str:
    """The one that is named, or the only one that there is."""
    if user is not None:
        return user
    users = plane.get("tenants", tenant, "users", limit=2)["users"]
    if len(users) != 1:
        raise InvalidInput(
            f"tenant {tenant} has {'several users' if users else 'no user'}: name one with --user",
            hint=f"comfyfleet admin tenants show {tenant}",
        )
    found: str = users[0]["id"]
    return found

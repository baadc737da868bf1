"""Bearer keys. Each audience has its own: an operator's key opens nothing of a worker's."""

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from comfyfleet.http.callers import caller_of
from comfyfleet.http.given import plane_of
from comfyfleet.kernel.errors import Unauthenticated
from comfyfleet.kernel.keys import fits

# It only finds the key and describes it in the API's document: the refusals are ours.
_admin_bearer = HTTPBearer(auto_error=False, scheme_name="admin key")
ADMIN = "admin"


async def operator_calling(request: Request) -> str:
    """Asked before the request's body is read."""
    bearer = await _admin_bearer(request)
    if bearer is None:
        raise Unauthenticated(
            "an admin key is needed",
            hint="Send Authorization: Bearer KEY; the key was printed when the control plane "
            "first started, or is set by COMFYFLEET_ADMIN_KEY there.",
        )
    if not fits(bearer.credentials, plane_of(request).admin_key.key_hash):
        raise Unauthenticated("this is not the admin key")
    return ADMIN


async def admin(
    request: Request,
    _described: Annotated[HTTPAuthorizationCredentials | None, Depends(_admin_bearer)],
) -> str:
    """The actor for the audit. `APIRouter(dependencies=[Depends(admin)])`."""
    return caller_of(request, str)

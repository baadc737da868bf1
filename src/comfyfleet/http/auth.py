"""Bearer keys. Each audience has its own: an operator's key opens nothing of a worker's."""

from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from comfyfleet.http.given import GivenPlane
from comfyfleet.kernel.errors import Unauthenticated
from comfyfleet.kernel.keys import fits

# It only finds the key and describes it in the API's document: the refusals are ours.
_admin_bearer = HTTPBearer(auto_error=False, scheme_name="admin key")
ADMIN = "admin"


async def admin(
    plane: GivenPlane,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_admin_bearer)],
) -> str:
    """The actor for the audit. `APIRouter(dependencies=[Depends(admin)])`."""
    if bearer is None:
        raise Unauthenticated(
            "an admin key is needed",
            hint="Send Authorization: Bearer KEY; the key was printed when the control plane "
            "first started, or is set by COMFYFLEET_ADMIN_KEY there.",
        )
    if not fits(bearer.credentials, plane.admin_key.key_hash):
        raise Unauthenticated("this is not the admin key")
    return ADMIN

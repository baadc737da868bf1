"""Bearer keys. Each audience has its own: an operator's key opens nothing of a worker's."""

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from comfyfleet.http.callers import caller_of
from comfyfleet.http.given import now_of, plane_of
from comfyfleet.kernel.errors import Unauthenticated
from comfyfleet.kernel.keys import fits
from comfyfleet.operators import service as operators
from comfyfleet.operators.model import FIRST_OWNER, Acting, Role

# It only finds the key and describes it in the API's document: the refusals are ours.
_admin_bearer = HTTPBearer(auto_error=False, scheme_name="admin key")
READS = frozenset({"GET", "HEAD", "OPTIONS"})


async def operator_calling(request: Request) -> Acting:
    """Asked before the request's body is read. Whoever only views may change nothing."""
    bearer = await _admin_bearer(request)
    if bearer is None:
        raise Unauthenticated(
            "an operator's key is needed",
            hint="Send Authorization: Bearer KEY; the first key was printed when the control plane "
            "first started, or is set by COMFYFLEET_ADMIN_KEY there.",
        )
    acting = await _known(request, bearer.credentials)
    acting.require(Role.VIEWER if request.method in READS else Role.OPERATOR)
    return acting


async def _known(request: Request, key: str) -> Acting:
    plane, now = plane_of(request), now_of(request)
    if fits(key, plane.admin_key.key_hash):
        return Acting(FIRST_OWNER, Role.OWNER)
    async with plane.central.look() as tx:
        operator = await operators.authenticate(tx, key)
    if not operator.is_use_noted(now):
        async with plane.central.begin() as tx:
            await operators.note_use(tx, operator, now=now)
    return Acting(operator.subject, operator.role)


async def admin(
    request: Request,
    _described: Annotated[HTTPAuthorizationCredentials | None, Depends(_admin_bearer)],
) -> str:
    """The actor for the audit. `APIRouter(dependencies=[Depends(admin)])`."""
    return caller_of(request, Acting).actor


async def owner(request: Request, actor: Annotated[str, Depends(admin)]) -> str:
    """The same, where an owner is needed."""
    caller_of(request, Acting).require(Role.OWNER)
    return actor

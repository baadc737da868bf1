"""Authenticates operators, and creates the routers of the admin API."""

from typing import Annotated, TypeAlias

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from comfyfleet.errors import Unauthenticated
from comfyfleet.server.http.deps import now_of, plane_of
from comfyfleet.server.http.middleware import caller_of
from comfyfleet.server.http.request_body import Body as Body
from comfyfleet.server.http.request_body import JsonRoute
from comfyfleet.server.http.sessions import trusted_session
from comfyfleet.server.secrets import is_key_of_hash
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import FIRST_OWNER, ActingOperator, Operator, Role

# Extracts the key and describes it in the OpenAPI document. Invalid keys are rejected by our own
# code.
_admin_bearer = HTTPBearer(auto_error=False, scheme_name="admin key")
READS = frozenset({"GET", "HEAD", "OPTIONS"})


async def authenticate_operator(request: Request) -> ActingOperator:
    """Authenticates an operator by key or browser session, before the request body is read.

    Viewers may only send reading requests.
    """
    bearer = await _admin_bearer(request)
    if bearer is None:
        acting = await _signed_in(request)
    else:
        acting = await _authenticate(request, bearer.credentials)
    acting.require(Role.VIEWER if request.method in READS else Role.OPERATOR)
    return acting


async def _signed_in(request: Request) -> ActingOperator:
    session = await trusted_session(plane_of(request), request)
    if session is None or session.operator is None:
        raise Unauthenticated(
            "an operator's key is required",
            hint="Send Authorization: Bearer KEY. The first key is the value of "
            "COMFYFLEET_ADMIN_KEY or was printed when the control plane first started.",
        )
    if session.operator_row is not None:
        await _note_use(request, session.operator_row)
    return session.operator


async def _authenticate(request: Request, key: str) -> ActingOperator:
    plane = plane_of(request)
    if is_key_of_hash(key, plane.admin_key.key_hash):
        return ActingOperator(FIRST_OWNER, Role.OWNER)
    async with plane.central.read() as tx:
        operator = await tenants.authenticate_operator(tx, key)
    await _note_use(request, operator)
    return ActingOperator(operator.subject, operator.role)


async def _note_use(request: Request, operator: Operator) -> None:
    plane, now = plane_of(request), now_of(request)
    if not operator.is_use_recorded(now):
        async with plane.central.transaction() as tx:
            await tenants.note_operator_use(tx, operator, now=now)


async def require_operator(
    request: Request,
    _described: Annotated[HTTPAuthorizationCredentials | None, Depends(_admin_bearer)],
) -> str:
    """Returns the operator's name for the audit log. This dependency also adds the key to the
    OpenAPI document."""
    return caller_of(request, ActingOperator).actor


async def require_owner(request: Request, actor: Annotated[str, Depends(require_operator)]) -> str:
    """Returns the owner's name for the audit log. Raises Forbidden if the operator isn't an
    owner."""
    caller_of(request, ActingOperator).require(Role.OWNER)
    return actor


PREFIX = "/api/admin"
PAGE_MAX = 1000
# The name of the operator or owner for the audit log. A route with such a parameter requires the
# key of an operator or owner.
OperatorDep: TypeAlias = Annotated[str, Depends(require_operator)]
OwnerDep: TypeAlias = Annotated[str, Depends(require_owner)]


def admin_router(below: str = "") -> APIRouter:
    return APIRouter(
        prefix=PREFIX + below,
        tags=["admin"],
        dependencies=[Depends(require_operator)],
        route_class=JsonRoute,
    )

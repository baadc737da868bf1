"""A customer's key: who calls, whether they may, and whether they call too often."""

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, TypeAlias

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from comfyfleet.db import Tx
from comfyfleet.fleets import service as fleets
from comfyfleet.http.callers import caller_of
from comfyfleet.http.given import now_of, plane_of
from comfyfleet.http.public.rates import Fetches, Rates
from comfyfleet.kernel.errors import Forbidden, Unauthenticated
from comfyfleet.kernel.keys import fits
from comfyfleet.operators import service as operators
from comfyfleet.plane import Plane
from comfyfleet.tenants.keys import service as keys
from comfyfleet.tenants.keys.model import Caller, Scope

_bearer = HTTPBearer(
    auto_error=False, scheme_name="API key", description="Of a user of a tenant: `cf_…`."
)


def rates_of(request: Request) -> Rates:
    rates: Rates = request.app.state.rates
    return rates


async def fetches_of(request: Request) -> Fetches:
    fetches: Fetches = request.app.state.fetches
    return fetches


async def customer_calling(request: Request) -> Caller:
    """Asked before the request's body is read."""
    plane, now, bearer = plane_of(request), now_of(request), await _bearer(request)
    if bearer is None:
        raise Unauthenticated(
            "an API key is needed", hint="Send Authorization: Bearer KEY with a key of yours."
        )
    async with plane.central.look() as tx:
        caller = await _known(tx, plane, bearer.credentials, now)
    # Whatever keys they call by.
    rates_of(request).take(caller.user_id, now)
    tenant_rates: Rates = request.app.state.tenant_rates
    tenant_rates.take(caller.tenant.id, now)
    if not caller.key.is_use_noted(now):
        async with plane.central.begin() as tx:
            await keys.note_use(tx, caller.key, now=now)
    return caller


async def calling(
    request: Request, _described: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    return caller_of(request, Caller)


async def _known(tx: Tx, plane: Plane, key: str, now: datetime) -> Caller:
    try:
        return await keys.authenticate(tx, key, now=now)
    except Unauthenticated:
        if await _is_of_another_face(tx, plane, key):
            raise Forbidden("this key is not a customer's") from None
        raise


async def _is_of_another_face(tx: Tx, plane: Plane, key: str) -> bool:
    if fits(key, plane.admin_key.key_hash):
        return True
    for authenticate in (fleets.authenticate, operators.authenticate):
        try:
            await authenticate(tx, key)
        except Unauthenticated:
            continue
        return True
    return False


def _with(scope: Scope) -> Callable[[Caller], Awaitable[Caller]]:
    async def allowed(caller: Annotated[Caller, Depends(calling)]) -> Caller:
        caller.require(scope)
        return caller

    return allowed


# What an endpoint asks for says what its caller's key must allow.
Reader: TypeAlias = Annotated[Caller, Depends(_with(Scope.READ))]
Writer: TypeAlias = Annotated[Caller, Depends(_with(Scope.WRITE))]
KeyHolder: TypeAlias = Annotated[Caller, Depends(_with(Scope.KEYS))]
GivenFetches: TypeAlias = Annotated[Fetches, Depends(fetches_of)]

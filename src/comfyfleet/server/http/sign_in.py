"""Routes for sign-in, sign-out and the current session of browsers, under /api/session."""

import asyncio
from contextlib import suppress

from fastapi import APIRouter, Request, Response, status
from pydantic import Field

from comfyfleet.api.session import (
    SessionAnswer,
    SessionKind,
    SessionTenant,
    SessionUser,
    SignInWays,
)
from comfyfleet.errors import FleetError, Forbidden, NotFound, Unauthenticated
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.deps import (
    NowDep,
    PlaneDep,
    is_catalogue_public,
    local_access_of,
    problems,
)
from comfyfleet.server.http.local_access import is_from_here
from comfyfleet.server.http.middleware import WrongKeyThrottle
from comfyfleet.server.http.oidc import OidcProvider
from comfyfleet.server.http.request_body import Body, JsonRoute, Text
from comfyfleet.server.http.sessions import (
    SignedIn,
    clear_cookie,
    csrf_token,
    is_same_origin,
    require_csrf_token,
    secret_in,
    session_of,
    set_cookie,
    sign_in,
    sign_out,
)
from comfyfleet.server.sign_in_links import SignInLinks
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants import sessions
from comfyfleet.server.tenants.model import BrowserSession, Caller
from comfyfleet.server.tenants.sessions import SessionGrant

PATH = "/api/session"
KEY_CHARACTERS_MAX = 500
CLEAR = {"Clear-Site-Data": '"storage"'}
NOT_KEPT = {"Cache-Control": "no-store"}
router = APIRouter(
    prefix=PATH,
    tags=["session"],
    route_class=JsonRoute,
    responses=problems(400, 403, 413, 422, 429, 503),
)


class KeySignIn(Body):
    key: Text = Field(
        min_length=1,
        max_length=KEY_CHARACTERS_MAX,
        description="A user's key (`cf_…`), an operator's key (`cfo_…`) or the admin key.",
    )


class LocalSignIn(Body):
    secret: Text = Field(
        min_length=1,
        max_length=KEY_CHARACTERS_MAX,
        description="The one-time secret in the URL printed by `comfyfleet up` or `comfyfleet open`.",
    )


@router.get("")
async def show(plane: PlaneDep, request: Request, response: Response) -> SessionAnswer:
    """Returns the browser's current session and the available sign-in methods. The status is 200
    even if the browser isn't signed in."""
    response.headers.update(NOT_KEPT)
    session = await session_of(plane, request)
    secret = secret_in(request, plane.settings.public_url)
    if session is None or secret is None:
        public_catalogue = await is_catalogue_public(request)
        return SessionAnswer(
            signed_in=False, public_catalogue=public_catalogue, ways=_ways(request)
        )
    return await _answer(plane, request, SignedIn(session, secret))


@router.post("", responses=problems(401))
async def create(
    body: KeySignIn, plane: PlaneDep, now: NowDep, request: Request, response: Response
) -> SessionAnswer:
    """Signs in with a key. The session is stored in a cookie that scripts can't read.

    A browser can be signed in as an operator and as a customer at the same time.
    """
    require_page_of_ours(plane, request)
    wrong: WrongKeyThrottle = request.app.state.wrong_keys
    address = request.client.host if request.client else ""
    wrong.admit(address, body.key)
    try:
        async with plane.central.read() as tx:
            grant = await sessions.grant_of_key(
                tx, body.key, admin_key_hash=plane.admin_key.key_hash, now=now
            )
    except Unauthenticated:
        await wrong.delay(address)
        raise
    wrong.note_valid(body.key)
    return await _signed_in(plane, request, response, grant, "key")


@router.post("/local", responses=problems(404))
async def create_local(
    body: LocalSignIn, plane: PlaneDep, now: NowDep, request: Request, response: Response
) -> SessionAnswer:
    """Signs in as the first owner and the local user, with a one-time secret.

    The secret is part of the URL that `comfyfleet up` or `comfyfleet open` prints.
    """
    require_page_of_ours(plane, request)
    local = local_access_of(request)
    if local is None:
        raise NotFound("only `comfyfleet up` supports sign-in without a key")
    if not is_from_here(request):
        raise Forbidden(
            "to sign in without a key, use a browser on the machine that runs `comfyfleet up`"
        )
    async with plane.central.read() as tx:
        caller = await tenants.authenticate_key(tx, local.key, now=now)
    await _use_link(request, local.links, body.secret)
    grant = SessionGrant(customer=caller, is_first_owner=True)
    return await _signed_in(plane, request, response, grant, "local")


async def _use_link(request: Request, links: SignInLinks, secret: str) -> None:
    """Uses up a one-time secret.

    Raises Forbidden if the secret is invalid, after a delay that grows with each attempt, or
    TooManyCalls if too many attempts are waiting.
    """
    wrong: WrongKeyThrottle = request.app.state.wrong_keys
    address = request.client.host if request.client else ""
    wrong.admit(address, secret)
    if not await asyncio.to_thread(links.use, secret):
        await wrong.delay(address)
        raise Forbidden(
            "this sign-in link was already used, or comfyfleet was restarted; run `comfyfleet open`"
            " for a new link"
        )


@router.delete("", status_code=status.HTTP_204_NO_CONTENT)
async def delete(plane: PlaneDep, request: Request) -> Response:
    """Signs this browser out on every control plane. Repeated calls have no effect."""
    require_page_of_ours(plane, request)
    secret = secret_in(request, plane.settings.public_url)
    if secret is not None:
        require_csrf_token(request, secret)
    await sign_out(plane, request)
    response = Response(status_code=status.HTTP_204_NO_CONTENT, headers={**CLEAR, **NOT_KEPT})
    clear_cookie(response, plane, request)
    return response


def require_page_of_ours(plane: ControlPlane, request: Request) -> None:
    """Raises Forbidden if a page of another site tries to sign the browser in or out."""
    if not is_same_origin(request, plane.settings.public_url):
        raise Forbidden("pages of other sites can't sign users in or out")


async def _signed_in(
    plane: ControlPlane, request: Request, response: Response, grant: SessionGrant, way: str
) -> SessionAnswer:
    signed_in = await sign_in(plane, request, grant, way)
    set_cookie(response, plane, request, signed_in)
    response.headers.update(NOT_KEPT)
    return await _answer(plane, request, signed_in)


async def _answer(plane: ControlPlane, request: Request, signed_in: SignedIn) -> SessionAnswer:
    session = signed_in.session
    caller, operator = session.customer, session.operator
    kinds = _kinds(session)
    return SessionAnswer(
        signed_in=True,
        kind=kinds[0],
        kinds=kinds,
        tenant=SessionTenant(id=caller.tenant.id, name=caller.tenant.name) if caller else None,
        user=await _user(plane, caller) if caller else None,
        scopes=tuple(sorted(caller.key.scopes)) if caller else (),
        operator=operator.actor if operator else None,
        role=operator.role if operator else None,
        csrf=csrf_token(signed_in.secret),
        expires_at=session.until,
        public_catalogue=await is_catalogue_public(request),
        ways=_ways(request),
    )


def _kinds(session: BrowserSession) -> tuple[SessionKind, ...]:
    callers = (
        (SessionKind.OPERATOR, session.operator),
        (SessionKind.CUSTOMER, session.customer),
    )
    return tuple(kind for kind, caller in callers if caller is not None)


async def _user(plane: ControlPlane, caller: Caller) -> SessionUser:
    """Returns the signed-in user, without name and email if the tenant's database is down."""
    with suppress(FleetError):
        async with plane.pools[caller.tenant.pool].read() as tx:
            user = await tenants.get_user(tx, caller.tenant.id, caller.user_id)
        return SessionUser(id=user.id, name=user.name, email=user.email)
    return SessionUser(id=caller.user_id)


def _ways(request: Request) -> SignInWays:
    local = local_access_of(request)
    provider: OidcProvider | None = request.app.state.oidc
    name = provider.settings.oidc_name if provider else None
    return SignInWays(
        key=True,
        one_click=local is not None and is_from_here(request),
        oidc=provider is not None,
        oidc_name=name,
    )

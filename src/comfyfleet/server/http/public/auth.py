"""Authenticates customers, applies rate limits, and creates the routers of the public API."""

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address, ip_network
from typing import Annotated, TypeAlias
from uuid import UUID, uuid5

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from comfyfleet.errors import Forbidden, InvalidInput, TooManyCalls, Unauthenticated
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.http.deps import local_access_of, now_of, plane_of, problems
from comfyfleet.server.http.middleware import caller_of
from comfyfleet.server.http.request_body import Body as Body
from comfyfleet.server.http.request_body import JsonRoute
from comfyfleet.server.http.request_body import Text as Text
from comfyfleet.server.http.sessions import trusted_session
from comfyfleet.server.secrets import is_key_of_hash
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import Caller, Scope

# Maximum number of callers whose rate is tracked. The least recent ones are forgotten.
KEPT_MAX = 100_000
# Maximum numbers of concurrent fetches, per user and in total.
FETCHES_PER_USER_MAX = 3
FETCHES_MAX = 50
FETCH_RETRY_SECONDS = 10
# Rate limit per IP address for requests without a key. It only protects the database, because keys
# are too long to guess.
STRANGERS_PER_SECOND, STRANGERS_AT_ONCE = 20.0, 200
ADDRESSES = UUID("5f9a6c1e-3c54-4d0e-9a6b-0d3a6f3d7c11")


@dataclass(slots=True)
class _Bucket:
    remaining: float
    at: datetime


class RateLimiter:
    """Limits the rate of requests per caller. Short bursts are allowed."""

    def __init__(self, whose: str, *, per_second: float, at_once: int) -> None:
        self._whose = whose
        self._per_second = per_second
        self._at_once = at_once
        self._buckets: OrderedDict[UUID, _Bucket] = OrderedDict()

    def take(self, who: UUID, now: datetime) -> None:
        """Counts a request. If the limit is exceeded, raises TooManyCalls with the seconds until
        the next request is allowed."""
        bucket = self._buckets.setdefault(who, _Bucket(self._at_once, now))
        self._buckets.move_to_end(who)
        if len(self._buckets) > KEPT_MAX:
            self._buckets.popitem(last=False)
        seconds = max(0.0, (now - bucket.at).total_seconds())
        bucket.remaining = min(self._at_once, bucket.remaining + seconds * self._per_second)
        bucket.at = now
        if bucket.remaining < 1:
            wait = (1 - bucket.remaining) / self._per_second
            raise TooManyCalls(
                f"rate limit exceeded: {self._per_second:g} requests per second per {self._whose}",
                retry_after_seconds=round(wait, 3),
            )
        bucket.remaining -= 1


class FetchLimiter:
    """Limits concurrent fetches of customers' URLs, so that a slow server affects only the user who
    requested the fetch."""

    def __init__(self) -> None:
        self._open: Counter[UUID] = Counter()

    @contextmanager
    def slot(self, user_id: UUID) -> Iterator[None]:
        if self._open[user_id] >= FETCHES_PER_USER_MAX or self._open.total() >= FETCHES_MAX:
            raise TooManyCalls(
                "too many files are being fetched from URLs",
                retry_after_seconds=FETCH_RETRY_SECONDS,
            )
        self._open[user_id] += 1
        try:
            yield
        finally:
            self._open[user_id] -= 1
            self._open += Counter()  # drops zero counts


_bearer = HTTPBearer(
    auto_error=False, scheme_name="API key", description="The API key of a user (`cf_…`)."
)


def rate_limiter_of(request: Request) -> RateLimiter:
    rates: RateLimiter = request.app.state.rates
    return rates


def admit_stranger(request: Request, now: datetime) -> None:
    """Applies the rate limit for requests without a key, per IP address."""
    rates: RateLimiter = request.app.state.stranger_rates
    rates.take(uuid5(ADDRESSES, _network(request.client.host if request.client else "")), now)


def _network(address: str) -> str:
    """Returns the address or network that counts as one client.

    For IPv6 this is the /64 network, because a single subscriber usually has a whole /64.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    is_plain = parsed.version == 4 or parsed.ipv4_mapped is not None
    return address if is_plain else str(ip_network((parsed, 64), strict=False))


async def fetch_limiter_of(request: Request) -> FetchLimiter:
    fetches: FetchLimiter = request.app.state.fetches
    return fetches


async def authenticate_customer(request: Request) -> Caller:
    """Authenticates a customer by key or browser session before the request body is read, and
    applies rate limits."""
    plane, now, bearer = plane_of(request), now_of(request), await _bearer(request)
    if bearer is None:
        local = local_access_of(request)
        if local is not None and await local.admits_program(request):
            async with plane.central.read() as tx:
                return await tenants.authenticate_key(tx, local.key, now=now)
        caller = await _signed_in(plane, request)
    else:
        async with plane.central.read() as tx:
            caller = await _authenticate(tx, plane, bearer.credentials, now)
    # The rate limit applies per user, so that several keys don't increase it.
    rate_limiter_of(request).take(caller.user_id, now)
    tenant_rates: RateLimiter = request.app.state.tenant_rates
    tenant_rates.take(caller.tenant.id, now)
    if not caller.key.is_use_recorded(now):
        async with plane.central.transaction() as tx:
            await tenants.note_key_use(tx, caller.key, now=now)
    return caller


async def _signed_in(plane: ControlPlane, request: Request) -> Caller:
    session = await trusted_session(plane, request)
    if session is None or session.customer is None:
        raise Unauthenticated(
            "an API key is required", hint="Send Authorization: Bearer KEY with one of your keys."
        )
    return session.customer


async def current_customer(
    request: Request, _described: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    return caller_of(request, Caller)


async def _authenticate(tx: Tx, plane: ControlPlane, key: str, now: datetime) -> Caller:
    try:
        return await tenants.authenticate_key(tx, key, now=now)
    except Unauthenticated:
        if await _is_key_of_another_role(tx, plane, key):
            raise Forbidden("this key doesn't belong to a customer") from None
        raise


async def _is_key_of_another_role(tx: Tx, plane: ControlPlane, key: str) -> bool:
    if is_key_of_hash(key, plane.admin_key.key_hash):
        return True
    for authenticate in (fleets.authenticate_worker, tenants.authenticate_operator):
        try:
            await authenticate(tx, key)
        except Unauthenticated:
            continue
        return True
    return False


def _require_scope(scope: Scope) -> Callable[[Caller], Awaitable[Caller]]:
    async def allowed(caller: Annotated[Caller, Depends(current_customer)]) -> Caller:
        caller.require(scope)
        return caller

    return allowed


# Annotations for an endpoint's `caller` parameter. They define the scope that the key requires.
Reader: TypeAlias = Annotated[Caller, Depends(_require_scope(Scope.READ))]
Writer: TypeAlias = Annotated[Caller, Depends(_require_scope(Scope.WRITE))]
KeyHolder: TypeAlias = Annotated[Caller, Depends(_require_scope(Scope.KEYS))]
FetchLimiterDep: TypeAlias = Annotated[FetchLimiter, Depends(fetch_limiter_of)]


PAGE_MAX = 100
PAGE_USUAL = 20
WAIT_SECONDS_MAX = 60
KEY_CHARACTERS_MAX = 200
IDEMPOTENCY_HEADER = "Idempotency-Key"


Limit: TypeAlias = Annotated[int, Query(ge=1, le=PAGE_MAX, description="Maximum number of rows.")]
Wait: TypeAlias = Annotated[
    float,
    Query(
        ge=0,
        le=WAIT_SECONDS_MAX,
        description="Maximum seconds to wait for the job to finish before responding.",
    ),
]


IdempotencyHeader: TypeAlias = Annotated[
    str | None,
    Header(
        alias=IDEMPOTENCY_HEADER,
        min_length=1,
        max_length=KEY_CHARACTERS_MAX,
        description="The idempotency key, as an alternative to `idempotency_key` in the body.",
    ),
]


def idempotency_key(of_body: str | None, of_header: str | None) -> str | None:
    """Returns the idempotency key from the body or the header.

    Raises InvalidInput if they differ, because ignoring one of them could charge a customer twice.
    """
    if of_header is None or of_header == of_body:
        return of_body
    if of_body is not None:
        raise InvalidInput(
            f"idempotency_key differs from the header {IDEMPOTENCY_HEADER}; send only one of them",
            field="idempotency_key",
        )
    if not 0 < len(of_header) <= KEY_CHARACTERS_MAX:
        raise InvalidInput(
            f"{IDEMPOTENCY_HEADER} must have 1 to {KEY_CHARACTERS_MAX} characters",
            field="idempotency_key",
        )
    return of_header


def public_router(tag: str) -> APIRouter:
    return APIRouter(
        prefix="/api",
        tags=[tag],
        route_class=JsonRoute,
        responses=problems(400, 401, 403, 413, 422, 429, 503),
    )

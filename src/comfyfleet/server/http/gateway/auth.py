"""Authenticates callers of the gateway.

Keys are accepted as a bearer key, basic auth, a token in the query or a part of the path. Browsers
may use a session. Under `comfyfleet up`, programs on this machine need no key.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import parse_qs, quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from comfyfleet.errors import Unauthenticated
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.connections import note_valid_key
from comfyfleet.server.http.local_access import LocalAccess
from comfyfleet.server.http.middleware import WrongKeyThrottle
from comfyfleet.server.http.public.auth import RateLimiter
from comfyfleet.server.http.sessions import is_reading, require_own_page, session_of
from comfyfleet.server.http.tallies import holders_of
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import API_KEY_PREFIX, Caller
from comfyfleet.server.tenants.model import Scope as KeyScope

KEY_PREFIX = "/k/"
# The scope entry with the path prefix that contains the key. Links to the gateway start with it.
KEY_PREFIX_SCOPE = "comfyfleet.key_prefix"


class KeyInPath:
    """Treats `/k/<key>/prompt` as `/prompt` with that key, for clients that can only be configured
    with a URL.

    It is the outermost middleware, so that no log contains the key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not scope["path"].startswith(KEY_PREFIX):
            await self._app(scope, receive, send)
            return

        async def send_without_referrer(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The page's URL contains the key, so it must not be sent to other sites as a
                # referrer.
                MutableHeaders(scope=message).setdefault("referrer-policy", "no-referrer")
            await send(message)

        await self._app(_without_key(scope), receive, send_without_referrer)


def _without_key(scope: Scope) -> Scope:
    key, _, rest = scope["path"].removeprefix(KEY_PREFIX).partition("/")
    raw: bytes = (scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0]
    # If the key contains an encoded slash, the raw path has fewer parts than the path.
    parts = raw.split(b"/", 3) if raw.count(b"/") == scope["path"].count("/") else []
    raw_rest = parts[3] if len(parts) > 3 else b""
    headers = [header for header in scope["headers"] if header[0] != b"authorization"]
    bearer = (b"authorization", f"Bearer {key}".encode("latin-1", "replace"))
    return {
        **scope,
        KEY_PREFIX_SCOPE: f"{KEY_PREFIX}{quote(key)}",
        "path": f"/{rest}",
        "raw_path": b"/" + raw_rest,
        "headers": [*headers, bearer],
    }


class GivenKey(NamedTuple):
    """A key that a request contains.

    `is_ambient` means that browsers also send the key with requests from pages of other sites, so
    the page's origin must be checked.
    """

    key: str
    is_ambient: bool = False
    is_local: bool = False


def keys_in(connection: HTTPConnection) -> Iterator[GivenKey]:
    """Yields all keys in a request, in order of precedence."""
    headers: Headers = connection.headers
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        yield GivenKey(credentials.strip())
    elif scheme.lower() == "basic":
        yield from (GivenKey(key, is_ambient=True) for key in _basic(credentials))
    query: str = connection.scope.get("query_string", b"").decode("latin-1")
    yield from (GivenKey(key) for key in parse_qs(query).get("token", [])[:1])


def _basic(credentials: str) -> Iterator[str]:
    """Yields the keys among the password and user name of basic auth.

    Other values are ignored. ComfyUI ignores credentials, so some clients send `undefined` or
    credentials for other servers.
    """
    try:
        user, _, password = base64.b64decode(credentials, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return
    yield from (text for text in (password, user) if text.startswith(API_KEY_PREFIX))


async def authenticate(
    plane: ControlPlane, connection: HTTPConnection, local: LocalAccess | None
) -> Caller:
    """Authenticates a request and returns its caller.

    Raises Unauthenticated, Forbidden or TooManyCalls.
    """
    key = next(keys_in(connection), None)
    session = await session_of(plane, connection) if key is None else None
    if session is not None and session.customer is not None:
        require_own_page(connection, plane.settings.public_url)
        caller = session.customer
        await _count_call(plane, connection, caller)
    else:
        caller = await _by_key(plane, connection, key, local)
    caller.require(KeyScope.READ if is_reading(connection) else KeyScope.WRITE)
    return caller


async def _by_key(
    plane: ControlPlane,
    connection: HTTPConnection,
    key: GivenKey | None,
    local: LocalAccess | None,
) -> Caller:
    if key is None and local is not None and await local.admits(connection):
        key = GivenKey(local.key, is_ambient=True, is_local=True)
    if key is None:
        hint = "Send it as Authorization: Bearer KEY or ?token=KEY, or use the path /k/KEY/."
        if local is not None:
            hint += " The user of `comfyfleet up` needs no key at the URL that the command printed."
        raise Unauthenticated("an API key is required", hint=hint)
    if key.is_ambient:
        require_own_page(connection, plane.settings.public_url)
    return await authenticate_key(plane, connection, key)


async def authenticate_key(
    plane: ControlPlane, connection: HTTPConnection, key: GivenKey
) -> Caller:
    """Authenticates a key and returns its caller.

    Raises TooManyCalls, or Unauthenticated after a delay that increases with each wrong key.
    """
    throttle: WrongKeyThrottle = connection.app.state.wrong_keys
    address, now = connection.client.host if connection.client else "", plane.clock()
    throttle.admit(address, key.key)
    try:
        async with plane.central.read() as tx:
            caller = await tenants.authenticate_key(tx, key.key, now=now)
    except Unauthenticated:
        throttle.forget(key.key)
        await throttle.delay(address)
        raise
    throttle.note_valid(key.key)
    await _count_call(plane, connection, caller, is_local=key.is_local)
    return caller


async def _count_call(
    plane: ControlPlane, connection: HTTPConnection, caller: Caller, *, is_local: bool = False
) -> None:
    now = plane.clock()
    note_valid_key(connection.scope, *holders_of(caller))
    # Programs on this machine have no rate limit, because they share a user and can only overload
    # their own machine.
    if not is_local:
        rates: tuple[RateLimiter, RateLimiter] = connection.app.state.gateway_rates
        rates[0].take(caller.user_id, now)
        rates[1].take(caller.tenant.id, now)
    if not caller.key.is_use_recorded(now):
        async with plane.central.transaction() as tx:
            await tenants.note_key_use(tx, caller.key, now=now)

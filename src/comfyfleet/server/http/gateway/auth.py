"""Who calls the gateway: by a bearer key, basic auth, a token in the query, a cookie, a key in the path, or from this
machine without any."""

import base64
import binascii
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from comfyfleet.errors import Forbidden, Unauthenticated
from comfyfleet.protocol.http import is_local_name
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import Caller
from comfyfleet.server.tenants.model import Scope as KeyScope

COOKIE = "comfyfleet_key"
KEY_PREFIX = "/k/"
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "x-forwarded-host", "via")


class KeyInPath:
    """`/k/<key>/prompt` is `/prompt` with that key: for clients that can only be given an address.

    It stands before everything else, so that no log sees the key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"].startswith(KEY_PREFIX):
            key, _, rest = scope["path"].removeprefix(KEY_PREFIX).partition("/")
            raw: bytes = scope.get("raw_path") or scope["path"].encode()
            raw_rest = raw.split(b"/", 3)[3] if raw.count(b"/") >= 3 else b""
            headers = [each for each in scope["headers"] if each[0] != b"authorization"]
            headers.append((b"authorization", f"Bearer {key}".encode("latin-1", "replace")))
            scope = {
                **scope,
                "path": f"/{rest}",
                "raw_path": b"/" + raw_rest,
                "headers": headers,
            }
        await self._app(scope, receive, send)


def keys_in(connection: HTTPConnection) -> Iterator[str]:
    """Every key that a request names itself, in the order in which they count."""
    headers: Headers = connection.headers
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and given:
        yield given.strip()
    elif scheme.lower() == "basic":
        yield from _basic(given)
    query: str = connection.scope.get("query_string", b"").decode("latin-1")
    yield from parse_qs(query).get("token", [])[:1]


def _cookie_key(connection: HTTPConnection, public_url: str) -> str | None:
    """A browser sends its cookie whatever page makes it call: only pages of ours may change anything."""
    key = connection.cookies.get(COOKIE)
    is_reading = connection.scope.get("method") in ("GET", "HEAD")
    if key and not is_reading and not is_same_origin(connection, public_url):
        raise Forbidden("a cookie counts only for pages of this server")
    return key


def is_same_origin(connection: HTTPConnection, public_url: str) -> bool:
    """Whether no page of another origin has made a browser send this. Programs name no origin."""
    headers = connection.headers
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    if origin is None:
        return True
    # Behind a proxy that ends TLS the scheme is not ours to compare.
    own = (headers.get("host", ""), urlsplit(public_url).netloc)
    return urlsplit(origin).netloc.lower() in [each.lower() for each in own if each]


def _basic(given: str) -> Iterator[str]:
    """The key as password, or as the name of the user."""
    try:
        user, _, password = base64.b64decode(given, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return
    if password or user:
        yield password or user


async def authenticate(
    plane: ControlPlane, connection: HTTPConnection, local_key: str | None
) -> Caller:
    """Raises Unauthenticated."""
    key = next(keys_in(connection), None) or _cookie_key(connection, plane.settings.public_url)
    if key is None and local_key is not None and is_from_here(connection):
        key = local_key
    if key is None:
        raise Unauthenticated(
            "an API key is needed",
            hint="Send it as Authorization: Bearer KEY, as ?token=KEY, or use the address /k/KEY/.",
        )
    return await authenticate_key(plane, key)


async def authenticate_key(plane: ControlPlane, key: str) -> Caller:
    """Raises Unauthenticated, or Forbidden where it may only look."""
    async with plane.central.read() as tx:
        caller = await tenants.authenticate_key(tx, key, now=plane.clock())
    caller.require(KeyScope.WRITE)
    return caller


def is_from_here(connection: HTTPConnection) -> bool:
    """From a program of this machine that names it as such: neither a proxy nor a page of another site."""
    address = connection.client.host if connection.client else ""
    headers = connection.headers
    is_forwarded = any(name in headers for name in FORWARDED)
    return address in LOOPBACK and is_local_name(headers.get("host")) and not is_forwarded

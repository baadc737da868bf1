"""Manages browser sessions with their cookies and CSRF tokens, and detects requests from pages of
other sites."""

import hashlib
import hmac
import re
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import Response

from comfyfleet.errors import Forbidden
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.http.connections import note_valid_key
from comfyfleet.server.http.tallies import holders_of
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.server.secrets import KEY_CHARACTERS, new_key
from comfyfleet.server.tenants import sessions
from comfyfleet.server.tenants.model import BrowserSession
from comfyfleet.server.tenants.sessions import NewSession, SessionGrant

COOKIE = "comfyfleet_session"
# Browsers accept a cookie with the prefix `__Host-` only over TLS and only from this host, not from
# other hosts of its domain.
SECURE_COOKIE = f"__Host-{COOKIE}"
CSRF_HEADER = "X-CSRF-Token"
READING = ("GET", "HEAD", "OPTIONS")
_SECRET = re.compile(rf"[0-9a-f]{{{KEY_CHARACTERS}}}")


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A session with the secret in its cookie."""

    session: BrowserSession
    secret: str


def secret_in(connection: HTTPConnection, public_url: str) -> str | None:
    """Returns the secret in the session cookie, or None if there is no valid cookie."""
    secret = connection.cookies.get(_cookie_name(is_secure(connection, public_url)), "")
    return secret if _SECRET.fullmatch(secret) else None


def csrf_token(secret: str) -> str:
    """Returns the token that our pages send as a header with every change. Other sites can't read
    it."""
    return hmac.new(secret.encode(), b"csrf", hashlib.sha256).hexdigest()


async def session_of(plane: ControlPlane, connection: HTTPConnection) -> BrowserSession | None:
    """Returns the browser's session, or None if it isn't signed in.

    Doesn't check whether a page of another site sent the request.
    """
    secret = secret_in(connection, plane.settings.public_url)
    if secret is None:
        return None
    async with plane.central.read() as tx:
        session = await sessions.find_session(
            tx, secret, admin_key_hash=plane.admin_key.key_hash, now=plane.clock()
        )
    if session is not None:
        note_valid_key(connection.scope, *holders_of(session))
    return session


async def trusted_session(plane: ControlPlane, connection: HTTPConnection) -> BrowserSession | None:
    """Returns the browser's session like `session_of`, but raises Forbidden if a page of another
    site sent the request."""
    public_url = plane.settings.public_url
    secret = secret_in(connection, public_url)
    if secret is None:
        return None
    require_own_page(connection, public_url)
    if not is_reading(connection):
        require_csrf_token(connection, secret)
    return await session_of(plane, connection)


def require_own_page(connection: HTTPConnection, public_url: str) -> None:
    """Raises Forbidden if a page of another site sent the request.

    Links on other sites are allowed, because following a link changes nothing and the other site
    can't read the response.
    """
    mode = connection.headers.get("sec-fetch-mode")
    is_link = is_reading(connection) and mode == "navigate"
    if not is_link and not is_same_origin(connection, public_url):
        raise Forbidden("pages of other sites can't use this browser's session")


def require_csrf_token(connection: HTTPConnection, secret: str) -> None:
    token = connection.headers.get(CSRF_HEADER, "")
    if not hmac.compare_digest(token.encode(), csrf_token(secret).encode()):
        raise Forbidden(
            f"requests with a browser session must send {CSRF_HEADER} with every change",
            header=CSRF_HEADER,
            hint="GET /api/session returns the token as csrf. Programs should send a key instead.",
        )


async def sign_in(
    plane: ControlPlane, connection: HTTPConnection, grant: SessionGrant, way: str
) -> SignedIn:
    """Opens a session and records the sign-in in the audit log, with `way` as the sign-in method.

    If the browser is already signed in with another role, it keeps that role.
    """
    secret, now = new_key(), plane.clock()
    new = NewSession(
        id=plane.context.new_id(),
        secret=secret,
        grant=grant,
        replaces=secret_in(connection, plane.settings.public_url),
    )
    async with plane.central.transaction() as tx:
        session = await sessions.open_session(
            tx,
            new,
            settings=plane.settings,
            admin_key_hash=plane.admin_key.key_hash,
            now=now,
        )
        await _audit(tx, _granted(session, grant), "sign_in", now, way=way)
    return SignedIn(session, secret)


def _granted(session: BrowserSession, grant: SessionGrant) -> BrowserSession:
    """Returns a copy of the session with only the newly granted role."""
    is_operators = grant.operator is not None or grant.is_first_owner
    return BrowserSession(
        session.id,
        customer=session.customer if grant.customer is not None else None,
        operator=session.operator if is_operators else None,
    )


async def _audit(
    tx: Tx, session: BrowserSession, action: str, now: datetime, **details: object
) -> None:
    subject = f"session:{session.id}"
    if session.operator is not None:
        await record_audit(tx, session.operator.actor, action, subject, now, **details)
    if (caller := session.customer) is not None:
        by = {"user_id": caller.user_id, "by_key": caller.key.id, **details}
        await record_audit(tx, caller.tenant.subject, action, subject, now, caller.tenant.id, **by)


async def sign_out(plane: ControlPlane, connection: HTTPConnection) -> None:
    """Ends the session on every control plane. Repeated calls have no effect."""
    secret, session = secret_in(connection, plane.settings.public_url), None
    if secret is not None:
        session = await session_of(plane, connection)
    if secret is None or session is None:
        return
    async with plane.central.transaction() as tx:
        await sessions.end_session(tx, secret)
        await _audit(tx, session, "sign_out", plane.clock())


def set_cookie(
    response: Response, plane: ControlPlane, connection: HTTPConnection, signed_in: SignedIn
) -> None:
    secure = is_secure(connection, plane.settings.public_url)
    session, now = signed_in.session, plane.clock()
    ends = filter(None, (session.customer_until, session.operator_until))
    response.set_cookie(
        _cookie_name(secure),
        signed_in.secret,
        max_age=max(int((end - now).total_seconds()) for end in ends),
        httponly=True,
        samesite="strict",
        secure=secure,
    )


def clear_cookie(response: Response, plane: ControlPlane, connection: HTTPConnection) -> None:
    """Deletes the session cookie. Over plain HTTP, a browser ignores changes to the secure cookie,
    so only the cookie that matches the request is deleted."""
    secure = is_secure(connection, plane.settings.public_url)
    response.delete_cookie(_cookie_name(secure), httponly=True, samesite="strict", secure=secure)


def _cookie_name(secure: bool) -> str:
    return SECURE_COOKIE if secure else COOKIE


def is_secure(connection: HTTPConnection, public_url: str) -> bool:
    """Checks whether the browser uses TLS, directly or to a proxy in front of us."""
    forwarded_scheme = connection.headers.get("x-forwarded-proto", "").partition(",")[0].strip()
    if not {"https", "wss"}.isdisjoint((connection.scope.get("scheme"), forwarded_scheme)):
        return True
    host = connection.headers.get("host", "")
    return public_url.startswith("https:") and place_of(f"//{host}") == place_of(public_url)


def is_reading(connection: HTTPConnection) -> bool:
    return connection.scope["type"] == "websocket" or connection.scope["method"] in READING


def is_same_origin(connection: HTTPConnection, public_url: str) -> bool:
    """Checks that the request wasn't sent by a page of another origin.

    Another port of the same machine is another origin as well. Programs send no Origin header and
    pass the check.
    """
    headers = connection.headers
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    own = (f"//{headers.get('host', '')}", public_url)
    return origin is None or place_of(origin) in [place_of(url) for url in own if url]


def place_of(url: str) -> tuple[str | None, int | None]:
    """Returns the host and port of a URL. The default ports 80 and 443 count as equal, because a
    proxy may have terminated TLS."""
    try:
        parts = urlsplit(url.lower())
        port = parts.port
    except ValueError:
        return url, None
    return parts.hostname or url, None if port in (80, 443) else port

"""Browser sign-in with OpenID Connect.

The browser is redirected to the identity provider and returns with a code that no other browser can
use.
"""

import hashlib
import hmac
import json
import logging
import re
from base64 import b64encode, urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as BadBase64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from fastapi import APIRouter, FastAPI, Request, Response

from comfyfleet.errors import (
    FleetError,
    Forbidden,
    InputUnavailable,
    InvalidInput,
    NotFound,
    ServerUnavailable,
    TooManyCalls,
    Unauthenticated,
    UnexpectedAnswer,
)
from comfyfleet.protocol.http import is_local_name
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.deps import PlaneDep
from comfyfleet.server.http.middleware import WrongKeyThrottle
from comfyfleet.server.http.sessions import is_secure, set_cookie, sign_in
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.server.secrets import KEY_CHARACTERS, new_key
from comfyfleet.server.tenants import identities
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.identities import Identity
from comfyfleet.server.tenants.model import Caller, Operator
from comfyfleet.server.tenants.sessions import SessionGrant
from comfyfleet.settings import Settings
from comfyfleet.transport.names import NameLookups, resolve_host

if TYPE_CHECKING:
    from joserfc.jwk import KeySet

logger = logging.getLogger(__name__)
router = APIRouter(prefix="/auth/oidc", include_in_schema=False)
CALLBACK = "/auth/oidc/callback"
SIGN_IN_PAGE = "/sign-in"
COOKIE = "comfyfleet_oidc"
# Seconds within which a sign-in must be completed.
FLOW_SECONDS = 600
# Timeout and maximum size of the provider's responses.
ANSWER_SECONDS = 10.0
ANSWER_BYTES_MAX = 1024**2
# Seconds for which the provider's metadata and keys are cached.
CACHE_SECONDS = 3600.0
# Minimum seconds between two reads of the provider's keys. The keys are read again when a token is
# signed with an unknown key.
KEYS_AGAIN_SECONDS = 60.0
CLOCK_LEEWAY_SECONDS = 60
EXCHANGES_AT_ONCE_MAX = 20
NEXT_CHARACTERS_MAX = 500
CODE_CHARACTERS_MAX = 4096
# Accepted signature algorithms. All use the provider's private key. Unsigned tokens and signatures
# with a shared secret are rejected.
ALGORITHMS = [
    f"{kind}{bits}" for kind in ("RS", "PS", "ES") for bits in (256, 384, 512)
] + ["EdDSA", "Ed25519"]  # fmt: skip
_FLOW = re.compile(rf"([0-9a-f]{{{KEY_CHARACTERS}}})\.([A-Za-z0-9_-]*=*)")
_PATH = re.compile(r"/(?![/\\])[^\\\s\x00-\x1f\x7f]*")


@dataclass(frozen=True, slots=True)
class SignInFlow:
    """A sign-in at the provider. All values that must be unguessable are derived from a secret in a
    cookie."""

    secret: str
    next: str

    def part(self, name: str) -> str:
        return hmac.new(self.secret.encode(), name.encode(), hashlib.sha256).hexdigest()

    @property
    def challenge(self) -> str:
        digest = hashlib.sha256(self.part("verifier").encode()).digest()
        return urlsafe_b64encode(digest).rstrip(b"=").decode()

    @property
    def cookie(self) -> str:
        return f"{self.secret}.{urlsafe_b64encode(self.next.encode()).decode()}"


def flow_from(cookie: str) -> SignInFlow | None:
    match = _FLOW.fullmatch(cookie)
    if match is None:
        return None
    try:
        return SignInFlow(match[1], safe_path(urlsafe_b64decode(match[2]).decode()))
    except (BadBase64, UnicodeDecodeError):
        return None


def safe_path(path: str) -> str:
    """Returns the path if it is on this site, and otherwise the path of the start page."""
    is_safe = len(path) <= NEXT_CHARACTERS_MAX and _PATH.fullmatch(path) is not None
    return path if is_safe else "/"


class OidcProvider:
    """The configured identity provider, with its endpoints and the claims in its tokens."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = monotonic) -> None:
        self.settings = settings
        self.rules = identities.rules_from(settings)
        self._issuer = _checked_url(settings.oidc_issuer, "COMFYFLEET_OIDC_ISSUER")
        if not settings.oidc_client_id:
            raise InvalidInput("COMFYFLEET_OIDC_CLIENT_ID is missing", field="oidc_client_id")
        self._clock = clock
        self._metadata: tuple[float, Mapping[str, Any]] | None = None
        self._keys: tuple[float, KeySet] | None = None
        self._exchanges = 0

    @property
    def redirect_uri(self) -> str:
        return self.settings.public_url.rstrip("/") + CALLBACK

    async def authorization_url(self, flow: SignInFlow) -> str:
        metadata = await self._read_metadata()
        query = {
            "response_type": "code",
            "client_id": self.settings.oidc_client_id,
            "redirect_uri": self.redirect_uri,
            "scope": self.settings.oidc_scopes,
            "state": flow.part("state"),
            "nonce": flow.part("nonce"),
            "code_challenge": flow.challenge,
            "code_challenge_method": "S256",
        }
        page = str(metadata["authorization_endpoint"])
        return f"{page}{'&' if '?' in page else '?'}{urlencode(query)}"

    async def identity(self, code: str, flow: SignInFlow) -> Identity:
        """Exchanges the code for a token and returns the identity in it.

        Raises Unauthenticated, ServerUnavailable or TooManyCalls.
        """
        if self._exchanges >= EXCHANGES_AT_ONCE_MAX:
            raise TooManyCalls("too many concurrent sign-ins", retry_after_seconds=ANSWER_SECONDS)
        self._exchanges += 1
        try:
            return await self._identity(code, flow)
        finally:
            self._exchanges -= 1

    async def _identity(self, code: str, flow: SignInFlow) -> Identity:
        metadata = await self._read_metadata()
        token = await self._exchange(metadata, code, flow)
        claims = await self._claims(metadata, token, flow)
        return Identity(self._issuer, claims)

    async def _exchange(
        self, metadata: Mapping[str, Any], code: str, flow: SignInFlow
    ) -> Mapping[str, Any]:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.redirect_uri,
            "client_id": self.settings.oidc_client_id,
            "code_verifier": flow.part("verifier"),
        }
        headers: dict[str, str] = {}
        if secret := self.settings.oidc_client_secret:
            default = ["client_secret_basic"]
            methods = metadata.get("token_endpoint_auth_methods_supported") or default
            if "client_secret_basic" in methods:
                pair = f"{quote(self.settings.oidc_client_id, '')}:{quote(secret, '')}"
                headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
            else:
                form["client_secret"] = secret
        return await _json_from("POST", str(metadata["token_endpoint"]), form, headers)

    async def _claims(
        self, metadata: Mapping[str, Any], token: Mapping[str, Any], flow: SignInFlow
    ) -> Mapping[str, Any]:
        from authlib.oidc.core import CodeIDToken
        from joserfc import jwt
        from joserfc.errors import InvalidKeyIdError, JoseError

        signed, keys = str(token.get("id_token") or ""), await self._read_keys(metadata)
        try:
            try:
                decoded = jwt.decode(signed, keys, algorithms=ALGORITHMS)
            except InvalidKeyIdError:
                keys = await self._read_keys(metadata, is_unknown=True)
                decoded = jwt.decode(signed, keys, algorithms=ALGORITHMS)
            required = {
                "iss": {"essential": True, "value": self._issuer},
                "aud": {"essential": True, "value": self.settings.oidc_client_id},
                "sub": {"essential": True},
            }
            parameters = {
                "nonce": flow.part("nonce"),
                "client_id": self.settings.oidc_client_id,
                "access_token": token.get("access_token"),
            }
            claims = CodeIDToken(decoded.claims, decoded.header, required, parameters)
            claims.validate(leeway=CLOCK_LEEWAY_SECONDS)
        except (JoseError, ValueError, TypeError, KeyError) as error:
            raise Unauthenticated(
                f"the identity provider's token is invalid: {type(error).__name__}"
            ) from error
        return dict(claims)

    async def _read_metadata(self) -> Mapping[str, Any]:
        if self._metadata is not None and self._clock() - self._metadata[0] < CACHE_SECONDS:
            return self._metadata[1]
        url = f"{self._issuer.rstrip('/')}/.well-known/openid-configuration"
        document = await _json_from("GET", url)
        if document.get("issuer") != self._issuer:
            raise UnexpectedAnswer(
                "the identity provider's issuer doesn't match COMFYFLEET_OIDC_ISSUER"
            )
        for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
            try:
                _checked_url(str(document.get(name) or ""), name)
            except InvalidInput as error:
                raise UnexpectedAnswer(error.message) from None
        self._metadata = self._clock(), document
        return document

    async def _read_keys(
        self, metadata: Mapping[str, Any], *, is_unknown: bool = False
    ) -> "KeySet":
        from joserfc.jwk import KeySet

        cache_seconds = KEYS_AGAIN_SECONDS if is_unknown else CACHE_SECONDS
        if self._keys is not None and self._clock() - self._keys[0] < cache_seconds:
            return self._keys[1]
        key_set = await _json_from("GET", str(metadata["jwks_uri"]))
        try:
            keys = KeySet.import_key_set(key_set)  # type: ignore[arg-type]
        except (ValueError, KeyError, TypeError) as error:
            raise UnexpectedAnswer("the identity provider's keys can't be parsed") from error
        self._keys = self._clock(), keys
        return keys


def _checked_url(url: str, name: str) -> str:
    """Checks that a URL uses TLS, and returns it. A provider on this machine may use plain HTTP."""
    parts = urlsplit(url)
    is_local = parts.scheme == "http" and is_local_name(parts.netloc)
    if not parts.hostname or not (parts.scheme == "https" or is_local):
        raise InvalidInput(f"{name} must be a URL with https://, not {url!r}", field=name)
    return url


async def _json_from(
    method: str,
    url: str,
    form: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Mapping[str, Any]:
    """Sends a request to the provider and returns its response, which must be a small JSON object.

    Redirects aren't followed. Raises ServerUnavailable, UnexpectedAnswer or Unauthenticated.
    """
    import httpx  # imported here because it is slow and large, and most processes don't need it

    from comfyfleet.transport.http import describe_network_error, open_client

    await _require_resolvable(url)
    body = b""
    try:
        async with (
            open_client(url, answer_seconds=ANSWER_SECONDS) as client,
            client.stream(
                method,
                url,
                data=form,
                headers={"Accept": "application/json", **(headers or {})},
                follow_redirects=False,
            ) as response,
        ):
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > ANSWER_BYTES_MAX:
                    raise UnexpectedAnswer("the identity provider's response is too large")
    except httpx.HTTPError as error:
        raise ServerUnavailable(
            f"the identity provider can't be reached at {_origin(url)}:"
            f" {describe_network_error(error)}"
        ) from error
    if method == "POST" and 400 <= response.status_code < 500:
        raise Unauthenticated("the identity provider rejected the authorization code")
    return _object(body, response.status_code)


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


_names = NameLookups(resolve_host)


async def _require_resolvable(url: str) -> None:
    """Resolves the host name with a deadline.

    Otherwise, the HTTP client would resolve it without a deadline in shared threads.
    """
    parts = urlsplit(url)
    try:
        await _names.addresses(parts.hostname or "", parts.port or 443, "oidc")
    except InputUnavailable as error:
        raise ServerUnavailable(
            f"the identity provider can't be reached at {_origin(url)}:"
            " its host name can't be resolved"
        ) from error


def _object(body: bytes, status: int) -> Mapping[str, Any]:
    try:
        content = json.loads(body) if status == 200 else None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UnexpectedAnswer(
            f"the identity provider sent an unexpected response with status {status}"
        )
    return content


def install(app: FastAPI, plane: ControlPlane) -> None:
    """Installs the configured identity provider. Raises InvalidInput if the settings are
    invalid."""
    settings = plane.settings
    app.state.oidc = OidcProvider(settings) if settings.oidc_issuer else None


def provider_of(request: Request) -> OidcProvider:
    provider: OidcProvider | None = request.app.state.oidc
    if provider is None:
        raise NotFound("no identity provider is configured")
    return provider


@router.get("/start")
async def start(plane: PlaneDep, request: Request, next: str = "/") -> Response:
    """Redirects to the identity provider. `next` is the page to show after the sign-in."""
    provider, flow = provider_of(request), SignInFlow(new_key(), safe_path(next))
    try:
        address = await provider.authorization_url(flow)
    except FleetError as error:
        return _failed(error)
    response = _redirect(address)
    secure = is_secure(request, plane.settings.public_url)
    # Lax, because the cookie must be sent with the provider's redirect back to us.
    response.set_cookie(
        _cookie_name(secure),
        flow.cookie,
        max_age=FLOW_SECONDS,
        httponly=True,
        samesite="lax",
        secure=secure,
    )
    return response


@router.get("/callback")
async def callback(plane: PlaneDep, request: Request) -> Response:
    """Completes the sign-in when the identity provider redirects back with a code."""
    provider = provider_of(request)
    secure = is_secure(request, plane.settings.public_url)
    try:
        flow = _flow_of(request, provider, secure)
        grant = await _granted(plane, provider, request, flow)
        signed_in = await sign_in(plane, request, grant, "oidc")
        response = _redirect(flow.next)
        set_cookie(response, plane, request, signed_in)
    except FleetError as error:
        response = _failed(error)
    response.delete_cookie(_cookie_name(secure), httponly=True, samesite="lax", secure=secure)
    return response


def _flow_of(request: Request, provider: OidcProvider, secure: bool) -> SignInFlow:
    flow = flow_from(request.cookies.get(_cookie_name(secure), ""))
    state = request.query_params.get("state", "")
    if flow is None or not hmac.compare_digest(state.encode(), flow.part("state").encode()):
        raise Unauthenticated("this sign-in has expired or was started in another browser")
    issuer = request.query_params.get("iss")
    if issuer is not None and issuer != provider.settings.oidc_issuer:
        raise Unauthenticated("the response comes from another identity provider")
    return flow


async def _granted(
    plane: ControlPlane, provider: OidcProvider, request: Request, flow: SignInFlow
) -> SessionGrant:
    code = request.query_params.get("code", "")
    if not 0 < len(code) <= CODE_CHARACTERS_MAX:
        raise Forbidden("the identity provider denied the sign-in")
    wrong: WrongKeyThrottle = request.app.state.wrong_keys
    try:
        identity = await provider.identity(code, flow)
    except Unauthenticated:
        await wrong.delay(request.client.host if request.client else "")
        raise
    customer = await _customer(plane, provider, identity)
    operator = await _operator(plane, provider, identity)
    if customer is None and operator is None:
        raise Forbidden("this person has neither a customer account nor an operator account")
    return SessionGrant(customer=customer, operator=operator, is_whole=True)


async def _customer(
    plane: ControlPlane, provider: OidcProvider, identity: Identity
) -> Caller | None:
    tenant_id = provider.rules.tenant_of(identity)
    if tenant_id is None:
        return None
    async with plane.central.read() as tx:
        tenant = await tenants.require_kept(tx, tenant_id)
    now = plane.clock()
    async with plane.pools[tenant.pool].transaction() as tx:
        user = await identities.ensure_user(tx, tenant, identity, now=now)
    async with plane.central.transaction() as tx:
        caller = await identities.ensure_key(tx, tenant, user, plane.context.new_id(), now=now)
    # The user may have been deactivated before the key existed. Later deactivations revoke the key.
    async with plane.pools[tenant.pool].read() as tx:
        identities.check_active(await tenants.get_user(tx, tenant.id, user.id))
    return caller


async def _operator(
    plane: ControlPlane, provider: OidcProvider, identity: Identity
) -> Operator | None:
    role, now = provider.rules.role_of(identity), plane.clock()
    if role is None:
        return None
    async with plane.central.transaction() as tx:
        before = await identities.find_operator(tx, identity)
        operator = await identities.ensure_operator(tx, identity, role, now=now)
        if before is None or before.role is not operator.role:
            action = "add_operator" if before is None else "change_operator"
            await record_audit(tx, identities.CREATED_BY, action, operator.subject, now, role=role)
    return operator


def _failed(error: FleetError) -> Response:
    """Redirects to the sign-in page, which shows a message for the error code."""
    logger.warning("sign-in with the identity provider failed: %s: %s", error.code, error.message)
    return _redirect(f"{SIGN_IN_PAGE}?{urlencode({'problem': error.code})}")


def _redirect(to: str) -> Response:
    headers = {"location": to, "cache-control": "no-store", "referrer-policy": "no-referrer"}
    return Response(status_code=303, headers=headers)


def _cookie_name(secure: bool) -> str:
    return f"__Host-{COOKIE}" if secure else COOKIE

"""A small OpenID provider on a real port, with real signatures.

It signs in every browser as the user that the test chooses.
"""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode

from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from tests.support.server.asgi import free_listener, served, url_of

CLIENT_ID, CLIENT_SECRET = "fleet", "a secret: with / and %"
CODE_SECONDS = 60


@dataclass
class IdentityProvider:
    url: str
    claims: dict[str, Any] = field(default_factory=lambda: {"sub": "ada"})
    changes: dict[str, Any] = field(default_factory=dict)  # of the token, to make it wrong
    key: RSAKey = field(default_factory=lambda: RSAKey.generate_key(2048, {"kid": "1"}))
    signs_with: Any = None  # another key than the one that is told, or a secret
    algorithm: str = "RS256"
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/.well-known/openid-configuration", self._configuration),
                Route("/authorize", self._authorize),
                Route("/token", self._token, methods=["POST"]),
                Route("/jwks", self._jwks),
            ]
        )

    async def _configuration(self, request: Request) -> Response:
        self.asked.append("configuration")
        told = {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/jwks",
        }
        return JSONResponse({**told, **self.metadata})

    async def _authorize(self, request: Request) -> Response:
        query = dict(request.query_params)
        assert query["response_type"] == "code"
        assert query["client_id"] == CLIENT_ID
        assert query["code_challenge_method"] == "S256"
        code = f"code-{len(self.codes)}"
        self.codes[code] = query
        back = urlencode({"code": code, "state": query["state"], "iss": self.url})
        return RedirectResponse(f"{query['redirect_uri']}?{back}", 302)

    async def _token(self, request: Request) -> Response:
        self.asked.append("token")
        form = {name: each[0] for name, each in parse_qs((await request.body()).decode()).items()}
        begun = self.codes.pop(form.get("code", ""), None)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        user, _, secret = base64.b64decode(given).decode().partition(":")
        verifier = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        if (
            begun is None
            or scheme != "Basic"
            or (unquote(user), unquote(secret)) != (CLIENT_ID, CLIENT_SECRET)
            or begun["redirect_uri"] != form.get("redirect_uri")
            or begun["code_challenge"] != _encoded(verifier)
        ):
            return JSONResponse({"error": "invalid_grant"}, 400)
        return JSONResponse({"access_token": "opaque", "id_token": self._signed(begun["nonce"])})

    def _signed(self, nonce: str) -> str:
        now = int(time.time())
        told = {"iss": self.url, "aud": CLIENT_ID, "exp": now + CODE_SECONDS, "iat": now}
        claims = {**told, "nonce": nonce, **self.claims, **self.changes}
        claims = {name: value for name, value in claims.items() if value is not None}
        if isinstance(self.signs_with, bytes):
            return _signed_by_secret({"alg": self.algorithm, "kid": "1"}, claims, self.signs_with)
        key = self.signs_with or self.key
        header = {"alg": self.algorithm, "kid": getattr(key, "kid", None) or "1"}
        return jwt.encode(header, claims, key, algorithms=[self.algorithm])

    async def _jwks(self, request: Request) -> Response:
        self.asked.append("jwks")
        return JSONResponse(KeySet([self.key]).as_dict(private=False))


def _signed_by_secret(header: dict[str, str], claims: dict[str, Any], secret: bytes) -> str:
    """By hand: no library signs with a secret that is none. Without a secret, not signed."""
    text = ".".join(_encoded(json.dumps(each).encode()) for each in (header, claims))
    made = hmac.new(secret, text.encode(), hashlib.sha256).digest() if secret else b""
    return f"{text}.{_encoded(made)}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@asynccontextmanager
async def serving_identity_provider() -> AsyncIterator[IdentityProvider]:
    listener = free_listener()
    provider = IdentityProvider(url_of(listener))
    async with served(provider.app(), listener):
        yield provider

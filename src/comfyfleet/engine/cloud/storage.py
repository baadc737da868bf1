"""Signed URLs: whoever has one may fetch the file until it expires, and needs no key."""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode

URL_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs what a URL names, so that nothing else can be had with it."""

    secret: bytes

    def path(self, kind: str, name: str, now: float) -> str:
        expires = str(int(now) + URL_SECONDS)
        query = urlencode({"expires": expires, "signature": self._sign(kind, name, expires)})
        return f"/storage/{kind}/{quote(name)}?{query}"

    def is_valid(self, kind: str, name: str, query: Mapping[str, str], now: float) -> bool:
        expires, signature = query.get("expires", ""), query.get("signature", "")
        wanted = self._sign(kind, name, expires)
        # Compared first: only what was signed by us is known to be a number.
        return hmac.compare_digest(wanted.encode(), signature.encode()) and int(expires) >= now

    def _sign(self, kind: str, name: str, expires: str) -> str:
        message = f"{kind}\n{name}\n{expires}".encode()
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()

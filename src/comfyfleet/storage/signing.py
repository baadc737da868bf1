"""Our own signed URLs: what may be done with which object, and until when. Pure."""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from urllib.parse import quote, urlencode

from comfyfleet.kernel.errors import Forbidden

# Where the control plane serves a local store (http/objects.py), below its public URL.
OBJECTS_PATH = "/api/objects"
SECRET_BYTES_MIN = 32
_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Grant:
    """One right to one object. All of it is signed; the host is not, so that it may have aliases."""

    method: str
    key: str
    expires: int  # seconds since 1970
    content_type: str = ""  # of a PUT
    size: int | None = None  # of a PUT
    filename: str = ""  # of a GET: under which name it is saved


class Signer:
    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise ValueError(f"the secret needs at least {SECRET_BYTES_MIN} bytes")
        self._secret = secret

    def url(self, public_url: str, grant: Grant) -> str:
        query = {"expires": str(grant.expires)}
        if grant.content_type:
            query["type"] = grant.content_type
        if grant.size is not None:
            query["size"] = str(grant.size)
        if grant.filename:
            query["filename"] = grant.filename
        query["signature"] = self.signature(grant)
        base = public_url.rstrip("/") + OBJECTS_PATH
        return f"{base}/{quote(grant.key)}?{urlencode(query, quote_via=quote)}"

    def signature(self, grant: Grant) -> str:
        # JSON keeps the fields apart: no two grants have the same text.
        text = json.dumps(["comfyfleet-object-1", *astuple(grant)])
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def granted(self, method: str, key: str, query: Mapping[str, str], *, now: float) -> Grant:
        """The grant that a URL carries; Forbidden unless we made it and it still holds."""
        grant = Grant(
            method,
            key,
            _number(query.get("expires")) or 0,
            query.get("type", ""),
            _number(query.get("size")),
            query.get("filename", ""),
        )
        given = query.get("signature", "").encode(errors="replace")
        if not hmac.compare_digest(self.signature(grant).encode(), given):
            raise Forbidden("the signature does not fit this URL", key=key)
        if now >= grant.expires:
            raise Forbidden("the URL has expired; ask for a new one", key=key)
        return grant


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None

"""The metadata service of an EC2 instance, version 2: every question carries a session key.

Only what answers to the PUT for such a key is taken for EC2. Other clouds and captive portals also
listen on the link-local address, and must not be able to tell a worker to stop.
"""

import time
from collections.abc import Callable, Mapping

import httpx

ENDPOINT = "http://169.254.169.254"
ENDPOINT_V6 = "http://[fd00:ec2::254]"
KEY_SECONDS = 21_600  # the longest that the service gives
RENEW_BEFORE_SECONDS = 300
CONNECT_SECONDS_MAX = 1.0
ANSWER_SECONDS_MAX = 3.0
ANSWER_BYTES_MAX = 65_536


class NoMetadata(Exception):
    """The service isn't there, or doesn't answer as it should."""


def endpoint_of(environ: Mapping[str, str]) -> str | None:
    """Where the service is, by the variables that AWS's own clients read; None: switched off."""
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    if given := environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").strip():
        return given.rstrip("/")
    is_v6 = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower() == "ipv6"
    return ENDPOINT_V6 if is_v6 else ENDPOINT


class Metadata:
    """Reads one value at a time; asks for a session key when it has none, or an old one."""

    def __init__(
        self,
        endpoint: str,
        *,
        key_seconds: int = KEY_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        # No proxy: the address is this machine's own.
        self._client = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(ANSWER_SECONDS_MAX, connect=CONNECT_SECONDS_MAX),
        )
        self._base = f"{endpoint}/latest"
        self._key_seconds = key_seconds
        self._monotonic = monotonic
        self._key = ""
        self._renew_at = float("-inf")

    async def aclose(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> str | None:
        """The value under `meta-data/`; None: there is none. Raises NoMetadata."""
        status, text = await self._read(path)
        if status == 401:
            # The service was restarted, or our clock ran slower than its own.
            self._renew_at = float("-inf")
            status, text = await self._read(path)
        if status == 404:
            return None
        if status != 200:
            raise NoMetadata(f"{path} was answered with {status}")
        return text

    async def _read(self, path: str) -> tuple[int, str]:
        headers = {"X-aws-ec2-metadata-token": await self._current_key()}
        return await self._ask("GET", f"{self._base}/meta-data/{path}", headers)

    async def _current_key(self) -> str:
        now = self._monotonic()
        if now < self._renew_at:
            return self._key
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._key_seconds)}
        status, text = await self._ask("PUT", f"{self._base}/api/token", headers)
        if status != 200 or not _is_header_value(text):
            raise NoMetadata(f"no session key was given ({status})")
        self._key = text
        self._renew_at = now + self._key_seconds - min(RENEW_BEFORE_SECONDS, self._key_seconds / 2)
        return self._key

    async def _ask(self, method: str, url: str, headers: Mapping[str, str]) -> tuple[int, str]:
        try:
            async with self._client.stream(method, url, headers=headers) as answer:
                received = b""
                async for part in answer.aiter_bytes():
                    received += part
                    if len(received) > ANSWER_BYTES_MAX:
                        raise NoMetadata(f"the answer is longer than {ANSWER_BYTES_MAX} bytes")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoMetadata(f"{type(error).__name__}: {error}") from error
        return answer.status_code, received.decode(errors="replace")


def _is_header_value(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable()

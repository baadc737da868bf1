"""Asks ComfyUI servers which node types they have: a plain GET, once per server and process."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from comfyfleet.cli.object_info import is_object_info, what_it_is
from comfyfleet.kernel.errors import (
    FleetError,
    InvalidInput,
    LimitExceeded,
    ServerUnavailable,
)
from comfyfleet.workflow.media import parse_json

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS_MAX = 5.0
# A server with many node packs looks through all its model folders before it answers.
ANSWER_SECONDS_MAX = 60.0
ANSWER_BYTES_MAX = 64 * 1024 * 1024
SNIPPET_CHARACTERS_MAX = 60


class Servers:
    """Remembers what each server answered."""

    def __init__(
        self,
        *,
        connect_seconds: float = CONNECT_SECONDS_MAX,
        answer_seconds: float = ANSWER_SECONDS_MAX,
    ) -> None:
        self._connect_seconds = connect_seconds
        self._answer_seconds = answer_seconds
        self._answers: dict[tuple[str, str], Any] = {}

    def object_info(self, url: str) -> Mapping[str, Any]:
        base = base_url(url)
        answer = self._get(base, "/object_info")
        if not is_object_info(answer):
            raise _no_comfyui(shown(base), f"JSON, but {what_it_is(answer)}")
        return answer

    def choices(self, url: str, remote: Mapping[str, Any]) -> list[Any]:
        """The choices of an input that the server keeps under a route of their own."""
        route = str(remote.get("route"))
        answer = self._get(base_url(url), route, remote.get("query_params"))
        key = remote.get("response_key")
        found = answer.get(key) if key and isinstance(answer, dict) else answer
        if not isinstance(found, list):
            raise ServerUnavailable(f"{route} answered with something else than a list")
        return found

    def _get(self, base: str, route: str, params: Any = None) -> Any:
        if (base, route) not in self._answers:
            self._answers[(base, route)] = self._fetch(base, route, params)
        return self._answers[(base, route)]

    def _fetch(self, base: str, route: str, params: Any) -> Any:
        # Imported late: most commands never need it, and it takes longer than a conversion.
        import httpx

        timeout = httpx.Timeout(self._answer_seconds, connect=self._connect_seconds)
        try:
            with (
                httpx.Client(timeout=timeout, follow_redirects=True) as client,
                client.stream("GET", base + route, params=params or None) as response,
            ):
                return _json_of(response, shown(base), time.monotonic() + self._answer_seconds)
        except httpx.TimeoutException as error:
            raise _too_slow(shown(base), self._answer_seconds) from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise _no_url(base) from error
        except httpx.HTTPError as error:
            raise ServerUnavailable(
                f"no server answers at {shown(base)}: {error}",
                hint="Is ComfyUI running there? Open that address in a browser.",
            ) from error


def base_url(url: str) -> str:
    """People copy addresses from browsers, with and without the parts that browsers add."""
    scheme, separator, rest = url.strip().rpartition("://")
    address = rest.partition("#")[0].partition("?")[0].rstrip("/")
    address = address.removesuffix("/object_info").removesuffix("/api")
    if not address or any(character.isspace() for character in address):
        raise _no_url(url)
    base = f"{scheme if separator else 'http'}://{address}"
    try:
        urlsplit(base).port  # noqa: B018 - it is read only here
    except ValueError:
        raise _no_url(url) from None
    return base


def shown(url: str) -> str:
    """The address without a user and password that may stand in it."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url


def _json_of(response: "httpx.Response", base: str, deadline: float) -> Any:
    if response.status_code != 200:
        raise _no_comfyui(base, f"{response.status_code} {response.reason_phrase}".strip())
    body = bytearray()
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > ANSWER_BYTES_MAX:
            raise LimitExceeded(f"{base} answered with more than {ANSWER_BYTES_MAX:,} bytes")
        if time.monotonic() > deadline:
            raise _too_slow(base, None)
    try:
        return parse_json(body, what="the answer")
    except FleetError as error:
        kind = response.headers.get("content-type", "something").partition(";")[0]
        beginning = bytes(body[:SNIPPET_CHARACTERS_MAX]).decode("utf-8", "replace")
        raise _no_comfyui(base, f"{kind} that begins with {beginning!r}") from error


def _no_url(url: str) -> InvalidInput:
    return InvalidInput(
        f"{shown(url)} is not the URL of a server",
        hint="Write it as http://HOST:PORT, for example http://127.0.0.1:8188",
    )


def _no_comfyui(base: str, got: str) -> ServerUnavailable:
    return ServerUnavailable(
        f"{base} is not a ComfyUI: asked for its node types, got {got}",
        hint="Give the address under which ComfyUI's editor opens, such as http://127.0.0.1:8188",
    )


def _too_slow(base: str, seconds: float | None) -> ServerUnavailable:
    span = f" within {seconds:g} seconds" if seconds else " in time"
    return ServerUnavailable(
        f"{base} did not answer{span}",
        hint="It may be busy loading a model: try again.",
    )

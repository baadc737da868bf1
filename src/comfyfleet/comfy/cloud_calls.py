"""Calls to Comfy Cloud: rate limits, error bodies, downloads redirected to storage that must not
see the key, and the marker that identifies a job if its submit gets no response."""

import contextlib
import ipaddress
import json
import ssl
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from comfyfleet.comfy.backend import BackendLimits, Fetched
from comfyfleet.comfy.calls import (
    BackendCalls,
    require_file,
    require_success,
    save_response,
)
from comfyfleet.errors import (
    CreditsExhausted,
    FileGone,
    OutcomeUnknown,
    ServerUnavailable,
    UnexpectedAnswer,
)
from comfyfleet.transport.http import Call
from comfyfleet.transport.retry import retry_after_seconds


@dataclass(frozen=True, slots=True)
class CloudErrorBody:
    """The parsed error body. `code` and `message` are both empty if the response did not come from
    the cloud itself."""

    code: str = ""
    message: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    has_envelope: bool = False

    @property
    def is_payment_error(self) -> bool:
        """Distinguishes a missing payment from a rate limit, because v1 returns 429 for both."""
        text = self.message.lower()
        return "not paid" in text or "subscription" in text or self.code == "insufficient_credits"


def parse_error_body(body: bytes) -> CloudErrorBody:
    """Parses v1's plain `{"code", "message"}` and v2's envelope `{"error": {…}}`."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return CloudErrorBody()
    if not isinstance(answer, dict):
        return CloudErrorBody()
    inner = answer.get("error")
    if not isinstance(inner, dict):
        return CloudErrorBody(
            str(answer.get("code") or ""), str(answer.get("message") or inner or "")
        )
    details = inner.get("details")
    return CloudErrorBody(
        str(inner.get("code") or ""),
        str(inner.get("message") or ""),
        details if isinstance(details, dict) else {},
        has_envelope="code" in inner,
    )


async def call_repeatable(calls: BackendCalls, call: Call) -> httpx.Response:
    """Sends a call that can safely be repeated."""
    return _check_rate_limit(call, await calls.ask(call))


async def call_once(calls: BackendCalls, call: Call) -> httpx.Response:
    """Sends a call that must not take effect twice. The call is retried only if it was not sent, or
    was refused temporarily.

    Raises OutcomeUnknown if it was sent and no response reveals the result.
    """
    response = await calls.send(call, may_repeat=False)
    if response.status_code >= 500:
        # The queue may have accepted the call, because a proxy may have sent this response.
        raise OutcomeUnknown(f"{call.operation} returned {response.status_code}")
    return _check_rate_limit(call, require_success(call, response))


def _check_rate_limit(call: Call, response: httpx.Response) -> httpx.Response:
    if response.status_code != 429:
        return response
    seconds = retry_after_seconds(response.headers)
    raise _rate_limited(call, parse_error_body(response.content), seconds)


def _rate_limited(
    call: Call, error_body: CloudErrorBody, seconds: float | None
) -> CreditsExhausted | ServerUnavailable:
    message = error_body.message or error_body.code or "no reason was given"
    if error_body.is_payment_error:
        return CreditsExhausted(f"Comfy Cloud requires payment: {message}")
    return ServerUnavailable(
        f"{call.operation} was refused temporarily: {message}",
        received_code=error_body.code,
        retry_after_seconds=seconds,
    )


def call_by_id(method: str, route: str, its_id: str) -> Call:
    """Builds a call with an id in its path.

    Ids come from servers and users, so they are escaped and can't change the route.
    """
    safe = quote(its_id, safe="").replace(".", "%2E")
    return Call(method, route, path=route.replace("{id}", safe))


DEFAULT_PORTS = {"http": 80, "https": 443}


def is_same_origin(one: httpx.URL, other: httpx.URL) -> bool:
    return _origin(one) == _origin(other)


def is_loopback(url: httpx.URL) -> bool:
    if url.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(url.host).is_loopback
    except ValueError:
        return False


def resolve_link(base: httpx.URL, link: str) -> httpx.URL:
    """Resolves a link in a response. Host-relative links are relative to the origin, regardless of
    the path of `base`."""
    try:
        return base.copy_with(path="/", query=None).join(link)
    except httpx.InvalidURL as error:
        raise UnexpectedAnswer(f"a link in the response is invalid: {error}") from error


def require_own_link(base: httpx.URL, link: str) -> httpx.URL:
    """Resolves a link to which the key will be sent.

    Raises UnexpectedAnswer unless the link leads to the server that the key is for.
    """
    url = resolve_link(base, link)
    if not is_same_origin(base, url):
        raise UnexpectedAnswer(f"the server links to {url.host}, which must not receive the key")
    return url


def require_storage_link(base: httpx.URL, at: httpx.URL, location: str) -> httpx.URL:
    """Resolves the redirect of a download.

    Raises UnexpectedAnswer unless the URL uses https or leads to this machine.
    """
    try:
        url = at.join(location)
    except httpx.InvalidURL as error:
        raise UnexpectedAnswer(f"the URL of a redirect is invalid: {error}") from error
    on_this_machine = base.scheme == "http" and is_loopback(base) and is_loopback(url)
    if url.scheme != "https" and not (url.scheme == "http" and on_this_machine):
        raise UnexpectedAnswer(
            f"a download is redirected to {url.scheme}://{url.host}, which doesn't use https"
        )
    return url


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or DEFAULT_PORTS.get(url.scheme)


REDIRECTS_MAX = 3
REDIRECTS = frozenset({301, 302, 303, 307, 308})


def storage_transport(base: httpx.URL, trust: ssl.SSLContext) -> httpx.AsyncBaseTransport:
    """Returns the HTTP transport for the storage.

    This is not a client, so that no header, cookie, key or signed URL is sent or logged.
    """
    proxy = None if is_loopback(base) else urllib.request.getproxies().get("https")
    return httpx.AsyncHTTPTransport(verify=trust, proxy=proxy)


async def download(
    calls: BackendCalls,
    storage: httpx.AsyncBaseTransport,
    call: Call,
    to: Path,
    bytes_max: int | None = None,
) -> Fetched:
    return await calls.repeat(call, lambda: _download_once(calls, storage, call, to, bytes_max))


async def _download_once(
    calls: BackendCalls,
    storage: httpx.AsyncBaseTransport,
    call: Call,
    to: Path,
    bytes_max: int | None,
) -> Fetched:
    base = calls.client.base_url
    async with contextlib.AsyncExitStack() as stack:
        response = await stack.enter_async_context(calls.stream(call))
        at = response.url
        for _ in range(REDIRECTS_MAX):
            if response.status_code not in REDIRECTS:
                break
            at = require_storage_link(base, at, response.headers.get("location", ""))
            response = await stack.enter_async_context(_get_without_key(storage, at, calls.limits))
        await require_file(calls, call, response, FileGone("the cloud no longer has the file"))
        return await save_response(response, to, bytes_max)


@contextlib.asynccontextmanager
async def _get_without_key(
    storage: httpx.AsyncBaseTransport, url: httpx.URL, limits: BackendLimits
) -> AsyncIterator[httpx.Response]:
    """Sends a GET with only the URL of the redirect. The URL is signed, so the storage needs no
    other credentials."""
    timeout = httpx.Timeout(limits.answer_seconds, connect=limits.connect_seconds)
    request = httpx.Request("GET", url, extensions={"timeout": timeout.as_dict()})
    response = await storage.handle_async_request(request)
    response.request = request
    try:
        yield response
    finally:
        await response.aclose()


MARKER_KEY = "comfyfleet_run"


def marker_of(prompt_id: str) -> str:
    return f"comfyfleet-run-{prompt_id}"


def with_marker(prompt: Mapping[str, Any], prompt_id: str) -> dict[str, Any]:
    """Returns the prompt with our marker in the `_meta` of each node.

    Servers store `_meta` and don't execute it, so output names and cache hits don't change. Each
    node gets the marker, because a server may return only some nodes.
    """
    marker = marker_of(prompt_id)
    return {node_id: _marked(node, marker) for node_id, node in prompt.items()}


def is_marked(document: object, prompt_id: str) -> bool:
    """Checks whether our marker occurs anywhere in a server's response about a job."""
    return marker_of(prompt_id) in json.dumps(document)


def _marked(node: Any, marker: str) -> Any:
    if not isinstance(node, Mapping):
        return node
    meta = node.get("_meta")
    others = meta if isinstance(meta, Mapping) else {}
    return {**node, "_meta": {**others, MARKER_KEY: marker}}

"""Calls to Comfy Cloud: put off when it asks for that, its errors parsed, downloads by redirect to a storage that
must not see the key, and the marker by which a job is found whose submit was cut off."""

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

from comfyfleet.comfy.answers import unexpected_answer
from comfyfleet.comfy.backend import BackendLimits, Fetched
from comfyfleet.comfy.calls import BackendCalls, error_from_response, require_success
from comfyfleet.errors import (
    CreditsExhausted,
    FileGone,
    OutcomeUnknown,
    ServerUnavailable,
    UnexpectedAnswer,
)
from comfyfleet.transport.files import save_body
from comfyfleet.transport.http import Call
from comfyfleet.transport.retry import retry_after_seconds


@dataclass(frozen=True, slots=True)
class CloudErrorBody:
    """Both empty where something else than the cloud has answered."""

    code: str = ""
    message: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    has_envelope: bool = False

    @property
    def is_payment_error(self) -> bool:
        """v1 says 429 both for too many requests and for a subscription that has ended."""
        text = self.message.lower()
        return "not paid" in text or "subscription" in text or self.code == "insufficient_credits"


def parse_error_body(body: bytes) -> CloudErrorBody:
    """v1 tells code and message bare, v2 in an envelope `{"error": {…}}`."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return CloudErrorBody()
    if not isinstance(told, dict):
        return CloudErrorBody()
    inner = told.get("error")
    if not isinstance(inner, dict):
        return CloudErrorBody(str(told.get("code") or ""), str(told.get("message") or inner or ""))
    details = inner.get("details")
    return CloudErrorBody(
        str(inner.get("code") or ""),
        str(inner.get("message") or ""),
        details if isinstance(details, dict) else {},
        has_envelope="code" in inner,
    )


async def call_repeatable(calls: BackendCalls, call: Call) -> httpx.Response:
    """For what may be asked twice."""
    return _require_admitted(call, await calls.ask(call))


async def call_once(calls: BackendCalls, call: Call) -> httpx.Response:
    """For what must not happen twice: repeated only if it was not sent, or refused for now.

    OutcomeUnknown: it was sent, and no answer came that tells what became of it.
    """
    response = await calls.send(call, may_repeat=False)
    if response.status_code >= 500:
        # Something between us and the queue may say so after the queue has taken it.
        raise OutcomeUnknown(f"{call.operation} was answered {response.status_code}")
    return _require_admitted(call, require_success(call, response))


def _require_admitted(call: Call, response: httpx.Response) -> httpx.Response:
    if response.status_code != 429:
        return response
    seconds = retry_after_seconds(response.headers)
    raise _rate_limited(call, parse_error_body(response.content), seconds)


def _rate_limited(
    call: Call, error_body: CloudErrorBody, seconds: float | None
) -> CreditsExhausted | ServerUnavailable:
    told = error_body.message or error_body.code or "no reason was told"
    if error_body.is_payment_error:
        return CreditsExhausted(f"the cloud wants to be paid first: {told}")
    return ServerUnavailable(
        f"{call.operation} was put off: {told}",
        received_code=error_body.code,
        retry_after_seconds=seconds,
    )


def call_by_id(method: str, route: str, its_id: str) -> Call:
    """Ids come from servers and users: none of them may lead to another route."""
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
    """A link of an answer: host-relative ones belong to the origin, whatever path the base has."""
    try:
        return base.copy_with(path="/", query=None).join(link)
    except httpx.InvalidURL as error:
        raise UnexpectedAnswer(f"a link can't be read: {error}") from error


def require_own_link(base: httpx.URL, link: str) -> httpx.URL:
    """A link that we follow with the key, so only to the server that the key is for."""
    url = resolve_link(base, link)
    if not is_same_origin(base, url):
        raise UnexpectedAnswer(f"the server links to {url.host}, which does not get its key")
    return url


def require_storage_link(base: httpx.URL, at: httpx.URL, location: str) -> httpx.URL:
    """Where a download is redirected to: encrypted, unless all of it stays on this machine."""
    try:
        url = at.join(location)
    except httpx.InvalidURL as error:
        raise UnexpectedAnswer(f"a redirect can't be read: {error}") from error
    on_this_machine = base.scheme == "http" and is_loopback(base) and is_loopback(url)
    if url.scheme != "https" and not (url.scheme == "http" and on_this_machine):
        raise UnexpectedAnswer(
            f"a download is redirected to {url.scheme}://{url.host}, not to https"
        )
    return url


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or DEFAULT_PORTS.get(url.scheme)


REDIRECTS_MAX = 3
REDIRECTS = frozenset({301, 302, 303, 307, 308})
DEFAULT_TYPE = "application/octet-stream"
GONE = frozenset({404, 410})


def storage_transport(base: httpx.URL, trust: ssl.SSLContext) -> httpx.AsyncBaseTransport:
    """A transport, not a client: it has no headers, cookies or keys, and logs no signed address."""
    proxy = None if is_loopback(base) else urllib.request.getproxies().get("https")
    return httpx.AsyncHTTPTransport(verify=trust, proxy=proxy)


async def download(
    calls: BackendCalls, storage: httpx.AsyncBaseTransport, call: Call, to: Path
) -> Fetched:
    return await calls.repeat(call, lambda: _attempt(calls, storage, call, to))


async def _attempt(
    calls: BackendCalls, storage: httpx.AsyncBaseTransport, call: Call, to: Path
) -> Fetched:
    base = calls.client.base_url
    async with contextlib.AsyncExitStack() as stack:
        response = await stack.enter_async_context(calls.stream(call))
        at = response.url
        for _ in range(REDIRECTS_MAX):
            if response.status_code not in REDIRECTS:
                break
            at = require_storage_link(base, at, response.headers.get("location", ""))
            response = await stack.enter_async_context(_bare(storage, at, calls.limits))
        with calls.reading(call.operation):
            await _check(call, response)
        size_bytes = await save_body(response, to)
        return Fetched(to, size_bytes, response.headers.get("content-type", DEFAULT_TYPE))


@contextlib.asynccontextmanager
async def _bare(
    storage: httpx.AsyncBaseTransport, url: httpx.URL, limits: BackendLimits
) -> AsyncIterator[httpx.Response]:
    """Only the address of the redirect is sent: it is all the right that the storage wants."""
    timeout = httpx.Timeout(limits.answer_seconds, connect=limits.connect_seconds)
    request = httpx.Request("GET", url, extensions={"timeout": timeout.as_dict()})
    response = await storage.handle_async_request(request)
    response.request = request
    try:
        yield response
    finally:
        await response.aclose()


async def _check(call: Call, response: httpx.Response) -> None:
    """A page is never the file: it is the error of somebody in between."""
    is_page = response.headers.get("content-type", "").startswith("text/html")
    if response.status_code == 200 and not is_page:
        return
    await response.aread()
    if response.status_code in GONE:
        raise FileGone("the cloud no longer has the file")
    if response.status_code >= 500:
        raise error_from_response(call, response)
    require_success(call, response)
    raise unexpected_answer(f"{call.operation} should hand out a file", response.text)


MARKER_KEY = "comfyfleet_run"


def marker_of(prompt_id: str) -> str:
    return f"comfyfleet-run-{prompt_id}"


def with_marker(prompt: Mapping[str, Any], prompt_id: str) -> dict[str, Any]:
    """The prompt with our sign in the `_meta` of each node.

    `_meta` is kept by servers and takes no part in execution, so names of outputs and what may come
    from the cache stay as they are. Each node has it because a server may keep only some.
    """
    marker = marker_of(prompt_id)
    return {node_id: _marked(node, marker) for node_id, node in prompt.items()}


def is_marked(document: object, prompt_id: str) -> bool:
    """Whether our sign is anywhere in what a server shows of a job."""
    return marker_of(prompt_id) in json.dumps(document)


def _marked(node: Any, marker: str) -> Any:
    if not isinstance(node, Mapping):
        return node
    meta = node.get("_meta")
    kept = meta if isinstance(meta, Mapping) else {}
    return {**node, "_meta": {**kept, MARKER_KEY: marker}}

"""Files of the cloud, which hands them out by redirect to a storage that must not see the key."""

import contextlib
import ssl
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from comfyfleet.comfy.backend import Fetched
from comfyfleet.comfy.calls import NETWORK_ERRORS, Call, Calls, answered_badly, checked
from comfyfleet.comfy.cloud.origins import is_loopback, storage_link
from comfyfleet.comfy.settings import Limits
from comfyfleet.comfy.shapes import unexpected
from comfyfleet.comfy.transfers import save
from comfyfleet.kernel.errors import FileGone, ServerUnavailable

REDIRECTS_MAX = 3
REDIRECTS = frozenset({301, 302, 303, 307, 308})
DEFAULT_TYPE = "application/octet-stream"
GONE = frozenset({404, 410})


def storage_transport(base: httpx.URL, trust: ssl.SSLContext) -> httpx.AsyncBaseTransport:
    """A transport, not a client: it has no headers, cookies or keys, and logs no signed address."""
    proxy = None if is_loopback(base) else urllib.request.getproxies().get("https")
    return httpx.AsyncHTTPTransport(verify=trust, proxy=proxy)


async def download(
    calls: Calls, storage: httpx.AsyncBaseTransport, call: Call, to: Path
) -> Fetched:
    for attempt in range(calls.limits.max_retries + 1):
        if attempt:
            await calls.surroundings.back_off(attempt)
        try:
            return await _attempt(calls, storage, call, to)
        except NETWORK_ERRORS as error:
            trouble = calls.unavailable(call, error)
        except ServerUnavailable as error:
            trouble = error
    raise trouble


async def _attempt(
    calls: Calls, storage: httpx.AsyncBaseTransport, call: Call, to: Path
) -> Fetched:
    base = calls.client.base_url
    async with contextlib.AsyncExitStack() as stack:
        response = await stack.enter_async_context(calls.stream(call))
        at = response.url
        for _ in range(REDIRECTS_MAX):
            if response.status_code not in REDIRECTS:
                break
            at = storage_link(base, at, response.headers.get("location", ""))
            response = await stack.enter_async_context(_bare(storage, at, calls.limits))
        with calls.reading(call.operation):
            await _check(call, response)
        size_bytes = await save(response, to)
        return Fetched(to, size_bytes, response.headers.get("content-type", DEFAULT_TYPE))


@contextlib.asynccontextmanager
async def _bare(
    storage: httpx.AsyncBaseTransport, url: httpx.URL, limits: Limits
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
        raise answered_badly(call, response)
    checked(call, response)
    raise unexpected(f"{call.operation} should hand out a file", response.text)

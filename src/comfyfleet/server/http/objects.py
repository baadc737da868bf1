"""Serves downloads (with byte ranges) and uploads by the signed URLs of a local object store."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType

from blake3 import blake3
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from comfyfleet.errors import (
    FleetError,
    Forbidden,
    InvalidInput,
    LimitExceeded,
    NotFound,
    StoreFull,
    TooManyCalls,
    Unavailable,
    is_logged,
    said_to_customers,
)
from comfyfleet.server.http.connections import note_valid_key
from comfyfleet.server.http.errors import headers_of
from comfyfleet.server.http.tallies import OpenDownload, holder_of_file, open_download, uploads_of
from comfyfleet.server.media.small_pictures import SMALL_PATH, SMALL_TYPE, SmallPictures
from comfyfleet.server.storage import ObjectStore
from comfyfleet.server.storage.local import (
    OBJECTS_PATH,
    IncomingObject,
    LocalStore,
    OpenObject,
    UrlGrant,
)
from comfyfleet.server.storage.model import disposition
from comfyfleet.transport.ranges import ByteRange, file_etag, names_etag, select_range


def requested_range(headers: Mapping[str, str], *, size: int, etag: str) -> ByteRange:
    """Returns the range to send, or the whole object if the client's If-Range is outdated."""
    if names_etag(headers.get("if-none-match", ""), etag):
        return ByteRange(304)
    is_current = headers.get("if-range", etag) == etag
    return select_range(headers.get("range", "") if is_current else "", size)


logger = logging.getLogger(__name__)
CHUNK_BYTES = 256 * 1024
# Lifetime in seconds of the redirect from a missing small picture to the full-size one.
WHOLE_SECONDS = 60
# Uploads are aborted after this many seconds without data.
IDLE_SECONDS_MAX = 60
REDACTED_QUERY = b"signature=hidden"
STATUSES: dict[type[FleetError], int] = {
    Forbidden: 403,
    InvalidInput: 400,
    LimitExceeded: 413,
    NotFound: 404,
    TooManyCalls: 429,
    StoreFull: 507,
    Unavailable: 503,
}
# The signed URL alone authorizes a request. No cookie is used, so pages of any origin may use it.
CORS_HEADERS = {
    "access-control-allow-origin": "*",
    "access-control-expose-headers": "content-length, content-range, content-disposition, etag",
    "cross-origin-resource-policy": "cross-origin",
}
PREFLIGHT = {
    "access-control-allow-methods": "GET, PUT",
    "access-control-allow-headers": "content-type, range, if-range, if-none-match",
    "access-control-max-age": "3600",
}
# The uploader chose the content and its type, and the file is served from our own origin. These
# headers prevent a browser from running it as one of our pages.
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "sandbox; default-src 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "private, no-cache",
}
INLINE_TYPES = ("image/", "video/", "audio/")
NOT_INLINE_TYPES = ("image/svg",)

Handler = Callable[[Request, str], Awaitable[Response]]


class ObjectRoute(Route):
    """A plain Starlette route, so that it is not in the OpenAPI document."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        return match, {**child_scope, "route": self}  # for the route name in metrics and logs


def objects_routes(store: LocalStore) -> list[BaseRoute]:
    async def get(request: Request, key: str) -> Response:
        return await _get(store, request, key)

    async def put(request: Request, key: str) -> Response:
        return await _put(store, request, key)

    async def preflight(_: Request, key: str) -> Response:
        return Response(status_code=204, headers=CORS_HEADERS | PREFLIGHT)

    handlers = {"PUT": put, "GET": get, "OPTIONS": preflight}

    async def answer(request: Request) -> Response:
        return await _handle_errors(handlers[request.method], request)

    # Starlette adds HEAD to GET routes, but signed URLs are valid for the signed method only.
    route = ObjectRoute(f"{OBJECTS_PATH}/{{key:path}}", answer, methods=list(handlers))
    route.methods = set(handlers)
    return [route]


def small_pictures_route(small: SmallPictures, store: ObjectStore) -> BaseRoute:
    """Returns the route that serves small pictures by signed URLs, for local and remote stores.

    If no small picture was stored, the route redirects to the full-size picture.
    """

    async def get(request: Request, key: str) -> Response:
        query = request.query_params
        request.scope["query_string"] = REDACTED_QUERY
        small.require_granted(key, query.get("expires", ""), query.get("signature", ""))
        note_valid_key(request.scope, holder_of_file(key))
        content = await small.read(key)
        if content is not None:
            return _small_response(content, request.headers)
        url = await store.url_to_get(key, seconds=WHOLE_SECONDS)
        return Response(
            status_code=302, headers=CORS_HEADERS | {"location": url, "cache-control": "no-store"}
        )

    async def answer(request: Request) -> Response:
        return await _handle_errors(get, request)

    route = ObjectRoute(f"{SMALL_PATH}/{{key:path}}", answer, methods=["GET"])
    route.methods = {"GET"}
    return route


def _small_response(content: bytes, request_headers: Mapping[str, str]) -> Response:
    etag = f'"{blake3(content).hexdigest(length=16)}"'
    headers = {**CORS_HEADERS, **SECURITY_HEADERS, "etag": etag, "content-disposition": "inline"}
    if names_etag(request_headers.get("if-none-match", ""), etag):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=SMALL_TYPE)


async def _handle_errors(handler: Handler, request: Request) -> Response:
    key: str = request.path_params["key"]
    try:
        return await handler(request, key)
    except ClientDisconnect:
        return Response(status_code=400)  # never sent, because the client has disconnected
    except TimeoutError:
        error = InvalidInput(f"no data was received for {IDLE_SECONDS_MAX} seconds", key=key)
        return _refusal(error, 408)
    except FleetError as error:
        return _refusal(error, _status(error))


def _status(error: FleetError) -> int:
    return next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)


def _refusal(error: FleetError, status: int) -> Response:
    message = said_to_customers(error)
    if message != error.message:
        level = logging.DEBUG if is_logged(error) else logging.WARNING
        logger.log(level, "%s: %s", error.code, error.message)
    details = dict(error.details) if message == error.message else {}
    body = {"code": error.code, "message": message, "details": details}
    headers = {**CORS_HEADERS, "cache-control": "no-store", **headers_of(error)}
    return JSONResponse({"error": body}, status, headers)


def _grant_of(store: LocalStore, request: Request, key: str) -> UrlGrant:
    query = request.query_params
    # The server logs this scope with its response. The query contains the signature, so it is
    # replaced before it can get into the log.
    request.scope["query_string"] = REDACTED_QUERY
    grant = store.granted(request.method, key, query)
    note_valid_key(request.scope, holder_of_file(key))
    return grant


async def _get(store: LocalStore, request: Request, key: str) -> Response:
    grant = _grant_of(store, request, key)
    download = await open_download(request, store, key)
    return object_response(download, request.headers, filename=grant.filename, others=CORS_HEADERS)


def object_response(
    download: OpenDownload,
    request_headers: Mapping[str, str],
    *,
    filename: str | None = None,
    content_type: str | None = None,
    others: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    """Returns a response with the object, or with the range that the request headers ask for.

    The response closes the object when it ends, even after an error.
    """
    opened = download.opened
    etag = file_etag(opened.size, opened.modified_ns)
    part = requested_range(request_headers, size=opened.size, etag=etag)
    sent_type = content_type or opened.content_type
    headers = {**others, **SECURITY_HEADERS, **part.headers(opened.size)}
    headers |= {"etag": etag, "accept-ranges": "bytes"}
    headers |= {"content-length": str(part.length)} if part.status != 304 else {}
    headers |= {"content-disposition": _disposition(filename, sent_type)}
    # Set here because the response class would add a charset.
    headers["content-type"] = sent_type
    return _RangeResponse(download, part, headers)


def _disposition(filename: str | None, content_type: str) -> str:
    if filename:
        return disposition("attachment", filename)
    shown = content_type.startswith(INLINE_TYPES) and not content_type.startswith(NOT_INLINE_TYPES)
    return "inline" if shown else "attachment"


class _RangeResponse(StreamingResponse):
    """Streams a range of a file, and closes the file even after an error."""

    def __init__(self, download: OpenDownload, part: ByteRange, headers: dict[str, str]) -> None:
        super().__init__(_chunks(download.opened, part), part.status, headers)
        self._download = download

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._download.close()


async def _chunks(opened: OpenObject, part: ByteRange) -> AsyncIterator[bytes]:
    opened.file.seek(part.start)
    remaining = part.length
    while remaining > 0 and (
        chunk := await asyncio.to_thread(opened.file.read, min(remaining, CHUNK_BYTES))
    ):
        remaining -= len(chunk)
        yield chunk


async def _put(store: LocalStore, request: Request, key: str) -> Response:
    grant = _grant_of(store, request, key)
    if request.headers.get("content-type") != grant.content_type:
        raise Forbidden(f"this URL accepts only the content type {grant.content_type}", key=key)
    length = request.headers.get("content-length", "")
    if not length.isdecimal():
        # S3 requires it as well, and both stores must accept the same uploads.
        return _refusal(InvalidInput("Content-Length is required", key=key), 411)
    if grant.size is not None and int(length) != grant.size:
        raise Forbidden(f"this URL accepts exactly {grant.size} bytes, not {length}", key=key)
    if int(length) > store.object_bytes_max:
        raise LimitExceeded(f"objects can have at most {store.object_bytes_max} bytes", key=key)
    slot = uploads_of(request).begin(key)
    try:
        await _store_body(store, request, grant, int(length))
    finally:
        slot.release()
    return Response(status_code=200, headers=CORS_HEADERS)


async def _store_body(store: LocalStore, request: Request, grant: UrlGrant, length: int) -> None:
    async with store.receiving(grant.key, grant.content_type) as incoming:
        await _receive(request, incoming, length)
        if incoming.size != length:
            raise InvalidInput(
                f"received {incoming.size} bytes, but Content-Length is {length}", key=grant.key
            )


async def _receive(request: Request, incoming: IncomingObject, size: int) -> None:
    """Writes the request body to the object. Stops after more than `size` bytes, because a chunked
    body may be longer than announced."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(IDLE_SECONDS_MAX) as timeout:
        async for chunk in request.stream():
            await incoming.write(chunk)
            if incoming.size > size:
                return
            timeout.reschedule(loop.time() + IDLE_SECONDS_MAX)

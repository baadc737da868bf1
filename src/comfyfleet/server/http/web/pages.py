"""Serves the single-page app from this package's folder `static`: one document for every page, and its files.

Without the folder (a checkout that was never built) everything else works, and the pages say how to build them.
"""

import asyncio
import hashlib
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.storage.model import ObjectStore

STATIC = Path(__file__).with_name("static")
FILES_PATH = "/web"
INDEX = "index.html"
# First parts of the pages' addresses; web/src/app/routes.tsx has the whole ones.
PAGES = (
    "account",
    "console",
    "effects",
    "graph-runs",
    "graphs",
    "keys",
    "media",
    "pipelines",
    "results",
    "shared",
    "sign-in",
    "triggers",
    "wallet",
    "webhooks",
)
# Browsers ask for it where a document names no icon, such as a picture that is opened by itself.
ICON_PATH, ICON = "/favicon.ico", "favicon.ico"
# What programs ask for: whoever is there wants no document, whatever it says.
NOT_FOR_PEOPLE = ("/api/", "/objects/", f"{FILES_PATH}/")
# Beside the app, for builds: nobody asks for them.
NOT_SERVED = ("manifest.json", "built-from.sha256")
ENCODINGS = {"br": ".br", "gzip": ".gz"}  # the best first
FOREVER = "public, max-age=31536000, immutable"
REVALIDATED = "no-cache"
MIME_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".ico": "image/x-icon",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
NOT_BUILT = "The pages for people are not built here: run <code>make web</code> in the checkout, or install a wheel."
SAFE_HEADERS = {
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True)
class WebFiles:
    """The files of one build. Compressed ones lie beside them."""

    folder: Path

    @cached_property
    def paths(self) -> frozenset[str]:
        """Nothing else is opened, whatever is asked for."""
        found = (each for each in self.folder.rglob("*") if each.is_file())
        names = frozenset(each.relative_to(self.folder).as_posix() for each in found)
        compressed = {f"{name}{ending}" for name in names for ending in ENCODINGS.values()}
        return names - compressed - {*NOT_SERVED, *(f"{name}.map" for name in names)}

    @property
    def is_built(self) -> bool:
        return INDEX in self.paths

    def read(self, path: str, accepted: str) -> tuple[bytes, str | None]:
        """Returns its bytes, and how they are encoded. `accepted`: as the client says it."""
        for encoding, ending in ENCODINGS.items():
            if accepts(accepted, encoding):
                compressed = self.folder / f"{path}{ending}"
                if compressed.is_file():
                    return compressed.read_bytes(), encoding
        return (self.folder / path).read_bytes(), None


def accepts(accepted: str, encoding: str) -> bool:
    """Whether an Accept-Encoding names it, and not as the one that must not come."""
    for each in accepted.lower().split(","):
        name, _, weight = each.partition(";")
        if name.strip() == encoding:
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def content_policy(store: str) -> str:
    """`store`: the origin from which browsers fetch files, and to which they send them."""
    return (
        "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self';"
        f" img-src 'self' blob: data: {store}; media-src 'self' blob: {store};"
        f" connect-src 'self' {store}; worker-src 'self'; manifest-src 'self';"
        " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )


async def store_origin(store: ObjectStore) -> str:
    """Of signed URLs: a bucket has a host of its own, a folder is served by us."""
    parts = urlsplit(await store.url_to_get("origin", seconds=60))
    return f"{parts.scheme}://{parts.netloc}"


class WebPages:
    def __init__(self, plane: ControlPlane, files: WebFiles | None = None) -> None:
        self._store = plane.store
        self._files = files or WebFiles(STATIC)
        self._policy: str | None = None

    @property
    def is_built(self) -> bool:
        return self._files.is_built

    async def page(self, request: Request) -> Response:
        """The document; the app in it looks at the address itself."""
        if not self.is_built:
            return HTMLResponse(f"<!doctype html><title>comfyfleet</title><p>{NOT_BUILT}</p>", 404)
        if self._policy is None:
            self._policy = content_policy(await store_origin(self._store))
        headers = {**SAFE_HEADERS, "content-security-policy": self._policy}
        return await self._sent(request, INDEX, {**headers, "cache-control": REVALIDATED})

    def is_lost_reader(self, request: Request) -> bool:
        """Whether a person in a browser has come to an address that is nothing."""
        is_read = request.method in ("GET", "HEAD")
        wants_page = "text/html" in request.headers.get("accept", "")
        path = f"{request.scope['path']}/"
        return self.is_built and is_read and wants_page and not path.startswith(NOT_FOR_PEOPLE)

    async def no_page(self, request: Request) -> Response:
        """The document, in which the app says that there is no such page, and where to go on."""
        answer = await self.page(request)
        if answer.status_code == 200:
            answer.status_code = 404
        return answer

    async def icon(self, request: Request) -> Response:
        request.path_params["path"] = ICON
        return await self.file(request)

    async def file(self, request: Request) -> Response:
        path = request.path_params["path"]
        if path not in self._files.paths or path == INDEX:
            return Response(status_code=404)
        # The content of a file there is in its name.
        kept = FOREVER if path.startswith("assets/") else REVALIDATED
        # An SVG that is opened by itself could hold a script.
        policy = {
            "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox"
        }
        return await self._sent(request, path, {**SAFE_HEADERS, **policy, "cache-control": kept})

    async def _sent(self, request: Request, path: str, headers: Mapping[str, str]) -> Response:
        accepted = request.headers.get("accept-encoding", "")
        content, encoding = await asyncio.to_thread(self._files.read, path, accepted)
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        told = {**headers, "etag": etag, "vary": "accept-encoding"}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=told)
        if encoding:
            told["content-encoding"] = encoding
        return Response(content, headers=told, media_type=_mime_type(path))


def _mime_type(path: str) -> str:
    suffix = Path(path).suffix
    return MIME_TYPES.get(suffix) or mimetypes.guess_type(path)[0] or "application/octet-stream"


def web_routes(pages: WebPages) -> list[BaseRoute]:
    """All but `/`, which programs ask for, too."""
    named = [path for each in PAGES for path in (f"/{each}", f"/{each}/{{rest:path}}")]
    found: list[BaseRoute] = [Route(path, pages.page, methods=["GET"]) for path in named]
    found.append(Route(ICON_PATH, pages.icon, methods=["GET"]))
    return [*found, Route(f"{FILES_PATH}/{{path:path}}", pages.file, methods=["GET"])]


def no_route(pages: WebPages, usual: ASGIApp) -> ASGIApp:
    """What answers where no route is: to people the app, to programs what they get without it."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and pages.is_lost_reader(request := Request(scope, receive)):
            await (await pages.no_page(request))(scope, receive, send)
        else:
            await usual(scope, receive, send)

    return answer

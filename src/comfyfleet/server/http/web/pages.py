"""Serves the single-page app and its files from the `static` folder of this package.

All pages use the same HTML document. In a checkout where the app hasn't been built, everything else
works, and the pages show how to build the app.
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
# The first path segments of the app's pages. web/src/app/routes.tsx defines the complete paths.
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
# Browsers request this icon for documents without one, for example an image opened in its own tab.
ICON_PATH, ICON = "/favicon.ico", "favicon.ico"
# Paths that programs use. They never get the app's HTML document, even if they accept HTML.
NOT_FOR_PEOPLE = ("/api/", "/objects/", f"{FILES_PATH}/")
# Files in the folder that only the build uses.
NOT_SERVED = ("manifest.json", "built-from.sha256")
ENCODINGS = {"br": ".br", "gzip": ".gz"}  # in order of preference, best compression first
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
NOT_BUILT = (
    "The web app hasn't been built. Run <code>make web</code> in the checkout, or install a wheel."
)
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
    """The files of a build. Compressed versions are stored next to the files."""

    folder: Path

    @cached_property
    def paths(self) -> frozenset[str]:
        """The paths that can be requested. No other file is ever opened."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        names = frozenset(file.relative_to(self.folder).as_posix() for file in files)
        compressed = {f"{name}{ending}" for name in names for ending in ENCODINGS.values()}
        return names - compressed - {*NOT_SERVED, *(f"{name}.map" for name in names)}

    @property
    def is_built(self) -> bool:
        return INDEX in self.paths

    def read(self, path: str, accepted: str) -> tuple[bytes, str | None]:
        """Returns a file's bytes and their encoding, or None if they aren't compressed.

        `accepted` is the client's Accept-Encoding header.
        """
        for encoding, ending in ENCODINGS.items():
            if accepts(accepted, encoding):
                compressed = self.folder / f"{path}{ending}"
                if compressed.is_file():
                    return compressed.read_bytes(), encoding
        return (self.folder / path).read_bytes(), None


def accepts(accepted: str, encoding: str) -> bool:
    """Checks whether an Accept-Encoding header allows an encoding."""
    for option in accepted.lower().split(","):
        name, _, weight = option.partition(";")
        if name.strip() == encoding:
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def content_policy(store: str) -> str:
    """Returns the Content-Security-Policy. `store` is the origin for uploads and downloads."""
    return (
        "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self';"
        f" img-src 'self' blob: data: {store}; media-src 'self' blob: {store};"
        f" connect-src 'self' {store}; worker-src 'self'; manifest-src 'self';"
        " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )


async def store_origin(store: ObjectStore) -> str:
    """Returns the origin of signed URLs, which is the bucket's host or, for a local folder,
    ours."""
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
        """Returns the HTML document. The app then shows the page for the current URL."""
        if not self.is_built:
            return HTMLResponse(f"<!doctype html><title>comfyfleet</title><p>{NOT_BUILT}</p>", 404)
        if self._policy is None:
            self._policy = content_policy(await store_origin(self._store))
        headers = {**SAFE_HEADERS, "content-security-policy": self._policy}
        return await self._sent(request, INDEX, {**headers, "cache-control": REVALIDATED})

    def expects_page(self, request: Request) -> bool:
        """Checks whether a request for an unknown path comes from a person in a browser."""
        is_read = request.method in ("GET", "HEAD")
        accepts_html = "text/html" in request.headers.get("accept", "")
        path = f"{request.scope['path']}/"
        return self.is_built and is_read and accepts_html and not path.startswith(NOT_FOR_PEOPLE)

    async def not_found(self, request: Request) -> Response:
        """Returns the HTML document with status 404. The app then shows "Page not found"."""
        response = await self.page(request)
        if response.status_code == 200:
            response.status_code = 404
        return response

    async def icon(self, request: Request) -> Response:
        request.path_params["path"] = ICON
        return await self.file(request)

    async def file(self, request: Request) -> Response:
        path = request.path_params["path"]
        if path not in self._files.paths or path == INDEX:
            return Response(status_code=404)
        # The names of assets contain a hash of their content, so they can be cached forever.
        caching = FOREVER if path.startswith("assets/") else REVALIDATED
        # An SVG that is opened in its own tab could contain a script.
        policy = {
            "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox"
        }
        return await self._sent(request, path, {**SAFE_HEADERS, **policy, "cache-control": caching})

    async def _sent(self, request: Request, path: str, headers: Mapping[str, str]) -> Response:
        accepted = request.headers.get("accept-encoding", "")
        content, encoding = await asyncio.to_thread(self._files.read, path, accepted)
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        sent_headers = {**headers, "etag": etag, "vary": "accept-encoding"}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=sent_headers)
        if encoding:
            sent_headers["content-encoding"] = encoding
        return Response(content, headers=sent_headers, media_type=_mime_type(path))


def _mime_type(path: str) -> str:
    suffix = Path(path).suffix
    return MIME_TYPES.get(suffix) or mimetypes.guess_type(path)[0] or "application/octet-stream"


def web_routes(pages: WebPages) -> list[BaseRoute]:
    """Returns the routes of all pages and files except `/`, which programs request as well."""
    paths = [path for page in PAGES for path in (f"/{page}", f"/{page}/{{rest:path}}")]
    routes: list[BaseRoute] = [Route(path, pages.page, methods=["GET"]) for path in paths]
    routes.append(Route(ICON_PATH, pages.icon, methods=["GET"]))
    return [*routes, Route(f"{FILES_PATH}/{{path:path}}", pages.file, methods=["GET"])]


def no_route(pages: WebPages, default: ASGIApp) -> ASGIApp:
    """Returns the application for unknown paths. People get the app's "Page not found", and
    programs get the default response."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and pages.expects_page(request := Request(scope, receive)):
            await (await pages.not_found(request))(scope, receive, send)
        else:
            await default(scope, receive, send)

    return answer

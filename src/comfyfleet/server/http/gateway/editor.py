"""Serves ComfyUI's own editor with its page, its files and a sign-in form.

The editor resolves all URLs relative to its own URL. Therefore, `/editor/` contains all routes of
ComfyUI's API in addition to the editor's files.
"""

import asyncio
import gzip
import hashlib
import json
import mimetypes
import re
from base64 import b64encode
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from importlib import util
from pathlib import Path
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from comfyfleet.errors import FleetError, Forbidden, Unauthenticated
from comfyfleet.protocol.http import BodyTooLarge, Route, Router, empty_reply, json_reply
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.gateway.offers import offer_to
from comfyfleet.server.http.gateway.app import GatewayRouter, NamedRoute, error_reply
from comfyfleet.server.http.gateway.auth import GivenKey, authenticate, authenticate_key
from comfyfleet.server.http.gateway.templates import INDEX, Templates
from comfyfleet.server.http.middleware import EDITOR_FILE
from comfyfleet.server.http.sessions import (
    clear_cookie,
    is_same_origin,
    is_secure,
    session_of,
    set_cookie,
    sign_in,
    sign_out,
)
from comfyfleet.server.tenants.model import Caller
from comfyfleet.server.tenants.model import Scope as KeyScope
from comfyfleet.server.tenants.sessions import SessionGrant

PREFIX = "/editor"
PACKAGE = "comfyui_frontend_package"
INSTALL = "pip install 'comfyfleet[editor]'"
EXTENSION = "extensions/comfyfleet/editor.js"
NO_PICTURE = "assets/images/default-template.png"
# The editor requests these at the root, regardless of its own path.
FAVICON, FAVICONS = "/assets/favicon.ico", "/assets/images/favicon_progress_16x16"
# Responses for user files that the editor requests before they exist, by path. The empty path lists
# a folder, whose name is in the query.
USERDATA = f"{PREFIX}/api/userdata"
FOUND_EMPTY = {
    "": ("application/json", "[]"),
    "/user.css": ("text/css", ""),
    "/comfy.templates.json": ("application/json", "[]"),
    "/workflows/.index.json": ("application/json", '{"favorites": []}'),
}
# Defaults for settings that the user hasn't changed. Previews are only sent to clients that request
# them.
DEFAULT_SETTINGS = {"Comfy.Execution.PreviewMethod": "auto"}
# Values that override the user's settings, so that the editor uses the canvas with live previews
# and doesn't call third-party hosts.
FORCED_SETTINGS = {
    "Comfy.VueNodes.Enabled": False,
    "Comfy.Notification.ShowVersionUpdates": False,
}
LOGIN_BYTES_MAX = 8192
# The cookie that identifies the user whose drafts the browser stores. It grants no access.
DRAFTS_COOKIE = "comfyfleet_drafts_of"
DRAFTS_SECONDS = 365 * 24 * 3600

FOREVER = "public, max-age=31536000, immutable"
REVALIDATED = "no-cache"
COMPRESSED_BYTES_MIN = 1024
COMPRESSED = ("text/", "application/json", "application/wasm", "image/svg+xml")
MIME_TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
    ".webp": "image/webp",
    ".woff2": "font/woff2",
}
# Matches files whose names contain a hash of their content, so that they can be cached forever.
_NAMED_BY_CONTENT = re.compile(r"assets/.*-[\w-]{8}\.\w+")
_INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.S)


@dataclass(frozen=True)
class EditorFile:
    """A file with its response headers. `gzipped` isn't set for small and incompressible files."""

    content: bytes
    gzipped: bytes | None
    mime_type: str
    etag: str
    cache_control: str


@dataclass
class EditorFiles:
    """The files of a folder. Each file is compressed once."""

    folder: Path
    _compressed: dict[str, bytes] = field(default_factory=dict)

    @cached_property
    def paths(self) -> frozenset[str]:
        """The relative paths of all files that may be served. No other path is ever opened."""
        files = (file for file in self.folder.rglob("*") if file.suffix != ".map")
        return frozenset(
            file.relative_to(self.folder).as_posix() for file in files if file.is_file()
        )

    @cached_property
    def index(self) -> str:
        return (self.folder / "index.html").read_text(encoding="utf-8")

    def read(self, path: str) -> EditorFile | None:
        if path not in self.paths:
            return None
        file = self.folder / path
        content, mime_type = file.read_bytes(), _mime_type(path)
        return EditorFile(
            content,
            self._gzipped(path, content, mime_type),
            mime_type,
            f'"{file.stat().st_mtime_ns:x}-{len(content):x}"',
            FOREVER if _NAMED_BY_CONTENT.fullmatch(path) else REVALIDATED,
        )

    def _gzipped(self, path: str, content: bytes, mime_type: str) -> bytes | None:
        if len(content) < COMPRESSED_BYTES_MIN or not mime_type.startswith(COMPRESSED):
            return None
        if path not in self._compressed:
            self._compressed[path] = gzip.compress(content, mtime=0)
        return self._compressed[path]


def _mime_type(path: str) -> str:
    suffix = Path(path).suffix.lower()
    return MIME_TYPES.get(suffix) or mimetypes.guess_type(path)[0] or "application/octet-stream"


def installed_files() -> EditorFiles | None:
    """Returns the editor's files, or None if the `editor` extra isn't installed."""
    spec = util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "static"
    return EditorFiles(folder) if folder.is_dir() else None


OWN_FILES = EditorFiles(Path(__file__).with_name("editor_files"))


@dataclass(frozen=True)
class Editor:
    """The editor's page and files. `files` isn't set if the editor isn't installed."""

    router: GatewayRouter
    files: EditorFiles | None
    templates: Templates

    @property
    def plane(self) -> ControlPlane:
        return self.router.gateway.plane

    async def caller_of(self, request: Request) -> Caller:
        return await authenticate(self.plane, request, self.router.gateway.local)

    async def comfyui_answer(self, request: Request) -> Response:
        """Returns ComfyUI's response to the same request without `/editor` in its path."""
        return await self.router.answer(Request(_above(request.scope), request.receive))

    def read(self, path: str) -> EditorFile | None:
        own_file = OWN_FILES.read(path)
        return self.files.read(path) if own_file is None and self.files else own_file


class EditorRouter(Router[Editor]):
    """The routes below `/editor` that aren't part of ComfyUI's API."""

    def __init__(self, editor: Editor) -> None:
        super().__init__(editor, None, ROUTES, {})
        self.gateway_router = editor.router
        self._public_url = editor.plane.settings.public_url

    def is_page(self, scope: Scope) -> bool:
        handlers = self._fixed.get(scope["path"], {})
        method = scope.get("method")
        return ("GET" if method == "HEAD" else method) in handlers

    async def answer(self, request: Request) -> Response:
        is_reading = request.method in ("GET", "HEAD")
        if not is_reading and not is_same_origin(request, self._public_url):
            return empty_reply(403)
        try:
            # Other sites may link to pages and files, because they contain no user data.
            return await (self._dispatch(request) if is_reading else super().answer(request))
        except FleetError as error:
            return error_reply(error, request.scope["path"])


class EditorRoutes:
    """ASGI middleware that handles requests below `/editor`. The editor's own pages come first,
    then ComfyUI's routes, then the editor's files."""

    def __init__(self, app: ASGIApp, router: EditorRouter) -> None:
        self._app = app
        self._editor = router
        self._gateway = router.gateway_router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not _is_below(scope["path"]):
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        inner = self._gateway.route_of(path.removeprefix(PREFIX))
        is_page = self._editor.is_page(scope)
        route = path if is_page else EDITOR_FILE if inner is None else PREFIX + inner
        scope["route"] = NamedRoute(route)
        if is_page or inner is None:
            await self._editor(scope, receive, send)
        else:
            await self._gateway(_above(scope), receive, send)


def _above(scope: Scope) -> Scope:
    """Returns the request's scope without `/editor` in its path."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = scope["path"].removeprefix(PREFIX)
    return {**scope, "path": path, "raw_path": raw.removeprefix(PREFIX.encode())}


def _is_below(path: str) -> bool:
    return path in (PREFIX, FAVICON) or path.startswith((f"{PREFIX}/", f"{FAVICONS}/"))


async def get_bare(editor: Editor, request: Request) -> Response:
    return _redirect("editor/")


async def get_index(editor: Editor, request: Request) -> Response:
    if (files := editor.files) is None:
        return _page(f"<h1>The editor isn't installed</h1><p><code>{INSTALL}</code></p>", 404)
    if request.headers.get("sec-fetch-site") == "cross-site":
        # When a user follows a link on another site, the browser sends the cookie only after this
        # refresh.
        return _page('<meta http-equiv="refresh" content="0"><p>One moment…</p>')
    try:
        caller = await editor.caller_of(request)
    except FleetError:
        return _redirect("login")
    if caller.session_id is not None and not _are_drafts_of(caller, request):
        return _without_drafts_of_others(editor, request, caller)
    index = await asyncio.to_thread(lambda: files.index)
    headers = {"cache-control": REVALIDATED, **_security_headers(_policy(index))}
    return Response(index, headers=headers, media_type="text/html")


def _policy(index: str) -> str:
    """Returns the Content-Security-Policy of the editor's page.

    The editor may only connect to this server, but it creates inline styles and images.
    """
    scripts = " ".join(_source(script) for script in _INLINE_SCRIPT.findall(index))
    return (
        f"default-src 'self'; script-src 'self' 'wasm-unsafe-eval' {scripts};"
        " style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; media-src 'self' data: blob:;"
        " font-src 'self' data:; connect-src 'self' data: blob:; worker-src 'self' blob:;"
        " object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def _source(script: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _security_headers(policy: str) -> dict[str, str]:
    return {
        "content-security-policy": policy,
        "referrer-policy": "same-origin",
        "x-content-type-options": "nosniff",
    }


async def get_file(editor: Editor, request: Request) -> Response:
    file = await asyncio.to_thread(editor.read, request.path_params["path"])
    return empty_reply(404) if file is None else _sent(file, request)


def _sent(file: EditorFile, request: Request) -> Response:
    headers = {
        "cache-control": file.cache_control,
        "etag": file.etag,
        "vary": "accept-encoding",
        "x-content-type-options": "nosniff",
    }
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    content = file.content
    if file.gzipped is not None and "gzip" in request.headers.get("accept-encoding", ""):
        content = file.gzipped
        headers["content-encoding"] = "gzip"
    return Response(content, headers=headers, media_type=file.mime_type)


async def get_favicon(editor: Editor, request: Request) -> Response:
    request.scope["path_params"] = {"path": request.scope["path"].removeprefix("/")}
    return await get_file(editor, request)


async def get_template(editor: Editor, request: Request) -> Response:
    name = request.path_params["name"]
    if INDEX.fullmatch(name):
        caller = await editor.caller_of(request)
        offer = await offer_to(editor.plane, caller)
        index = await asyncio.to_thread(editor.templates.index, name, offer.object_info.keys())
        return json_reply(index)
    if not name.endswith(".json"):
        # The packages with the templates' thumbnails take up hundreds of megabytes and aren't
        # installed, so a placeholder is sent.
        request.scope["path_params"] = {"path": NO_PICTURE}
        return await get_file(editor, request)
    document = await asyncio.to_thread(editor.templates.document, name)
    if document is None:
        return json_reply({}, 200 if name == "index_logo.json" else 404)
    return Response(document, media_type="application/json")


async def get_settings(editor: Editor, request: Request) -> Response:
    reply = await editor.comfyui_answer(request)
    if reply.status_code != 200:
        return reply
    chosen = json.loads(bytes(reply.body))
    return json_reply({**DEFAULT_SETTINGS, **chosen, **FORCED_SETTINGS})


async def get_user_file(editor: Editor, request: Request) -> Response:
    """Returns a user file, or empty content if the file doesn't exist yet.

    The editor requests these files before it creates them.
    """
    reply = await editor.comfyui_answer(request)
    if reply.status_code != 404:
        return reply
    mime_type, content = FOUND_EMPTY[request.scope["path"].removeprefix(USERDATA)]
    return Response(content, media_type=mime_type)


async def get_extensions(editor: Editor, request: Request) -> Response:
    return json_reply([f"/{EXTENSION}"])


async def get_session(editor: Editor, request: Request) -> Response:
    """Returns whether the browser is signed in with a session, so that the editor can offer to sign
    out."""
    session = await session_of(editor.plane, request)
    return json_reply({"by_cookie": session is not None})


async def get_login(editor: Editor, request: Request) -> Response:
    return _login_page()


async def post_login(editor: Editor, request: Request) -> Response:
    key = await _key_in_form(request)
    try:
        caller = await authenticate_key(editor.plane, request, GivenKey(key))
        caller.require(KeyScope.WRITE)
    except Unauthenticated:
        return _login_page("This key is invalid.", 401)
    except Forbidden:
        return _login_page("This key doesn't permit submitting prompts.", 403)
    if _are_drafts_of(caller, request):
        response = _redirect("./")
    else:
        response = _without_drafts_of_others(editor, request, caller)
    signed_in = await sign_in(editor.plane, request, SessionGrant(caller), "key")
    set_cookie(response, editor.plane, request, signed_in)
    return response


def _are_drafts_of(caller: Caller, request: Request) -> bool:
    return request.cookies.get(DRAFTS_COOKIE) == _drafts_owner(caller)


def _without_drafts_of_others(editor: Editor, request: Request, caller: Caller) -> Response:
    """Redirects to the editor after removing other users' unsaved drafts from the browser."""
    response = _cleared('<meta http-equiv="refresh" content="0;url=./"><p>One moment…</p>')
    response.set_cookie(
        DRAFTS_COOKIE,
        _drafts_owner(caller),
        max_age=DRAFTS_SECONDS,
        httponly=True,
        samesite="strict",
        secure=is_secure(request, editor.plane.settings.public_url),
    )
    return response


async def post_logout(editor: Editor, request: Request) -> Response:
    plane = editor.plane
    await sign_out(plane, request)
    response = _cleared(_login_form('<p role="status">You are signed out.</p>'))
    clear_cookie(response, plane, request)
    secure = is_secure(request, plane.settings.public_url)
    response.delete_cookie(DRAFTS_COOKIE, httponly=True, samesite="strict", secure=secure)
    return response


async def _key_in_form(request: Request) -> str:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LOGIN_BYTES_MAX:
            raise BodyTooLarge("the sign-in form is too large", bytes_max=LOGIN_BYTES_MAX)
    return parse_qs(body.decode("latin-1")).get("key", [""])[0].strip()


def _drafts_owner(caller: Caller) -> str:
    return hashlib.sha256(f"{caller.tenant.id}/{caller.user_id}".encode()).hexdigest()[:32]


_STYLE = """
body { background: #171718; color: #ddd; font: 16px/1.5 system-ui, sans-serif; display: grid; place-items: center;
  min-height: 100vh; margin: 0 }
main { width: min(26rem, 90vw); padding: 2rem; background: #262729; border-radius: 12px }
h1 { font-size: 1.25rem; margin: 0 0 1rem; color: #fff }
label { display: block; margin-bottom: .25rem }
input, button { box-sizing: border-box; width: 100%; padding: .6rem .75rem; font: inherit; border-radius: 8px }
input { background: #171718; color: #fff; border: 1px solid #55565e }
button { margin-top: 1rem; border: 0; background: #0b8ce9; color: #fff; cursor: pointer }
:focus-visible { outline: 2px solid #8cf; outline-offset: 2px }
[role=alert] { color: #ffb4a9 }
"""
# A script that clears the browser's storage, because browsers ignore `Clear-Site-Data` on plain
# HTTP.
_CLEAR = "localStorage.clear(); sessionStorage.clear()"


def _page(body: str, status: int = 200, script: str = "") -> Response:
    scripts = f"script-src {_source(script)}; " if script else ""
    policy = (
        f"default-src 'none'; {scripts}style-src {_source(_STYLE)}; form-action 'self';"
        " base-uri 'none'; frame-ancestors 'none'"
    )
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>comfyfleet</title><style>{_STYLE}</style></head><body><main>{body}</main>"
        f"{f'<script>{script}</script>' if script else ''}</body></html>"
    )
    headers = {"cache-control": "no-store", **_security_headers(policy)}
    return Response(text, status, headers, "text/html")


def _cleared(body: str) -> Response:
    """Returns a page that removes the previous user's data from the browser's storage."""
    response = _page(body, script=_CLEAR)
    response.headers["clear-site-data"] = '"storage"'
    return response


def _login_page(problem: str = "", status: int = 200) -> Response:
    alert = f'<p role="alert">{escape(problem)}</p>' if problem else ""
    return _page(_login_form(alert), status)


def _login_form(notice: str = "") -> str:
    return (
        f'<h1>ComfyUI on comfyfleet</h1>{notice}<form method="post" action="login">'
        '<label for="key">API key</label>'
        '<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>'
        "<button>Sign in</button></form>"
    )


def _redirect(to: str) -> Response:
    """Redirects to a relative path, because the public path may start with a proxy's prefix or a
    key."""
    return Response(status_code=303, headers={"location": to, "cache-control": "no-store"})


_ALONE = ("",)
ROUTES = (
    Route("GET", PREFIX, get_bare, _ALONE),
    Route("GET", f"{PREFIX}/", get_index, _ALONE),
    Route("GET", f"{PREFIX}/index.html", get_index, _ALONE),
    Route("GET", f"{PREFIX}/session", get_session, _ALONE),
    Route("GET", f"{PREFIX}/login", get_login, _ALONE),
    Route("POST", f"{PREFIX}/login", post_login, _ALONE),
    Route("POST", f"{PREFIX}/logout", post_logout, _ALONE),
    Route("GET", f"{PREFIX}/api/extensions", get_extensions, _ALONE),
    Route("GET", f"{PREFIX}/api/settings", get_settings, _ALONE),
    *(Route("GET", USERDATA + path, get_user_file, _ALONE) for path in FOUND_EMPTY),
    Route("GET", f"{PREFIX}/templates/{{name}}", get_template, _ALONE),
    Route("GET", FAVICON, get_favicon, _ALONE),
    Route("GET", f"{FAVICONS}/{{name}}", get_favicon, _ALONE),
    Route("GET", EDITOR_FILE, get_file, _ALONE),
)

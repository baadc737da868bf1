"""The ASGI application: routers, middleware, error handlers and the pages of the documentation."""

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute

from comfyfleet import __version__
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http import (
    admin,
    deps,
    errors,
    examples,
    health,
    local_workflows,
    oidc,
    public,
    sign_in,
    worker,
)
from comfyfleet.server.http.admin.auth import authenticate_operator
from comfyfleet.server.http.body_times import BodyTimes
from comfyfleet.server.http.cors import CrossOriginCalls, areas_of
from comfyfleet.server.http.direct_routes import DirectRoutes
from comfyfleet.server.http.gateway import (
    EditorRoutes,
    GatewayRoutes,
    KeyInPath,
    editor_router,
    gateway_router,
)
from comfyfleet.server.http.gateway.editor import installed_files
from comfyfleet.server.http.gateway.passthrough import PassThrough
from comfyfleet.server.http.local_access import LocalAccess
from comfyfleet.server.http.middleware import (
    SHARED_PATH,
    AccessLog,
    CallerAuth,
    Check,
    WrongKeyThrottle,
    check_of,
)
from comfyfleet.server.http.objects import objects_routes, small_pictures_route
from comfyfleet.server.http.request_body import BodyLimits
from comfyfleet.server.http.route_hints import known_routes
from comfyfleet.server.http.strangers import ForwardedRequests, KeylessRequests
from comfyfleet.server.http.tallies import limit_transfers
from comfyfleet.server.http.web import WebPages, no_route, web_routes
from comfyfleet.server.http.web.pages import NOT_BUILT
from comfyfleet.server.media.small_pictures import SMALL_PATH
from comfyfleet.server.storage import LocalStore
from comfyfleet.server.storage.local import OBJECTS_PATH
from comfyfleet.settings import parse_origins

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code { font-family: ui-monospace, monospace } summary { cursor: pointer; padding: .25rem 0 }
table { border-collapse: collapse; margin: .5rem 0 1rem 1rem } td { padding: .1rem 1rem .1rem 0; vertical-align: top }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #eee } a { color: #8cf } }
"""
UNSERVED_PATH = "/ "
PLACES = {"documentation": "/docs", "openapi": "/openapi.json", "health": "/healthz"}
router = APIRouter(include_in_schema=False)


@router.get("/")
async def home(request: Request) -> Response:
    """Returns a page for browsers and JSON for programs."""
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"name": "comfyfleet", "version": __version__, **PLACES})
    web: WebPages | None = request.app.state.web
    if web is not None and web.is_built:
        return await web.page(request)
    return _page(
        "comfyfleet",
        f"<p>Version {escape(__version__)}. This is the control plane's API; it takes bearer keys.</p>"
        f"<p>{NOT_BUILT if web is not None else 'The pages for people are turned off.'}</p>"
        '<ul><li><a href="/docs">What can be called</a></li>'
        '<li><a href="/openapi.json">The same as an OpenAPI document</a></li>'
        '<li><a href="/readyz">Whether it can work</a></li></ul>',
    )


@router.get("/docs")
async def documentation(request: Request) -> Response:
    """Returns the OpenAPI document as a page."""
    described = await _rendered_document(request.app)
    return HTMLResponse(described.page, headers=HEADERS)


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    described = await _rendered_document(request.app)
    return Response(described.document, media_type="application/json")


class RenderedDocument(NamedTuple):
    """The OpenAPI document as JSON and as a page. Rendered once, because that takes seconds."""

    document: bytes
    page: bytes


async def _rendered_document(app: FastAPI) -> RenderedDocument:
    """Renders the document once, in a thread. Concurrent calls wait for the same result."""
    making: asyncio.Future[RenderedDocument] | None = getattr(app.state, "described", None)
    if making is None:
        making = asyncio.ensure_future(asyncio.to_thread(_render_document, app))
        app.state.described = making
    return await asyncio.shield(making)


def _render_document(app: FastAPI) -> RenderedDocument:
    document = app.openapi()
    title = f"comfyfleet {__version__}: the API"
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return RenderedDocument(text.encode(), bytes(_page(title, "".join(_sections(document))).body))


def _page(title: str, body: str) -> HTMLResponse:
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>"
    )
    return HTMLResponse(text, headers=HEADERS)


def _sections(document: Mapping[str, Any]) -> Iterator[str]:
    schemas = document.get("components", {}).get("schemas", {})
    yield f"<p>{escape(document['info'].get('description', ''))}</p>"
    for tag in document.get("tags", ()):
        yield f"<h2>{escape(tag['name'])}</h2><p>{escape(tag.get('description', ''))}</p>"
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if tag["name"] in operation.get("tags", ()):
                    yield _operation(method, path, operation, schemas)


def _operation(
    method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> str:
    summary = operation.get("description") or operation.get("summary", "")
    rows = [*_parameters(operation), *_fields(operation, schemas)]
    table = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td><td>{escape(text)}</td></tr>"
        for name, kind, text in rows
    )
    return (
        f"<details><summary><code>{method.upper()} {escape(path)}</code></summary>"
        f"<p>{escape(summary)}</p><table>{table}</table></details>"
    )


def _parameters(operation: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for parameter in operation.get("parameters", ()):
        yield (
            parameter["name"],
            f"{parameter['in']}, {_kind(parameter['schema'])}",
            parameter.get("description", ""),
        )


def _fields(
    operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    found_schema = schemas.get(_name(schema), {})
    for name, field in found_schema.get("properties", {}).items():
        must = ", required" if name in found_schema.get("required", ()) else ""
        yield name, f"body, {_kind(field)}{must}", field.get("description", "")


def _kind(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(option) for option in schema["anyOf"]))
    return _name(schema) or str(schema.get("format") or schema.get("type") or "any")


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


DESCRIPTION = """Run ComfyUI as a production service.

Bearer keys, or the session of a browser (`/api/session`), which sends its `csrf` as `X-CSRF-Token` with every change; errors are `{"error": {"code", "message", "details"}}` with a stable `code`.
"""
TAGS = [
    {
        "name": "effects",
        "description": "The catalogue: what can be applied, its price and its properties.",
    },
    {
        "name": "videos",
        "description": "A user's media: uploads of pictures, videos and sound, and their results.",
    },
    {
        "name": "ai-jobs",
        "description": "Jobs of effects: submit, follow, cancel, retry; also in batches.",
    },
    {"name": "shares", "description": "Links that show a result to people without a key."},
    {"name": "graphs", "description": "Graphs of workflows: store, validate, price, run, follow."},
    {
        "name": "pipelines",
        "description": "Runs that generate candidates step by step, which users judge.",
    },
    {"name": "triggers", "description": "Schedules and incoming webhooks that start runs."},
    {"name": "account", "description": "Whose key it is, limits, and a search over all."},
    {"name": "wallet", "description": "The balance in tokens, and its transactions."},
    {"name": "session", "description": "Who is signed in in a browser: sign-in and sign-out."},
    {"name": "keys", "description": "A user's own API keys."},
    {"name": "webhooks", "description": "Notifications to a user's server when jobs end."},
    {"name": "admin", "description": "For operators; needs an operator's key, or the admin key."},
    {"name": "worker", "description": "For workers; needs a worker's key."},
    {"name": "objects", "description": "Files by signed URLs, where the store is a local folder."},
    {"name": "health", "description": "Health checks and metrics."},
]

PROBLEMS = deps.problems(400, 401, 403, 404, 409, 413, 422, 429, 503)

# The first matching prefix wins. Signed URLs and links authorize themselves, and examples are
# public.
CHECKS: tuple[tuple[str, Check | None], ...] = (
    (f"{OBJECTS_PATH}/", None),
    (f"{SMALL_PATH}/", None),
    (f"{examples.EXAMPLES_PATH}/", None),
    (f"{SHARED_PATH}/", None),
    # The route itself checks whether the catalogue is public.
    (public.CATALOGUE_PATH, None),
    ("/api/worker/register", worker.authenticate_fleet),
    ("/api/worker/", worker.authenticate_worker),
    ("/api/admin/", authenticate_operator),
    (sign_in.PATH, None),
    ("/api/", public.authenticate_customer),
)


def _routes_of(*routers: APIRouter, **given: Any) -> list[BaseRoute]:
    joined = APIRouter()
    for router in routers:
        joined.include_router(router, **given)
    return joined.routes


# The framework builds a route when it is first matched, which takes long: these are the same for
# every application of a process. Nor may one be made for one application: the framework keeps what
# it has once called, and with it all that a function of one control plane holds.
_WORKER_ROUTES = _routes_of(worker.router, responses=PROBLEMS)
_PUBLIC_ROUTES = known_routes(each for router in public.ROUTERS for each in router.routes)
_PUBLIC_AREAS = areas_of(each for router in public.ROUTERS for each in router.routes)
_OTHER_ROUTES = [
    *_routes_of(
        health.metrics_router, health.router, router, sign_in.router, oidc.router, *public.ROUTERS
    ),
    *_routes_of(examples.router, local_workflows.router),
    *_routes_of(*admin.ROUTERS, responses=PROBLEMS),
]


def build_routes(routes: Iterable[BaseRoute]) -> None:
    """Builds all routes by matching a path that none of them serves. The first such call would otherwise
    stop the event loop for the time that takes."""
    scope = {"type": "http", "method": "GET", "path": UNSERVED_PATH, "headers": []}
    for route in routes:
        route.matches(scope)


def create_app(
    plane: ControlPlane, local: LocalAccess | None = None, backends: Mapping[str, str] | None = None
) -> FastAPI:
    """Creates the application. `local` gives access to the user who started `comfyfleet up`.
    `backends` are URLs to which routes of custom nodes are passed on if an operator allows it."""
    app = FastAPI(
        title="comfyfleet",
        version=__version__,
        description=DESCRIPTION,
        openapi_tags=TAGS,
        # Both are our own pages.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        # A redirect would contain the host that the caller sent.
        redirect_slashes=False,
    )
    app.state.plane = plane
    app.state.local = local
    app.state.wrong_keys = WrongKeyThrottle()
    limit_transfers(app)
    errors.install(app, plane.meters, _PUBLIC_ROUTES)
    deps.install(app)
    public.install(app, plane)
    oidc.install(app, plane)
    health.install(app, plane)
    # Routes are tried in order, so the most frequent ones come first.
    app.router.routes.extend(_WORKER_ROUTES)
    if isinstance(plane.store, LocalStore):
        app.router.routes.extend(objects_routes(plane.store))
    app.router.routes.append(small_pictures_route(plane.small, plane.store))
    app.router.routes.extend(_OTHER_ROUTES)
    app.state.web = WebPages(plane) if plane.settings.web else None
    if app.state.web is not None:
        app.router.routes.extend(web_routes(app.state.web))
        app.router.default = no_route(app.state.web, app.router.default)
    build_routes(app.router.routes)
    often = (*worker.CALLED_OFTEN, *public.CALLED_OFTEN)
    app.add_middleware(DirectRoutes, plane=plane, declared=often)
    app.add_middleware(BodyLimits, of_customers=plane.settings.max_body_bytes)
    app.add_middleware(CallerAuth, checks=CHECKS)
    gateway = gateway_router(plane, local)
    app.state.has_editor = installed_files() is not None
    app.add_middleware(
        PassThrough, gateway=gateway.gateway, backends=backends or {}, own=app.router.routes
    )
    app.add_middleware(GatewayRoutes, router=gateway)
    app.add_middleware(EditorRoutes, router=editor_router(gateway))
    _add_outer_middleware(app, plane)
    return app


def _add_outer_middleware(app: FastAPI, plane: ControlPlane) -> None:
    """Adds middleware for every route. The last one added runs first."""
    app.add_middleware(BodyTimes)
    app.add_middleware(KeylessRequests)
    app.add_middleware(
        ForwardedRequests, is_checked=lambda path: check_of(CHECKS, path) is not None
    )
    app.add_middleware(AccessLog, meters=plane.meters, stopping=plane.stopping)
    app.add_middleware(KeyInPath)
    _allow_origins(app, plane)


def _allow_origins(app: FastAPI, plane: ControlPlane) -> None:
    origins = parse_origins(plane.settings.cors_origins)
    if origins:
        app.add_middleware(CrossOriginCalls, origins=origins, areas=_PUBLIC_AREAS)

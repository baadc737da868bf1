"""The ASGI application with its routers, middleware, error handlers and API documentation."""

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
    """Returns the start page to browsers, and the version and links as JSON to programs."""
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"name": "comfyfleet", "version": __version__, **PLACES})
    web: WebPages | None = request.app.state.web
    if web is not None and web.is_built:
        return await web.page(request)
    return _page(
        "comfyfleet",
        f"<p>Version {escape(__version__)}. This is the control plane's API."
        " Authenticate with a bearer key.</p>"
        f"<p>{NOT_BUILT if web is not None else 'The web app is turned off.'}</p>"
        '<ul><li><a href="/docs">API reference</a></li>'
        '<li><a href="/openapi.json">OpenAPI document</a></li>'
        '<li><a href="/readyz">Readiness check</a></li></ul>',
    )


@router.get("/docs")
async def documentation(request: Request) -> Response:
    """Returns the API reference as an HTML page."""
    described = await _rendered_document(request.app)
    return HTMLResponse(described.page, headers=HEADERS)


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    described = await _rendered_document(request.app)
    return Response(described.document, media_type="application/json")


class RenderedDocument(NamedTuple):
    """The OpenAPI document as JSON and as an HTML page. It is rendered once, because that takes
    seconds."""

    document: bytes
    page: bytes


async def _rendered_document(app: FastAPI) -> RenderedDocument:
    """Renders the OpenAPI document once, in a thread. Concurrent calls wait for the same result."""
    rendering: asyncio.Future[RenderedDocument] | None = getattr(app.state, "described", None)
    if rendering is None:
        rendering = asyncio.ensure_future(asyncio.to_thread(_render_document, app))
        app.state.described = rendering
    return await asyncio.shield(rendering)


def _render_document(app: FastAPI) -> RenderedDocument:
    document = app.openapi()
    title = f"comfyfleet {__version__} API reference"
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
    model = schemas.get(_name(schema), {})
    for name, field in model.get("properties", {}).items():
        must = ", required" if name in model.get("required", ()) else ""
        yield name, f"body, {_kind(field)}{must}", field.get("description", "")


def _kind(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(option) for option in schema["anyOf"]))
    return _name(schema) or str(schema.get("format") or schema.get("type") or "any")


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


DESCRIPTION = """Run ComfyUI as a production service.

Authenticate with a bearer key, or with a browser session (see `/api/session`). Browsers must send
the session's `csrf` token as `X-CSRF-Token` with every request that changes something. Errors have
the form `{"error": {"code", "message", "details"}}`, and `code` is stable.
"""
TAGS = [
    {
        "name": "effects",
        "description": "The catalog of effects, with their prices and properties.",
    },
    {
        "name": "videos",
        "description": "A user's media: uploaded images, videos and audio, and results of jobs.",
    },
    {
        "name": "ai-jobs",
        "description": "Jobs that run effects. Submit, follow, cancel and retry jobs and batches.",
    },
    {"name": "shares", "description": "Links that show results to people without a key."},
    {
        "name": "graphs",
        "description": "Graphs of workflows. Store, validate, price, run and follow them.",
    },
    {
        "name": "pipelines",
        "description": "Pipelines, which generate candidates step by step for users to judge.",
    },
    {"name": "triggers", "description": "Schedules and incoming webhooks that start runs."},
    {"name": "account", "description": "The owner of the key, the limits, and a global search."},
    {"name": "wallet", "description": "The balance in tokens, and its transactions."},
    {"name": "session", "description": "Sign-in and sign-out in browsers."},
    {"name": "keys", "description": "A user's own API keys."},
    {"name": "webhooks", "description": "Notifications sent to a user's server when jobs finish."},
    {"name": "admin", "description": "For operators. Requires an operator's key or the admin key."},
    {"name": "worker", "description": "For workers. Requires a worker's key."},
    {"name": "objects", "description": "Signed URLs for files, if the store is a local folder."},
    {"name": "health", "description": "Health checks and metrics."},
]

PROBLEMS = deps.problems(400, 401, 403, 404, 409, 413, 422, 429, 503)

# How the caller is authenticated, by path prefix. The first matching prefix wins. None means that
# the route requires no key. Signed URLs and shared links contain a secret, examples are public, and
# callers of the sign-in routes may not be signed in yet.
CHECKS: tuple[tuple[str, Check | None], ...] = (
    (f"{OBJECTS_PATH}/", None),
    (f"{SMALL_PATH}/", None),
    (f"{examples.EXAMPLES_PATH}/", None),
    (f"{SHARED_PATH}/", None),
    # The route itself checks whether the catalog is public.
    (public.CATALOGUE_PATH, None),
    ("/api/worker/register", worker.authenticate_fleet),
    ("/api/worker/", worker.authenticate_worker),
    ("/api/admin/", authenticate_operator),
    (sign_in.PATH, None),
    ("/api/", public.authenticate_customer),
)


def _routes_of(*routers: APIRouter, **options: Any) -> list[BaseRoute]:
    joined = APIRouter()
    for router in routers:
        joined.include_router(router, **options)
    return joined.routes


# These routes are shared by all applications of a process, for two reasons. FastAPI builds a route
# when it is first matched, which is slow. It also caches the functions that it has called, so a
# route created for one application would keep that application's control plane in memory.
_WORKER_ROUTES = _routes_of(worker.router, responses=PROBLEMS)
_PUBLIC_ROUTES = known_routes(route for router in public.ROUTERS for route in router.routes)
_PUBLIC_AREAS = areas_of(route for router in public.ROUTERS for route in router.routes)
_OTHER_ROUTES = [
    *_routes_of(
        health.metrics_router, health.router, router, sign_in.router, oidc.router, *public.ROUTERS
    ),
    *_routes_of(examples.router, local_workflows.router),
    *_routes_of(*admin.ROUTERS, responses=PROBLEMS),
]


def build_routes(routes: Iterable[BaseRoute]) -> None:
    """Builds all routes at startup by matching a path that none of them serves.

    Otherwise, the first request would build them and block the event loop during that time.
    """
    scope = {"type": "http", "method": "GET", "path": UNSERVED_PATH, "headers": []}
    for route in routes:
        route.matches(scope)


def create_app(
    plane: ControlPlane, local: LocalAccess | None = None, backends: Mapping[str, str] | None = None
) -> FastAPI:
    """Creates the application. `local` grants keyless access to the user of `comfyfleet up`.
    `backends` are the URLs to which allowed calls of custom nodes' routes are forwarded."""
    app = FastAPI(
        title="comfyfleet",
        version=__version__,
        description=DESCRIPTION,
        openapi_tags=TAGS,
        # We serve our own documents instead.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        # Redirects would contain the Host header that the client sent, which can't be trusted.
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

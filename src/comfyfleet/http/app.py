"""The control plane's API: one application, a router per audience."""

from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.routing import BaseRoute

from comfyfleet import __version__
from comfyfleet.http import admin, errors, health, metrics, pages, problems, public, worker
from comfyfleet.http.access import Access
from comfyfleet.http.auth import operator_calling
from comfyfleet.http.bodies import Bodies
from comfyfleet.http.callers import Callers, Check
from comfyfleet.http.direct import DirectRoutes
from comfyfleet.http.objects import objects_routes
from comfyfleet.http.wrong_keys import WrongKeys
from comfyfleet.plane import Plane
from comfyfleet.storage import LocalStore
from comfyfleet.storage.signing import OBJECTS_PATH

DESCRIPTION = """Run ComfyUI as a production service.

Bearer keys; errors are `{"error": {"code", "message", "details"}}` with a stable `code`.
"""
TAGS = [
    {"name": "effects", "description": "What can be applied, at which price, with which choices."},
    {"name": "videos", "description": "A user's media, pictures and sounds too: up, and back."},
    {"name": "ai-jobs", "description": "Effects at work: submit, follow, cancel, retry, in bulk."},
    {"name": "graphs", "description": "Workflows of workflows: keep, check, price, run, follow."},
    {"name": "pipelines", "description": "Runs that go on by themselves, and are judged."},
    {"name": "wallet", "description": "Tokens: what there is, and how it came to that."},
    {"name": "keys", "description": "A user's own API keys."},
    {"name": "webhooks", "description": "Where a user's server is told how jobs ended."},
    {"name": "admin", "description": "For operators; needs an operator's key, or the admin key."},
    {"name": "worker", "description": "For workers; needs a worker's key."},
    {"name": "objects", "description": "Files by signed URLs, where the store is a local folder."},
    {"name": "health", "description": "For whatever watches the process."},
]

PROBLEMS = problems.problems(400, 401, 403, 404, 409, 413, 422, 429, 503)

# By the first prefix that fits. Signed URLs carry their right themselves.
CHECKS: tuple[tuple[str, Check | None], ...] = (
    (f"{OBJECTS_PATH}/", None),
    ("/api/worker/register", worker.stranger_joining),
    ("/api/worker/", worker.worker_calling),
    ("/api/admin/", operator_calling),
    ("/api/", public.customer_calling),
)


def _included(*routers: APIRouter, **given: Any) -> list[BaseRoute]:
    joined = APIRouter()
    for router in routers:
        joined.include_router(router, **given)
    return joined.routes


# The framework makes a route ready at its first call, which takes long: these are the same for
# every application of a process. Nor may one be made for one application: the framework keeps what
# it has once called, and with it all that a function of one control plane holds.
_OF_WORKERS = _included(worker.router, responses=PROBLEMS)
_OF_PEOPLE = [
    *_included(metrics.router, health.router, pages.router, *public.ROUTERS),
    *_included(*admin.ROUTERS, responses=PROBLEMS),
]


def create_app(plane: Plane) -> FastAPI:
    app = FastAPI(
        title="comfyfleet",
        version=__version__,
        description=DESCRIPTION,
        openapi_tags=TAGS,
        # Both are pages of ours.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        # A redirect would name the host that the caller named.
        redirect_slashes=False,
    )
    app.state.plane = plane
    app.state.wrong_keys = WrongKeys()
    errors.install(app, plane.meters)
    problems.install(app)
    public.install(app, plane)
    metrics.install(app, plane)
    # Routes are tried one after the other: first those that are called most.
    app.router.routes.extend(_OF_WORKERS)
    if isinstance(plane.store, LocalStore):
        app.router.routes.extend(objects_routes(plane.store))
    app.router.routes.extend(_OF_PEOPLE)
    often = (*worker.CALLED_OFTEN, *public.CALLED_OFTEN)
    app.add_middleware(DirectRoutes, plane=plane, declared=often)
    app.add_middleware(Bodies, of_customers=plane.settings.max_body_bytes)
    app.add_middleware(Callers, checks=CHECKS)
    app.add_middleware(Access, meters=plane.meters)
    return app

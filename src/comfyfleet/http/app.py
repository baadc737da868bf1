"""The control plane's API: one application, a router per audience."""

from fastapi import FastAPI

from comfyfleet import __version__
from comfyfleet.http import errors, health
from comfyfleet.http.access import Access
from comfyfleet.plane import Plane

DESCRIPTION = """Run ComfyUI as a production service.

Bearer keys; errors are `{"error": {"code", "message", "details"}}` with a stable `code`.
"""
TAGS = [
    {"name": "admin", "description": "For operators; needs the admin key."},
    {"name": "worker", "description": "For workers; needs a worker's key."},
    {"name": "objects", "description": "Files by signed URLs, where the store is a local folder."},
    {"name": "health", "description": "For whatever watches the process."},
]


def create_app(plane: Plane) -> FastAPI:
    app = FastAPI(
        title="comfyfleet", version=__version__, description=DESCRIPTION, openapi_tags=TAGS
    )
    app.state.plane = plane
    errors.install(app, plane.meters)
    app.include_router(health.router)
    app.add_middleware(Access, meters=plane.meters)
    return app

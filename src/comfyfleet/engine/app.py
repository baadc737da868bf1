"""The engine as a web application."""

from comfyfleet.engine.door import Door
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.routes import files, info, internal, prompts, users
from comfyfleet.engine.routes.socket import talk

SOCKETS = {"/ws": talk, "/api/ws": talk}
ROUTES = (*prompts.ROUTES, *files.ROUTES, *info.ROUTES, *users.ROUTES, *internal.ROUTES)


def create_app(engine: Engine) -> Door[Engine]:
    return Door(engine, engine, ROUTES, SOCKETS)

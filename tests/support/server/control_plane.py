"""A control plane in this process, on real databases of either kind."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.support.databases.factory import Databases

from comfyfleet.clock import Clock, utc_now
from comfyfleet.server.app import ControlPlane, open_control_plane
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.middleware import WrongKeyThrottle
from comfyfleet.settings import Settings

ADMIN_KEY = "an-admin-key-of-tests"
URL = "http://control.test"


@asynccontextmanager
async def plane_on(
    databases: Databases, data: Path, *, clock: Clock = utc_now, **settings: Any
) -> AsyncIterator[ControlPlane]:
    central, pool = await databases.url("central"), await databases.url("tenant")
    given = Settings(
        **{
            "admin_key": ADMIN_KEY,
            "central_database_url": central,
            "tenant_database_urls": f"main={pool}",
            "public_url": URL,
            **settings,
        }
    )
    async with open_control_plane(given, data, clock) as plane:
        yield plane
    await databases.give_back(central, pool)


_documented: dict[str, tuple[str, ...]] = {}


def documented_routes(plane: ControlPlane) -> Mapping[str, tuple[str, ...]]:
    """The methods of each path in the OpenAPI document, which takes long to make and never changes."""
    if not _documented:
        paths = create_app(plane).openapi()["paths"]
        _documented.update({path: tuple(methods) for path, methods in paths.items()})
    return _documented


async def at_once(_seconds: float) -> None:
    """Replaces the delay after a wrong key, so that no test waits for it."""


@asynccontextmanager
async def client_of(
    plane: ControlPlane, key: str | None = ADMIN_KEY
) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    app = create_app(plane)
    app.state.wrong_keys = WrongKeyThrottle(at_once)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=URL, headers=headers) as client:
        yield client

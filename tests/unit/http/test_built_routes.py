"""Routes are built before the first request: the framework builds them when they are first matched."""

import fastapi.routing
import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on

from comfyfleet.server.http import admin, app, health, public
from comfyfleet.server.http.app import create_app


async def test_the_first_call_that_no_route_serves_builds_no_route(
    sqlite_databases: Databases,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Other tests of this process have built the routes of the module.
    unbuilt = app._routes_of(health.router, *public.ROUTERS, *admin.ROUTERS)
    monkeypatch.setattr(app, "_OTHER_ROUTES", unbuilt)
    async with plane_on(sqlite_databases, tmp_path_factory.mktemp("plane")) as plane:
        application = create_app(plane)
        built: list[str] = []
        build = fastapi.routing._populate_api_route_state

        def note(route: object, path: str, *arguments: object, **options: object) -> None:
            built.append(path)
            build(route, path, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(fastapi.routing, "_populate_api_route_state", note)
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://control.test") as client:
            for path in ("/nothing", "/api/nothing", "/api/admin/nothing", "/healthz"):
                await client.get(path)
                await client.post(path)
    assert built == []

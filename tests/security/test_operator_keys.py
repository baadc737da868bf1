"""Operators are people: what each role may, who did it, and what wrong keys meet with."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import (
    ADMIN_KEY,
    URL,
    client_of,
    documented_routes,
    plane_on,
)

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.middleware import FREE_TRIES, WrongKeyThrottle


@pytest.fixture
async def plane(databases: Databases, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with plane_on(databases, tmp_path) as plane:
        yield plane


@pytest.fixture
async def admin(plane: ControlPlane) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(plane) as client:
        yield client


async def added(admin: httpx.AsyncClient, name: str, role: str) -> dict[str, str]:
    made = await admin.post("/api/admin/operators", json={"name": name, "role": role})
    assert made.status_code == 201, made.text
    assert made.json()["key"].startswith("cfo_")
    return {"Authorization": f"Bearer {made.json()['key']}"}


READ = ("GET", "/api/admin/fleets", None)
ACT = ("POST", "/api/admin/maintenance", {"on": True})
OWN: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/api/admin/operators", {"name": "eve", "role": "owner"}),
    ("POST", "/api/admin/operators/ada/revoke", None),
    ("POST", f"/api/admin/tenants/{uuid4()}/erase", None),
    (
        "POST",
        f"/api/admin/tenants/{uuid4()}/wallets/{uuid4()}/credits",
        {"amount": 5, "provider_transaction_id": "x"},
    ),
    ("PUT", f"/api/admin/tenants/{uuid4()}/quota", {"max_storage_bytes": 5}),
)


async def test_each_role_may_what_it_includes_and_no_more(admin: httpx.AsyncClient) -> None:
    keys = {role: await added(admin, role, role) for role in ("viewer", "operator", "owner")}
    refused: dict[str, list[str]] = {role: [] for role in keys}
    for role, headers in keys.items():
        for method, path, body in (READ, ACT, *OWN):
            answer = await admin.request(method, path, json=body, headers=headers)
            assert answer.status_code != 401, answer.text
            if answer.status_code == 403:
                refused[role].append(path)
    owned = [path for _, path, _ in OWN]
    assert refused == {"viewer": [ACT[1], *owned], "operator": owned, "owner": []}


async def test_the_audit_names_the_person_and_is_filtered_by_them(admin: httpx.AsyncClient) -> None:
    ada = await added(admin, "ada", "operator")
    await admin.post("/api/admin/maintenance", json={"on": True}, headers=ada)
    await admin.post("/api/admin/maintenance", json={"on": False})
    found = await admin.get("/api/admin/audit", params={"actor": "operator:ada"})
    assert [each["action"] for each in found.json()["entries"]] == ["maintenance"]
    (made,) = (await admin.get("/api/admin/audit?action=add_operator")).json()["entries"]
    assert (made["actor"], made["subject"]) == ("admin", "operator:ada")


async def test_a_revoked_operator_is_out_at_once_on_every_control_plane(
    databases: Databases, tmp_path: Path
) -> None:
    if not databases.server_url:
        pytest.skip("SQLite means one process")
    async with plane_on(databases, tmp_path / "a") as a:
        places = {
            name: getattr(a.settings, name)
            for name in ("central_database_url", "tenant_database_urls")
        }
        async with (
            plane_on(databases, tmp_path / "b", **places) as b,
            client_of(a) as at_a,
            client_of(b) as at_b,
        ):
            ada = await added(at_a, "ada", "viewer")
            assert (await at_b.get("/api/admin/fleets", headers=ada)).status_code == 200
            await at_a.post("/api/admin/operators/ada/revoke")
            assert (await at_b.get("/api/admin/fleets", headers=ada)).status_code == 401


async def test_a_name_is_one_persons_for_ever_and_no_key_is_told_twice(
    admin: httpx.AsyncClient, plane: ControlPlane
) -> None:
    ada = await added(admin, "ada", "viewer")
    await admin.post("/api/admin/operators/ada/revoke")
    again = await admin.post("/api/admin/operators", json={"name": "ada", "role": "owner"})
    assert again.status_code == 409
    for name in ("admin", "a b", "", "x" * 101):
        refused = await admin.post("/api/admin/operators", json={"name": name})
        assert refused.status_code == 422, name
    listed = await admin.get("/api/admin/operators")
    assert ada["Authorization"].split()[1] not in listed.text
    assert listed.json()["operators"][0]["revoked_at"]


class Sleeping:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.mark.parametrize(
    ("method", "path", "header"),
    [
        ("GET", "/api/admin/fleets", "Authorization"),
        ("GET", "/api/effects", "Authorization"),
        ("POST", "/api/worker/register", "X-Fleet-Secret"),
        ("POST", "/api/worker/poll", "Authorization"),
    ],
)
async def test_wrong_keys_are_slowed_down_and_the_right_one_is_not(
    plane: ControlPlane, method: str, path: str, header: str
) -> None:
    app, sleeping = create_app(plane), Sleeping()
    app.state.wrong_keys = WrongKeyThrottle(sleeping)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
        for number in range(FREE_TRIES + 5):
            answer = await client.request(method, path, headers={header: f"Bearer {number}"})
            assert answer.status_code == 401, answer.text
        assert len(sleeping.seconds) == 5
        right = {"Authorization": f"Bearer {ADMIN_KEY}"}
        assert (await client.get("/api/admin/fleets", headers=right)).status_code == 200
        nobody = await client.request(method, path)
        assert nobody.status_code == 401
        assert len(sleeping.seconds) == 5, "whoever sends no key guesses nothing"


OWNERS = {
    "POST /api/admin/operators",
    "POST /api/admin/operators/{name}/revoke",
    "PUT /api/admin/tenants/{tenant_id}/quota",
    "PUT /api/admin/tenants/{tenant_id}/retention",
    "POST /api/admin/tenants/{tenant_id}/erase",
    "POST /api/admin/tenants/{tenant_id}/wallets/{user_id}/credits",
}


ENDLESS = {"GET /api/admin/events"}


def routes_of(plane: ControlPlane) -> dict[str, tuple[str, str]]:
    """Every admin route by its name, and how to call it with ids of things that are not there."""
    nobody = str(uuid4())
    return {
        f"{method.upper()} {path}": (method, re.sub(r"\{\w+_id\}", nobody, path).translate(BRACES))
        for path, methods in documented_routes(plane).items()
        if path.startswith("/api/admin/")
        for method in methods
    }


BRACES = str.maketrans("", "", "{}")


async def test_every_route_asks_for_its_role_whatever_is_sent(
    admin: httpx.AsyncClient, plane: ControlPlane
) -> None:
    keys = {role: await added(admin, role, role) for role in ("viewer", "operator")}
    keys["gone"] = await added(admin, "gone", "owner")
    await admin.post("/api/admin/operators/gone/revoke")
    app = create_app(plane)
    app.state.wrong_keys = WrongKeyThrottle(Sleeping())
    routes = routes_of(plane)
    refused: dict[str, set[str]] = {role: set() for role in keys}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=URL) as client:
        for route, (method, path) in routes.items():
            for role, headers in keys.items():
                if route in ENDLESS and role != "gone":
                    continue  # it would be answered for as long as the key is valid
                answer = await client.request(method, path, headers=headers)
                if answer.status_code == (401 if role == "gone" else 403):
                    refused[role].add(route)
    assert refused["gone"] == routes.keys()
    assert refused["viewer"] == {route for route in routes if not route.startswith("GET ")}
    assert refused["operator"] == OWNERS


async def test_nobody_is_locked_out_by_wrong_keys_from_the_same_address(
    admin: httpx.AsyncClient, plane: ControlPlane
) -> None:
    ada = await added(admin, "ada", "viewer")
    app, gate = create_app(plane), asyncio.Event()

    async def held(_seconds: float) -> None:
        await gate.wait()

    app.state.wrong_keys = WrongKeyThrottle(held)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=URL) as client:

        async def calls(key: dict[str, str]) -> int:
            return (await client.get("/api/admin/fleets", headers=key)).status_code

        guesses = [{"Authorization": f"Bearer {n}"} for n in range(FREE_TRIES + 150)]
        guessing = [asyncio.create_task(calls(each)) for each in guesses]
        try:
            for answered in islice(asyncio.as_completed(guessing, timeout=30), FREE_TRIES + 50):
                await answered
            # Made just now, so not known to be right: nobody could have guessed it.
            assert await calls(ada) == 200
            assert await calls({"Authorization": f"Bearer cfo_{'0' * 64}"}) == 429
            assert await calls({"Authorization": "Bearer hunter2"}) == 429
        finally:
            gate.set()
            answers = Counter(await asyncio.gather(*guessing))
    assert answers == {401: FREE_TRIES + 100, 429: 50}

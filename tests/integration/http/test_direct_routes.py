"""What is called most goes past the framework, and nobody can tell from the answers."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import URL, at_once, plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on

from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.direct_routes import DirectRoutes
from comfyfleet.server.http.middleware import WrongKeyThrottle

PATHS = tuple(
    f"/api/worker/{word}" for word in ("poll", "heartbeat", "complete", "fail", "requeue")
)
JSON = {"Content-Type": "application/json"}
LEASE = f'"dispatch_id": 7, "lease_token": "{uuid4()}"'.encode()
WHOLE = b'{"worker_id": "w1", "error": "why", "reason": "spot", %s}' % LEASE
BODIES: tuple[tuple[bytes, dict[str, str]], ...] = (
    (WHOLE, JSON),
    (WHOLE.decode().encode("utf-16"), JSON),
    (WHOLE, {"Content-Type": "application/problem+json; charset=utf-8"}),
    (WHOLE, {"Content-Type": "text/plain"}),
    (WHOLE, {"Content-Type": "nonsense"}),
    (WHOLE, {}),
    (WHOLE.replace(b'"w1"', b'"w2"'), JSON),
    (WHOLE.replace(b'"spot"', b'"no \\u0000 reason \\ud800"'), JSON),
    (WHOLE[:-1] + b', "execution_seconds": NaN, "current_load": 1e999}', JSON),
    (WHOLE[:-1] + b', "held": [{}], "progress": {"percent": 101}, "outputs": 3}', JSON),
    (WHOLE.replace(b'"dispatch_id": 7', b'"dispatch_id": "seven"'), JSON),
    (b"", JSON),
    (b"", {}),
    (b"{", JSON),
    (b"no JSON at all", JSON),
    (b"\xff\xfe\xfa", JSON),
    (b"null", JSON),
    (b'""', JSON),
    (b"[1, 2]", JSON),
    (b"{}", JSON),
    (b"[" * 150 + b"]" * 150, JSON),
    (b"[" * 100_000, JSON),
)


@pytest.fixture
async def fleet_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[FleetSetup]:
    async with plane_on(databases, tmp_path) as plane, fleet_setup_on(plane) as fleet_setup:
        yield fleet_setup


def declared_only(app: FastAPI) -> FastAPI:
    direct: object = DirectRoutes
    app.user_middleware = [each for each in app.user_middleware if each.cls is not direct]
    return app


@asynccontextmanager
async def client_on(app: FastAPI, key: str | None) -> AsyncIterator[httpx.AsyncClient]:
    app.state.wrong_keys = WrongKeyThrottle(at_once)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=URL, headers=headers) as client:
        yield client


def told(answer: httpx.Response) -> tuple[Any, ...]:
    headers = {name: text for name, text in answer.headers.items() if name != "x-request-id"}
    return answer.status_code, headers, answer.content


def counted(fleet_setup: FleetSetup) -> dict[tuple[str, ...], float]:
    """Calls by route and status, and errors by code."""
    meters = fleet_setup.plane.meters

    def samples() -> Iterator[tuple[tuple[str, ...], float]]:
        for counter in (meters.calls, meters.errors):
            for metric in counter.collect():
                for each in metric.samples:
                    if each.name.endswith("_total"):
                        yield (each.name, *each.labels.values()), each.value

    return dict(samples())


def more(after: dict[Any, float], before: dict[Any, float]) -> dict[Any, float]:
    return {key: n - before.get(key, 0) for key, n in after.items() if n != before.get(key, 0)}


async def key_of(fleet_setup: FleetSetup) -> str:
    key: str = (await fleet_setup.register()).json()["token"]
    return key


@pytest.mark.parametrize("path", PATHS)
async def test_any_body_is_answered_as_by_the_declared_route(
    fleet_setup: FleetSetup, path: str
) -> None:
    key = await key_of(fleet_setup)
    direct, declared = create_app(fleet_setup.plane), declared_only(create_app(fleet_setup.plane))
    async with client_on(direct, key) as here, client_on(declared, key) as there:
        begun = counted(fleet_setup)
        answers = [await here.post(path, content=body, headers=of) for body, of in BODIES]
        between = counted(fleet_setup)
        wanted = [await there.post(path, content=body, headers=of) for body, of in BODIES]
        ended = counted(fleet_setup)
    for (body, _), answer, want in zip(BODIES, answers, wanted, strict=True):
        assert told(answer) == told(want), body[:100]
    assert more(between, begun) == more(ended, between)
    assert {each.status_code for each in answers} >= {400, 422}


@pytest.mark.parametrize("key", [None, "", "wrong", "0" * 64])
async def test_whoever_has_no_key_is_answered_as_by_the_declared_route(
    fleet_setup: FleetSetup, key: str | None
) -> None:
    direct, declared = create_app(fleet_setup.plane), declared_only(create_app(fleet_setup.plane))
    async with client_on(direct, key) as here, client_on(declared, key) as there:
        for path in PATHS:
            answer = await here.post(path, content=b"no JSON")
            assert answer.status_code == 401
            assert told(answer) == told(await there.post(path, content=b"no JSON"))
            assert told(await here.get(path)) == told(await there.get(path))


async def test_a_job_is_run_the_same_way_past_the_framework(fleet_setup: FleetSetup) -> None:
    key = await key_of(fleet_setup)
    said = []
    for app in (create_app(fleet_setup.plane), declared_only(create_app(fleet_setup.plane))):
        await fleet_setup.submit()
        async with client_on(app, key) as client:
            polled = await client.post("/api/worker/poll", json={"worker_id": "w1"})
            job = polled.json()["job"]
            lease = {name: job[name] for name in ("dispatch_id", "lease_token")}
            beat = await client.post("/api/worker/heartbeat", json={**lease, "started": True})
            slot = job["outputs"][0]
            await client.put(slot["url"], content=b"made", headers=slot["headers"])
            outputs = [{"name": slot["name"], "size": 4}]
            ended = await client.post("/api/worker/complete", json={**lease, "outputs": outputs})
        assert ended.json() == {"ok": True}
        said.append((polled.headers["content-type"], sorted(job), sorted(beat.json()), told(ended)))
    assert said[0] == said[1]


async def test_the_document_describes_them_as_ever(fleet_setup: FleetSetup) -> None:
    document = create_app(fleet_setup.plane).openapi()
    assert document == declared_only(create_app(fleet_setup.plane)).openapi()
    for path in PATHS:
        described = document["paths"][path]["post"]
        assert described["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert described["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]

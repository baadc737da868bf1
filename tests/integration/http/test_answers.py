"""How the API answers when something is wrong, whatever was asked."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from pydantic import BaseModel, Field
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import ADMIN_KEY, URL, plane_on

from comfyfleet import errors
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.admin.auth import require_operator
from comfyfleet.server.http.app import create_app


class Slugged(BaseModel):
    slug: str = Field(min_length=3)


RAISED: dict[str, Exception] = {
    "invalid": errors.InvalidValue("3.steps is no number", node="3"),
    "missing": errors.NotFound("there is no fleet x"),
    "lost": errors.LeaseLost("the lease is no longer held"),
    "refused": errors.Refused("no worker can run it", missing={"node_types": ["X"]}),
    "full": errors.QueueFull("too many jobs wait", retry_after_seconds=12.4),
    "fleetfull": errors.FleetFull("the fleet is full"),
    "large": errors.LimitExceeded("too large"),
    "away": errors.Unavailable(
        "a part of the service can't be reached at the moment; try again soon"
    ),
    "forbidden": errors.Forbidden("not with this key"),
    "bug": ValueError("secret inner words"),
}


def with_traps(app: FastAPI) -> FastAPI:
    @app.get("/raise/{name}")
    async def raises(name: str) -> None:
        raise RAISED[name]

    @app.post("/parse")
    async def parses(body: Slugged) -> str:
        return body.slug

    @app.get("/api/admin/mine")
    async def mine(actor: Annotated[str, Depends(require_operator)]) -> str:
        return actor

    return app


@pytest.fixture
async def plane(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with plane_on(sqlite_databases, tmp_path) as plane:
        yield plane


@pytest.fixture
async def client(plane: ControlPlane) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(with_traps(create_app(plane)))
    async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
        yield client


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("invalid", 422, "invalid_value"),
        ("missing", 404, "not_found"),
        ("lost", 409, "lease_lost"),
        ("refused", 422, "refused"),
        ("full", 429, "queue_full"),
        ("fleetfull", 429, "fleet_full"),
        ("large", 413, "limit_exceeded"),
        ("away", 503, "unavailable"),
        ("forbidden", 403, "forbidden"),
    ],
)
async def test_an_error_of_ours_has_its_status_and_keeps_its_code(
    client: httpx.AsyncClient, name: str, status: int, code: str
) -> None:
    answer = await client.get(f"/raise/{name}")
    assert answer.status_code == status
    raised = RAISED[name]
    assert isinstance(raised, errors.FleetError)
    error = {"code": code, "message": raised.message, "details": dict(raised.details)}
    assert answer.json() == {"error": error}


async def test_who_may_come_again_is_told_when(client: httpx.AsyncClient) -> None:
    assert (await client.get("/raise/full")).headers["retry-after"] == "12"
    assert int((await client.get("/raise/fleetfull")).headers["retry-after"]) > 0
    assert int((await client.get("/raise/away")).headers["retry-after"]) > 0


async def test_a_bug_is_logged_under_an_id_and_nothing_of_it_is_told(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await client.get("/raise/bug", headers={"X-Request-Id": "mine-7"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal"
    assert answer.json()["error"]["details"] == {"request_id": "mine-7"}
    assert "secret inner words" not in answer.text
    assert "secret inner words" in caplog.text


@pytest.mark.parametrize(("sent", "field"), [({"slug": "x"}, "slug"), ({}, "slug"), ([], "body")])
async def test_what_does_not_fit_is_named_and_not_repeated(
    client: httpx.AsyncClient, sent: Any, field: str
) -> None:
    answer = await client.post("/parse", json=sent)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["code"] == "invalid_input"
    assert error["message"].startswith(f"{field}: ")
    assert [each["field"] for each in error["details"]["fields"]] == [field]
    assert set(error["details"]["fields"][0]) == {"field", "message"}


async def test_a_route_that_is_not_there_is_answered_in_the_same_shape(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.get("/nowhere")).json()["error"]["code"] == "not_found"
    assert (await client.delete("/healthz")).json()["error"]["code"] == "method_not_allowed"


async def test_a_customer_is_told_similar_routes_and_a_stranger_none(
    client: httpx.AsyncClient,
) -> None:
    stranger = await client.post("/api/graphs/7/execute", json={})
    assert stranger.status_code == 401
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    tenant = (await client.post("/api/admin/tenants", json={"name": "Ada"}, headers=admin)).json()
    headers = {"Authorization": f"Bearer {tenant['key']}"}
    unknown = await client.post("/api/graphs/7/execute", json={}, headers=headers)
    assert unknown.status_code == 404
    assert "POST /api/graphs/{graph_id}/runs" in unknown.json()["error"]["details"]["hint"]
    wrong_method = await client.post("/api/pipeline-runs", json={}, headers=headers)
    assert wrong_method.status_code == 405
    assert "GET /api/pipeline-runs" in wrong_method.json()["error"]["details"]["hint"]
    assert wrong_method.headers["allow"] == "GET"


async def test_only_the_admin_key_opens_what_is_for_operators(client: httpx.AsyncClient) -> None:
    async def asked(header: str | None) -> httpx.Response:
        return await client.get(
            "/api/admin/mine", headers={"Authorization": header} if header else {}
        )

    for wrong in (None, "Bearer x", f"Basic {ADMIN_KEY}", "Bearer "):
        answer = await asked(wrong)
        assert answer.status_code == 401, wrong
        assert answer.json()["error"]["code"] == "unauthenticated"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert (await asked(f"Bearer {ADMIN_KEY}")).json() == "admin"


async def test_requests_have_ids_and_query_strings_are_not_logged(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="comfyfleet.access"):
        answer = await client.get("/nowhere?signature=verysecret")
    assert len(answer.headers["x-request-id"]) == 32
    assert "GET /nowhere 404" in caplog.text
    assert "verysecret" not in caplog.text
    hostile = await client.get("/healthz", headers={"X-Request-Id": "a b\tc"})
    assert hostile.headers["x-request-id"] != "a b\tc"


async def test_a_request_that_is_too_large_is_refused_told_or_not(
    client: httpx.AsyncClient,
) -> None:
    megabyte = b" " * 1024**2

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield megabyte

    for content in (megabyte * 9, pieces()):
        answer = await client.post(
            "/parse", content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 413, answer.text
        assert answer.json()["error"]["code"] == "limit_exceeded"


async def test_a_path_cannot_break_a_line_of_the_log(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="comfyfleet.access"):
        await client.get("/nowhere%0aERROR%20forged")
    assert "/nowhere%0aERROR%20forged" in caplog.text

"""Submit and status go past the framework, and no customer can tell from the answers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from tests.integration.http.test_direct_routes import client_on, counted, declared_only, more, told
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import EffectSetup, effect_setup_on

from comfyfleet.server.http.app import create_app
from comfyfleet.server.tenants.model import Scope

JOBS = "/api/ai-jobs"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def effect_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[EffectSetup]:
    async with plane_on(databases, tmp_path) as plane, effect_setup_on(plane) as effect_setup:
        yield effect_setup


def bodies(effect_id: UUID) -> tuple[tuple[bytes, dict[str, str]], ...]:
    """None of them makes a job."""
    good = b'{"effect_id": "%s"}' % str(effect_id).encode()

    def with_(more: bytes) -> bytes:
        return good[:-1] + b", " + more + b"}"

    return (
        (good.decode().encode("utf-16")[:-3], JSON),
        (good, {"Content-Type": "text/plain"}),
        (good, {}),
        (good.replace(good[15:], str(uuid4()).encode() + b'"}'), JSON),
        (good.replace(b'"effect_id"', b'"effect"'), JSON),
        (with_(b'"properties": 3'), JSON),
        (with_(b'"properties": {"width": 9999}'), JSON),
        (with_(b'"properties": {"width": NaN}'), JSON),
        (with_(b'"properties": {"prefix": "\\u0000"}'), JSON),
        (with_(b'"properties": {}, "properties": {}'), JSON),
        (with_(b'"idempotency_key": ""'), JSON),
        (with_(b'"video_id": "%s"' % str(uuid4()).encode()), JSON),
        (with_(b'"unknown": 1'), JSON),
        (b"", JSON),
        (b"", {}),
        (b"{", JSON),
        (b"\xff\xfe\xfa", JSON),
        (b"null", JSON),
        (b"[1, 2]", JSON),
        (b"{}", JSON),
        (b"[" * 150 + b"]" * 150, JSON),
    )


async def test_any_wrong_submit_is_answered_as_by_the_declared_route(
    effect_setup: EffectSetup,
) -> None:
    key = (await effect_setup.customer()).key
    direct, declared = create_app(effect_setup.plane), declared_only(create_app(effect_setup.plane))
    sent = bodies(effect_setup.draw.id)
    async with client_on(direct, key) as here, client_on(declared, key) as there:
        begun = counted(effect_setup.fleet_setup)
        answers = [await here.post(JOBS, content=body, headers=of) for body, of in sent]
        between = counted(effect_setup.fleet_setup)
        wanted = [await there.post(JOBS, content=body, headers=of) for body, of in sent]
        ended = counted(effect_setup.fleet_setup)
    for (body, _), answer, want in zip(sent, answers, wanted, strict=True):
        assert told(answer) == told(want), body[:100]
    assert more(between, begun) == more(ended, between)
    assert {each.status_code for each in answers} == {400, 404, 422}


def shape(answer: httpx.Response) -> tuple[Any, ...]:
    """What is the same for all jobs that are made alike."""
    body = answer.json()
    fixed = ("status", "effect_id", "video_id", "price_tokens", "error", "text", "values")
    return answer.status_code, sorted(answer.headers), list(body), [body[each] for each in fixed]


async def test_a_job_is_submitted_the_same_way(effect_setup: EffectSetup) -> None:
    key = (await effect_setup.customer()).key
    said = []
    for number, app in enumerate(
        (create_app(effect_setup.plane), declared_only(create_app(effect_setup.plane)))
    ):
        async with client_on(app, key) as client:
            body = {"effect_id": str(effect_setup.draw.id), "properties": {"width": 32}}
            made = await client.post(JOBS, json=body)
            again = {**body, "idempotency_key": f"order-{number}"}
            twice = [await client.post(JOBS, json=again) for _ in range(2)]
            assert [each.status_code for each in (made, *twice)] == [201, 201, 200]
            assert made.json()["properties"]["width"] == 32
            assert twice[0].json()["id"] == twice[1].json()["id"]
            said.append([*map(shape, (made, *twice))])
    assert said[0] == said[1]


async def test_a_job_is_followed_the_same_way(effect_setup: EffectSetup) -> None:
    customer = await effect_setup.customer()
    path = f"{JOBS}/{await customer.job(effect_setup.draw)}"
    direct, declared = create_app(effect_setup.plane), declared_only(create_app(effect_setup.plane))
    async with client_on(direct, customer.key) as here, client_on(declared, customer.key) as there:
        waiting = await here.get(path)
        assert told(waiting) == told(await there.get(path))
        etag = {"If-None-Match": f'"other", {waiting.headers["etag"]}'}
        unchanged = await here.get(path, headers=etag)
        assert (unchanged.status_code, unchanged.content) == (304, b"")
        assert told(unchanged) == told(await there.get(path, headers=etag))
        await effect_setup.work()
        done = await here.get(path, headers=etag)
        assert done.json()["status"] == "completed"
        assert shape(done) == shape(await there.get(path))


async def test_other_paths_and_ids_are_answered_as_by_the_declared_route(
    effect_setup: EffectSetup,
) -> None:
    customer, other = await effect_setup.customer(), await effect_setup.customer()
    job_id = await customer.job(effect_setup.draw)
    theirs = await other.job(effect_setup.draw)
    paths = [
        f"{JOBS}/{uuid4()}",
        f"{JOBS}/{theirs}",
        f"{JOBS}/no-id",
        f"{JOBS}/{job_id.replace('-', '')}",
        f"{JOBS}/{job_id.upper()}",
        f"{JOBS}{job_id}",
        f"{JOBS}/",
        f"{JOBS}/{job_id}/",
        f"{JOBS}/{job_id}?wait=-1",
        f"{JOBS}/{job_id}?wait=no",
        f"{JOBS}/{job_id}?wait=",
        f"{JOBS}/{job_id}?wait=61",
        f"{JOBS}/{job_id}?wait=0",
        f"{JOBS}/{job_id}?wait=0&wait=-1",
        f"{JOBS}/{job_id}?other=1",
    ]
    direct, declared = create_app(effect_setup.plane), declared_only(create_app(effect_setup.plane))
    async with client_on(direct, customer.key) as here, client_on(declared, customer.key) as there:
        for path in paths:
            for method in ("GET", "POST", "HEAD", "PUT"):
                want = await there.request(method, path)
                assert told(await here.request(method, path)) == told(want), (method, path)


async def test_a_job_is_waited_for_past_the_framework(effect_setup: EffectSetup) -> None:
    customer = await effect_setup.customer()
    path = f"{JOBS}/{await customer.job(effect_setup.draw)}"
    app = create_app(effect_setup.plane)
    async with client_on(app, customer.key) as client:
        app.router.routes.clear()  # the framework answers nothing any more
        assert (await client.get(path, params={"wait": 1.5})).status_code == 404
        waiting = asyncio.ensure_future(client.get(path, params={"wait": 60}))
        await effect_setup.work()
        done = await asyncio.wait_for(waiting, 30)
    assert done.json()["status"] == "completed"


async def test_a_key_may_do_past_the_framework_only_what_its_scopes_say(
    effect_setup: EffectSetup,
) -> None:
    reader = await effect_setup.customer(scopes=frozenset({Scope.READ}))
    writer, _ = await effect_setup.key(
        reader.tenant_id, reader.user_id, scopes=frozenset({Scope.WRITE})
    )
    body = {"effect_id": str(effect_setup.draw.id)}
    for app in (create_app(effect_setup.plane), declared_only(create_app(effect_setup.plane))):
        async with client_on(app, reader.key) as may_read, client_on(app, writer) as may_write:
            assert (await may_read.post(JOBS, json=body)).status_code == 403
            assert (await may_read.post(JOBS, json={})).status_code == 403
            made = await may_write.post(JOBS, json=body)
            assert made.status_code == 201
            path = f"{JOBS}/{made.json()['id']}"
            assert (await may_write.get(path)).status_code == 403
            assert (await may_read.get(path)).status_code == 200


async def test_no_key_is_answered_as_by_the_declared_route(effect_setup: EffectSetup) -> None:
    direct, declared = create_app(effect_setup.plane), declared_only(create_app(effect_setup.plane))
    for key in (None, "wrong"):
        async with client_on(direct, key) as here, client_on(declared, key) as there:
            for method, path in (("POST", JOBS), ("GET", f"{JOBS}/{uuid4()}")):
                answer = await here.request(method, path)
                assert answer.status_code == 401
                assert told(answer) == told(await there.request(method, path))

"""Routes of custom nodes that are reached by a worker, which asks for such calls: once each, or not at all."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from tests.support.backends.custom_node import INSTALLED, PREFIX, CustomNode
from tests.support.databases.factory import Databases
from tests.support.server.command_process import started
from tests.support.server.gateway import (
    GatewayInProcess,
    GatewayUser,
    gateway_on,
    until,
    worker_settings,
)
from tests.support.workers.workers import running_worker

from comfyfleet.api.route_calls import ROUTE_BYTES_MAX, RouteAnswer, RouteCall
from comfyfleet.errors import NotFound
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.fleets import route_calls
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets import store_route_calls as store
from comfyfleet.server.fleets.model import FleetWorker
from comfyfleet.server.fleets.route_calls import NewRouteCall
from comfyfleet.server.gateway import freshness
from comfyfleet.server.http.gateway import passthrough
from comfyfleet.server.maintenance.embedded_fleet import FLEET, STAGE, embedded_fleet_secret
from comfyfleet.server.maintenance.retention import begin_erasure, erase_pending_tenants
from comfyfleet.transport.retry import RetryPolicy
from comfyfleet.worker import requested_facts
from comfyfleet.worker.control_client import ControlClient
from comfyfleet.worker.routes import RoutePasser
from comfyfleet.worker.settings import WorkerSettings

JSON = f"{PREFIX}/json"
HOLD = f"{PREFIX}/hold"


@dataclass
class RouteStage:
    """A control plane that reaches no backend itself, and a backend with a worker beside it."""

    gateway: GatewayInProcess
    node: CustomNode
    backend_url: str
    secret: str
    folder: Path

    @property
    def plane(self) -> ControlPlane:
        return self.gateway.plane

    async def allow(self, *prefixes: str) -> None:
        path = f"{self.gateway.url}/api/admin/fleets/{FLEET}/{STAGE}/prompts"
        headers = {"Authorization": f"Bearer {self.gateway.admin_key}"}
        async with httpx.AsyncClient(headers=headers) as admin:
            done = await admin.put(path, json={"passthrough": list(prefixes)})
        assert done.status_code == 200, done.text

    async def order(self, path: str) -> None:
        await asyncio.to_thread(self.gateway.admin, path)

    def settings(self, worker_id: str = "w1", prefix: str = PREFIX) -> WorkerSettings:
        made = worker_settings(
            self.gateway.url, self.secret, self.backend_url, self.folder, worker_id
        )
        return replace(made, passthrough=(prefix,))

    @contextlib.asynccontextmanager
    async def worker(self, worker_id: str = "w1", prefix: str = PREFIX) -> AsyncIterator[None]:
        async with running_worker(self.settings(worker_id, prefix)):
            await until(lambda: self.waits(worker_id))
            yield

    async def waits(self, worker_id: str = "w1") -> bool:
        return any(each.worker.worker_id == worker_id for each in self.plane.routes._waiters)


@pytest.fixture(autouse=True)
def read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators' changes count at once."""
    monkeypatch.setattr(passthrough, "PREFIXES_SECONDS", -1.0)


@contextlib.asynccontextmanager
async def stage_on(
    databases: Databases, folder: Path, **settings: Any
) -> AsyncIterator[RouteStage]:
    node = CustomNode()
    async with gateway_on(databases, folder, engines=0, **settings) as gateway:
        with node.served() as served:
            secret = await embedded_fleet_secret(gateway.plane, folder)
            yield RouteStage(gateway, node, served.url, secret, folder)


@pytest.fixture
async def stage(databases: Databases, tmp_path: Path) -> AsyncIterator[RouteStage]:
    async with stage_on(databases, tmp_path) as stage:
        yield stage


async def asked_once(node: CustomNode) -> bool:
    return len(node.asked) == 1


def new_call(user: GatewayUser, fleet_id: int, path: str = JSON) -> NewRouteCall:
    return NewRouteCall(uuid4(), user.tenant_id, [fleet_id], "GET", path, path, {}, b"")


async def registered(stage: RouteStage, worker_id: str) -> FleetWorker:
    """A worker of which nothing is there but its row."""
    client = ControlClient(stage.gateway.url)
    settings = stage.settings(worker_id)
    message = {"worker_id": worker_id, "fleet_slug": settings.fleet_slug, "stage": settings.stage}
    answer = await client._addresses[0].calls.client.post(
        "/register", json=message, headers={"X-Fleet-Secret": stage.secret}
    )
    await client.aclose()
    async with stage.plane.central.read() as tx:
        return await fleets.authenticate_worker(tx, answer.json()["token"])


async def test_a_call_goes_to_the_backend_of_a_worker_without_any_key(stage: RouteStage) -> None:
    user = await stage.gateway.new_user()
    await stage.allow(PREFIX)
    async with stage.worker(), user.http_async() as http:
        headers = {"Cookie": f"comfyfleet_key={user.key}", "X-Secret": user.key, "Accept": "a/b"}
        path = f"{PREFIX}/upload?token={user.key}&a=1%262"
        answer = await http.post(path, content=b"body", headers=headers)
        assert (answer.status_code, answer.content) == (200, b"<script>1</script>")
        assert (await http.get(JSON)).json() == {"a": 1}
    (method, path, got, body), second = stage.node.asked
    assert (method, path, body) == ("POST", f"{PREFIX}/upload?a=1%262", b"body")
    assert got["accept"] == "a/b"
    assert user.key not in str(stage.node.asked)
    assert second[:2] == ("GET", JSON)
    assert answer.headers["content-security-policy"].startswith("sandbox")
    assert answer.headers["content-disposition"] == "attachment"
    assert not {"set-cookie", "x-inner", "access-control-allow-origin"} & answer.headers.keys()


async def test_what_a_call_has_installed_is_in_the_first_list_however_slow_the_backend_is(
    stage: RouteStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requested_facts, "FACTS_SECONDS_MIN", 3600.0)
    monkeypatch.setattr(freshness, "LIST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(freshness, "QUERY_SECONDS", 60.0)
    user = await stage.gateway.new_user()
    await stage.allow(PREFIX)
    async with stage.worker(), user.http_async() as http:

        async def is_known() -> bool:
            return INSTALLED in (await http.get("/object_info")).json()

        assert not await is_known()
        assert (await http.put(f"{PREFIX}/install")).status_code == 200
        assert await is_known()


async def test_fleet_and_worker_both_must_allow_a_route(
    stage: RouteStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_calls, "PICKUP_SECONDS", 0.1)
    user = await stage.gateway.new_user()
    async with stage.worker(), user.http_async() as http:
        assert (await http.get(JSON)).status_code == 404
        await stage.allow("/api/other")
        assert (await http.get(JSON)).status_code == 404
        refused = await http.get("/api/other/x")
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        await stage.allow(PREFIX)
        assert (await http.get(f"{PREFIX}x")).status_code == 404
        for trick in ("/../x", "/%2e%2e/x", "/%252e%252e/x", "//x", "/..%5cx", "/..;/x"):
            found = await http.get(httpx.URL(f"{stage.gateway.url}{PREFIX}").copy_with(
                raw_path=f"{PREFIX}{trick}".encode()
            ))  # fmt: skip
            assert found.status_code == 404, trick
    assert stage.node.asked == []


async def test_what_the_backend_may_not_answer_is_a_502(stage: RouteStage) -> None:
    user = await stage.gateway.new_user()
    await stage.allow(PREFIX)
    async with stage.worker(), user.http_async() as http:
        away = await http.get(f"{PREFIX}/away")
        assert away.status_code == 502
        assert "location" not in away.headers
        assert (await http.get(f"{PREFIX}/large")).status_code == 502
        much = b"x" * (ROUTE_BYTES_MAX + 1)
        assert (await http.post(f"{PREFIX}/x", content=much)).status_code == 413
    assert len(stage.node.asked) == 2


async def test_a_call_whose_worker_is_killed_is_not_made_again(
    stage: RouteStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = await stage.gateway.new_user()
    await stage.allow(PREFIX)
    words = ("worker", "--control", stage.gateway.url, "--fleet", FLEET, "--stage", STAGE)
    more = ("--worker-id", "w1", "--backend", stage.backend_url, "--passthrough", PREFIX)
    secret = {"COMFYFLEET_FLEET_SECRET": stage.secret, "XDG_STATE_HOME": str(tmp_path / "state")}
    with started(*words, *more, folder=tmp_path, **secret) as doomed:
        await until(stage.waits)
        async with user.http_async() as http:
            calling = asyncio.create_task(http.get(HOLD))
            await until(lambda: asked_once(stage.node))
            await asyncio.to_thread(doomed.stop, 9)
            async with stage.worker("w2"):
                monkeypatch.setattr(route_calls, "ANSWER_SECONDS", -route_calls.PICKUP_SECONDS)
                monkeypatch.setattr(route_calls, "DELIVERY_SECONDS", 0.0)
                answer = await calling
                assert answer.status_code == 504
                monkeypatch.undo()
                assert (await http.get(JSON)).status_code == 200
    assert [path for _, path, _, _ in stage.node.asked] == [HOLD, JSON]


async def test_many_calls_over_two_workers_are_made_once_each(stage: RouteStage) -> None:
    users = [await stage.gateway.new_user() for _ in range(3)]
    await stage.allow(PREFIX)
    paths = [f"{JSON}?n={number}" for number in range(route_calls.PER_TENANT_MAX)]

    async def called(user: GatewayUser) -> list[int]:
        async with user.http_async() as http:
            answers = await asyncio.gather(*(http.get(path) for path in paths))
            return [each.status_code for each in answers]

    async with stage.worker(), stage.worker("w2"):
        answers = await asyncio.gather(*map(called, users))
    assert answers == [[200] * len(paths)] * 3
    assert sorted(path for _, path, _, _ in stage.node.asked) == sorted(3 * paths)


async def test_a_tenant_has_so_many_calls_at_once(stage: RouteStage) -> None:
    user = await stage.gateway.new_user()
    await stage.allow(PREFIX)
    async with user.http_async() as http:
        sent = [asyncio.create_task(http.get(JSON)) for _ in range(route_calls.PER_TENANT_MAX + 5)]
        refused: set[asyncio.Task[httpx.Response]] = set()
        while len(refused) < 5:
            refused, _ = await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
            assert all(each.result().status_code == 429 for each in refused)
            await asyncio.sleep(0.01)
        async with stage.worker():
            answers = [each.status_code for each in await asyncio.gather(*sent)]
    assert answers.count(200) == route_calls.PER_TENANT_MAX == len(stage.node.asked)


async def test_a_caller_who_hangs_up_before_a_worker_came_is_not_served(stage: RouteStage) -> None:
    user = await stage.gateway.new_user()
    await stage.allow(PREFIX)

    async def waiting() -> list[Any]:
        async with stage.plane.central.read() as tx:
            return list(await store.waiting(tx, now=stage.plane.clock()))

    async def is_empty() -> bool:
        return not await waiting()

    async with user.http_async() as http:
        calling = asyncio.create_task(http.get(HOLD))
        await until(waiting)
        calling.cancel()
        await until(is_empty)
        async with stage.worker():
            assert (await http.get(JSON)).status_code == 200
    assert [path for _, path, _, _ in stage.node.asked] == [JSON]


async def test_a_worker_that_drains_gets_no_calls(
    stage: RouteStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = await stage.gateway.new_user()
    await stage.allow(PREFIX)
    async with stage.worker(), user.http_async() as http:
        async with stage.plane.central.transaction() as tx:
            # As another control plane would: nothing is told to this one.
            await fleets.drain_worker(tx, await fleets.get_worker(tx, "w1"))
        monkeypatch.setattr(route_calls, "PICKUP_SECONDS", 0.1)
        assert (await http.get(JSON)).status_code == 503
    assert stage.node.asked == []


async def test_a_worker_gets_and_answers_only_what_is_its_own(stage: RouteStage) -> None:
    user = await stage.gateway.new_user()
    mine, other = await registered(stage, "w1"), await registered(stage, "w2")
    routes = stage.plane.routes
    call = new_call(user, mine.fleet_id)
    calling = asyncio.create_task(routes.send(call))
    elsewhere = replace(other, fleet_id=mine.fleet_id + 1)
    assert await routes.take(elsewhere, [PREFIX], 0.1) is None
    assert await routes.take(other, ["/api/other"], 0.1) is None
    taken = await routes.take(mine, [PREFIX], 30.0)
    assert taken is not None
    assert taken.id == call.id
    assert await routes.take(other, [PREFIX], 0.1) is None
    answer = RouteAnswer(worker_id="w2", call_id=call.id, status=200, body=b"\0\xff")
    with pytest.raises(NotFound):
        await routes.answer(answer)
    await routes.answer(answer.model_copy(update={"worker_id": "w1"}))
    assert (await calling).body == b"\0\xff"
    with pytest.raises(NotFound):
        await routes.answer(answer.model_copy(update={"worker_id": "w1"}))


async def test_a_poll_that_is_cut_while_it_is_given_a_call_leaves_it_to_another(
    stage: RouteStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = await stage.gateway.new_user()
    mine, other = await registered(stage, "w1"), await registered(stage, "w2")
    routes, take = stage.plane.routes, store.take
    is_taken, go_on = asyncio.Event(), asyncio.Event()

    async def slow(*given: Any, **named: Any) -> RouteCall | None:
        found = await take(*given, **named)
        is_taken.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(store, "take", slow)
    polling = asyncio.create_task(routes.take(mine, [PREFIX], 30.0))
    calling = asyncio.create_task(routes.send(new_call(user, mine.fleet_id)))
    await is_taken.wait()
    polling.cancel()
    go_on.set()
    taken = await routes.take(other, [PREFIX], 30.0)
    assert taken is not None
    await routes.answer(RouteAnswer(worker_id="w2", call_id=taken.id, status=204))
    assert (await calling).status == 204


async def test_a_worker_passes_on_only_what_its_own_settings_allow(stage: RouteStage) -> None:
    settings = stage.settings()
    control = ControlClient(stage.gateway.url)
    passer = RoutePasser(
        settings,
        control,
        worker_id=lambda: "w1",
        is_ready=lambda: True,
        on_change=lambda: None,
        retry=RetryPolicy(),
    )
    call = RouteCall(id=uuid4(), method="GET", target=JSON, answer_seconds=30.0)
    for target in (
        "/api/other",
        f"{PREFIX}x",
        f"{PREFIX}/../prompt",
        f"{PREFIX}/%2e%2e/prompt",
        f"{PREFIX}/%252e%252e/prompt",
        "http://169.254.169.254/api/etn/x",
        "//169.254.169.254/api/etn/x",
        f"{PREFIX}//x",
    ):
        answer = await passer.pass_on(call.model_copy(update={"target": target}))
        assert answer.error is not None, target
    assert stage.node.asked == []
    assert (await passer.pass_on(call)).body == b'{"a": 1}'
    await passer._client.aclose()
    await control.aclose()


async def test_calls_that_nobody_waits_for_are_removed(stage: RouteStage) -> None:
    ada, bob = await stage.gateway.new_user(), await stage.gateway.new_user()
    plane = stage.plane
    async with plane.central.transaction() as tx:
        for user, seconds in ((ada, -1.0), (bob, 3600.0)):
            row = new_call(user, 1).row()
            await store.add(tx, row, now=plane.clock(), seconds=seconds)
    assert await counted(plane) == 2
    await plane.routes.remove_expired()
    assert await counted(plane) == 1
    await begin_erasure(plane.context, bob.tenant_id, actor="test", now=plane.clock())
    await erase_pending_tenants(plane.context)
    assert await counted(plane) == 0


async def counted(plane: ControlPlane) -> int:
    from sqlalchemy import func, select

    from comfyfleet.server.db.central_tables import route_calls as table

    async with plane.central.read() as tx:
        return int((await tx.execute(select(func.count()).select_from(table))).scalar_one())


async def test_a_worker_that_waits_at_another_control_plane_is_found(
    postgres_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the hints between control planes can be that quick.
    monkeypatch.setattr(route_calls, "MATCH_SECONDS", 3600.0)
    monkeypatch.setattr(route_calls, "LOOK_SECONDS", 3600.0)
    both: dict[str, Any] = {
        "central_database_url": await postgres_databases.url("central"),
        "tenant_database_urls": f"main={await postgres_databases.url('tenant')}",
    }
    async with (
        stage_on(postgres_databases, tmp_path, **both) as stage,
        gateway_on(postgres_databases, tmp_path, engines=0, **both) as other,
    ):
        user = await stage.gateway.new_user()
        await stage.allow(PREFIX)
        async with stage.worker(), replace(user, url=other.url).http_async() as http:
            for _ in range(3):
                assert (await http.get(JSON)).json() == {"a": 1}
    assert len(stage.node.asked) == 3

"""Reports of workers keep no one waiting, however large they are: up to their limits they are processed while the event
loop turns, and above the limits they are refused or truncated."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.asgi import free_listener, served, url_of
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import DRAWN, EffectSetup, effect_setup_on
from tests.support.server.loop_stalls import LoopStalls
from tests.support.server.outside import RawAnswer, raw_request, send_from_outside

from comfyfleet.api.values import VALUES_BYTES_MAX, VALUES_MAX
from comfyfleet.api.worker import DETAIL_CHARACTERS_MAX, Requeue
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.http.app import create_app
from comfyfleet.server.jobs import store, submit
from comfyfleet.server.jobs.heartbeat import FILLED_IN_INPUTS_MAX
from comfyfleet.server.jobs.model import JobSpec

BODY_VALUES = 190_000  # nearly as many as a body may have


@dataclass
class Desk:
    """A worker that takes jobs of the gateway, and sends its reports from outside."""

    setup: EffectSetup
    url: str
    key: str
    tenant_id: UUID
    user_id: UUID
    workflow_id: int

    async def lease(self) -> dict[str, Any]:
        prompt_id = str(uuid4())
        gateway = {"prompt_id": prompt_id, "number": 1, "client_id": "me", "extra_data": {}}
        spec = JobSpec(
            workflow_id=self.workflow_id,
            workflow_slug="draw",
            workflow_version=1,
            prompt=DRAWN,
            user_id=self.user_id,
            gateway={**gateway, "outputs": ["2"]},
        )
        await submit.submit(self.setup.plane.context, self.tenant_id, spec)
        polled = (await self.call("poll", {"worker_id": "w1", "max_concurrency": 64})).json()
        return {name: polled["job"][name] for name in ("dispatch_id", "lease_token", "job_id")}

    async def report(self, endpoint: str, lease: dict[str, Any], **fields: Any) -> RawAnswer:
        held = {name: lease[name] for name in ("dispatch_id", "lease_token")}
        return await self.call(endpoint, {**held, **fields})

    async def call(self, endpoint: str, body: dict[str, Any]) -> RawAnswer:
        path, data = f"/api/worker/{endpoint}", json.dumps(body, separators=(",", ":")).encode()
        async with LoopStalls(f"{endpoint} of {len(data):,} bytes"):
            (answer,) = await send_from_outside(
                self.url, [raw_request("POST", path, key=self.key, body=data)]
            )
        return answer


@pytest.fixture
async def desk(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[Desk]:
    async with AsyncExitStack() as stack:
        plane = await stack.enter_async_context(plane_on(sqlite_databases, tmp_path))
        setup = await stack.enter_async_context(effect_setup_on(plane))
        ada = await setup.customer()
        async with plane.central.read() as tx:
            workflow = await catalog.workflow_by_slug(tx, "draw")
        joined = await setup.fleet_setup.register("w1", max_concurrency=64)
        listener = free_listener()
        await stack.enter_async_context(served(create_app(plane), listener))
        key = joined.json()["token"]
        yield Desk(setup, url_of(listener), key, ada.tenant_id, ada.user_id, workflow.id)


def nested(values: int) -> list[dict[str, Any]]:
    return [{"a": {"b": 1}} for _ in range(values // 3)]


async def test_messages_of_a_run_may_fill_a_report(desk: Desk) -> None:
    lease, large = await desk.lease(), {"a": nested(BODY_VALUES)}
    events = [["executing", large]]
    beat = await desk.report("heartbeat", lease, started=True, events=events, report=1)
    assert beat.status == 200, beat.raw[-500:]
    many = [["progress", {"a": [0] * 30}] for _ in range(5_000)]
    assert (await desk.report("heartbeat", lease, events=many, report=2)).status == 200
    assert (await desk.report("fail", lease, error="no", report=3)).status == 200
    messages = [["execution_cached", {"a": 1}] for _ in range(BODY_VALUES // 5)]
    for history in (
        {"status": {"status_str": "success"}, "outputs": {"2": large}},
        {"status": {"messages": messages}},
    ):
        done = await desk.report("complete", await desk.lease(), history=history, report=1)
        assert done.status == 200, done.raw[-500:]


def inputs_of(count: int) -> dict[str, Any]:
    return {str(node): {f"{at}": 0 for at in range(count // 50)} for node in range(50)}


async def test_so_many_inputs_that_were_filled_in_are_stored_and_no_more(desk: Desk) -> None:
    stored = []
    for filled_in in (
        inputs_of(5_000),
        {"1": {f"{at}": 0 for at in range(FILLED_IN_INPUTS_MAX + 1)}},
        inputs_of(BODY_VALUES),
        {"1": {"a": nested(BODY_VALUES), "b": "x" * 10_000}},
    ):
        lease = await desk.lease()
        assert (await desk.report("heartbeat", lease, filled_in=filled_in)).status == 200
        await desk.setup.plane.context.deferred.flush()
        async with desk.setup.plane.pools["main"].read() as tx:
            attempts = await store.attempts_of(tx, desk.tenant_id, UUID(lease["job_id"]))
        stored.append(attempts[0].filled_in)
    assert stored[:3] == [inputs_of(5_000), {}, {}]
    assert stored[3] == {"1": {"a": "(left out)", "b": "x" * 2_000}}


def shown(value: Any) -> list[dict[str, Any]]:
    return [{"node_id": "2", "name": "text", "value": value}]


async def test_values_that_nodes_show_have_256_kib(desk: Desk) -> None:
    lease = await desk.lease()
    for value in (
        [0] * BODY_VALUES,
        nested(BODY_VALUES),
        "x" * (VALUES_BYTES_MAX + 2 * VALUES_MAX),
    ):
        refused = await desk.report("complete", lease, values=shown(value))
        assert refused.status == 422
        assert b"262,144 bytes" in refused.body
    most = [0] * (VALUES_BYTES_MAX // 3 - 30)
    taken = await desk.report("complete", lease, values=shown(most))
    assert taken.status == 200, taken.raw[-500:]


async def test_texts_of_reports_have_limits(desk: Desk) -> None:
    lease = await desk.lease()
    long = "x" * 1_001
    for endpoint, fields in (
        ("complete", {"provider_job_id": long}),
        ("fail", {"provider_job_id": long}),
        ("complete", {"outputs": [{"name": "a", "size": 1, "filename": long}]}),
        ("requeue", {"reason": "backend_lacks", "lacking": {"node_types": [long]}}),
    ):
        answer = await desk.report(endpoint, lease, **fields)
        assert answer.status == 422, endpoint
        assert b"at most 1000 characters" in answer.body
    detail = "y" * 15_000_000
    assert (await desk.report("requeue", lease, reason="other", detail=detail)).status == 200
    requeue = Requeue.model_validate({**lease, "reason": "other", "detail": detail})
    assert requeue.detail == "y" * DETAIL_CHARACTERS_MAX


async def test_unknown_fields_and_long_errors_are_named_in_part(desk: Desk) -> None:
    unknown = {f"f{number:06}": 1 for number in range(BODY_VALUES)}
    error = {"error_message": "x" * 1_000_000}  # by another name, and after the unknown fields
    answer = await desk.report("fail", await desk.lease(), **unknown, **error)
    assert answer.json()["ignored_fields"] == [f"f{number:06}" for number in range(20)]
    assert (
        await desk.report("fail", await desk.lease(), error={"a": nested(BODY_VALUES)})
    ).status == 200


async def test_a_poll_may_name_many_models(desk: Desk) -> None:
    files = {f"Loader{number}.name": [f"{at}.bin" for at in range(9)] for number in range(19_000)}
    backend = {"kind": "ComfyUI", "model_files": files}
    answer = await desk.call("poll", {"worker_id": "w1", "backend": backend})
    assert answer.status == 200, answer.raw[-500:]

"""How operators list, pause and stop what a tenant has running, and what happens to users' work."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import func, select, update
from tests.integration.http.public.test_public_graphs import GRAPH, made
from tests.support.databases.factory import Databases
from tests.support.jobs.fuse import Fuse, ProcessDied, fused
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on

from comfyfleet.clock import utc_now
from comfyfleet.server.db.tenant_tables import ai_jobs, outbox, pipeline_events, users
from comfyfleet.server.graphs.runner import read_outbox, sweep_runs
from comfyfleet.server.maintenance.sweeps import advance_pipelines, flush_notes
from comfyfleet.server.pipelines.run_state import flush_audit
from comfyfleet.server.tenant_work import actions as tenant_work
from comfyfleet.server.tenant_work.actions import WorkOwner, deactivate_user
from comfyfleet.server.tenants import actions
from comfyfleet.server.tenants import wallet as ledger

_PAID_NODE = {"id": "draw", "type": "workflow", "effect": "draw"}
PAID = {**GRAPH, "nodes": [GRAPH["nodes"][0], _PAID_NODE, GRAPH["nodes"][2]]}
STEP = {"name": "Base", "effect": "draw", "properties": {"width": 32}}
STEPS_MAX = 60


@pytest.fixture
async def effect_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[EffectSetup]:
    async with plane_on(databases, tmp_path) as plane, effect_setup_on(plane) as effect_setup:
        yield effect_setup


class Busy:
    """A customer with an open graph run, a pipeline run with a running job, and a schedule."""

    def __init__(
        self, setup: EffectSetup, customer: Customer, ids: dict[str, str], balance: int
    ) -> None:
        self.balance = balance
        self.setup, self.customer, self.ids = setup, customer, ids
        self.path = f"/api/admin/tenants/{customer.tenant_id}"
        self.admin = setup.fleet_setup.admin

    async def work(self) -> dict[str, str]:
        found = (await self.admin.get(f"{self.path}/work")).json()["items"]
        assert {item["user_id"] for item in found} <= {str(self.customer.user_id)}
        return {item["kind"]: item["status"] for item in found}

    async def act(self, verb: str, expected: int = 200, **body: Any) -> Any:
        answer = await self.admin.post(f"{self.path}/work/{verb}", json=body)
        assert answer.status_code == expected, answer.text
        return answer.json()

    async def entries(self, action: str) -> list[Any]:
        log = await self.admin.get("/api/admin/audit", params={"action": action, "limit": 50})
        found: list[Any] = log.json()["entries"]
        return found

    async def audited(self, action: str) -> int:
        return len(await self.entries(action))

    async def active_jobs(self) -> int:
        jobs = (await self.customer.get("ai-jobs"))["jobs"]
        return sum(job["status"] in ("queued", "processing") for job in jobs)

    async def is_refunded(self) -> bool:
        return await self.customer.balance() == self.balance


async def busy_customer(setup: EffectSetup) -> Busy:
    customer = await setup.customer()
    balance = await customer.balance()
    graph = await made(customer, PAID)
    run = await customer.client.post(f"/api/graphs/{graph}/runs", json={"inputs": {"width": 32}})
    assert run.status_code == 201, run.text
    document = {"name": "p", "steps": [STEP]}
    pipeline = await customer.client.post("/api/pipelines", json={"document": document})
    assert pipeline.status_code == 201, pipeline.text
    body = {"base_candidates": 2, "limits": {"concurrent_jobs": 2}}
    path = f"/api/pipelines/{pipeline.json()['id']}/runs"
    candidates = await customer.client.post(path, json=body)
    assert candidates.status_code == 201, candidates.text
    await advance_pipelines(setup.plane.context, setup.plane.pools["main"])
    fields = {"name": "t", "graph": graph, "cron": "0 0 1 1 *", "tokens_per_day": 9}
    trigger = await customer.client.post("/api/triggers", json={**fields, "inputs": {"width": 32}})
    assert trigger.status_code == 201, trigger.text
    ids = {
        "graph_run": run.json()["id"],
        "pipeline_run": candidates.json()["id"],
        "trigger": trigger.json()["id"],
    }
    return Busy(setup, customer, ids, balance)


OPEN = {"pipeline_run": "active", "trigger": "active"}


async def test_an_operator_stops_all_that_a_tenant_has_running(effect_setup: EffectSetup) -> None:
    busy, other = await busy_customer(effect_setup), await busy_customer(effect_setup)
    before = await busy.work()
    assert {kind: before[kind] for kind in OPEN} == OPEN
    assert before["graph_run"] in ("pending", "running")
    async with AsyncExitStack() as stack:
        for number in range(6):  # the jobs of both customers run, also those of the pipelines
            fleet_setup = effect_setup.fleet_setup
            worker = await stack.enter_async_context(fleet_setup.worker(f"w{number}"))
            assert (await worker.poll(wait_seconds=0))["job"] is not None
        assert await busy.active_jobs() == 3
        assert not await busy.is_refunded()
        stopped = await busy.act("stop")
    assert stopped == {"graph_runs": 1, "pipeline_runs": 1, "triggers": 1, "has_more": False}
    assert await busy.work() == {"trigger": "paused"}
    assert await busy.active_jobs() == 0
    assert await busy.is_refunded()
    await advance_pipelines(effect_setup.plane.context, effect_setup.plane.pools["main"])
    assert await busy.active_jobs() == 0
    for action in ("stop_graph_run", "stop_pipeline_run", "pause_trigger"):
        assert await busy.audited(action) == 1
    again = await busy.act("stop")
    assert again == {"graph_runs": 0, "pipeline_runs": 0, "triggers": 0, "has_more": False}
    assert await busy.audited("stop_graph_run") == 1
    assert (await other.work())["trigger"] == "active"
    async with effect_setup.plane.pools["main"].read() as tx:
        assert await ledger.verify(tx) == []


async def test_the_audit_names_the_operator_and_the_cancelled_jobs(
    effect_setup: EffectSetup,
) -> None:
    busy = await busy_customer(effect_setup)
    await busy.act("pause")
    await busy.act("stop")
    paused, cancelled, stopped = [
        (await busy.entries(action))[0]
        for action in ("pipeline_paused", "pipeline_cancelled", "stop_pipeline_run")
    ]
    assert [entry["actor"] for entry in (paused, cancelled, stopped)] == ["admin"] * 3
    assert stopped["details"]["jobs_cancelled"] == 2
    (graph_run,) = await busy.entries("stop_graph_run")
    assert graph_run["details"]["jobs_cancelled"] == 1


async def test_an_event_is_in_the_audit_once_when_two_processes_copy_it(
    effect_setup: EffectSetup,
) -> None:
    busy, pool = await busy_customer(effect_setup), effect_setup.plane.pools["main"]
    await busy.act("pause")
    # Another process has read the events before this one marks them as copied.
    async with pool.transaction() as tx:
        await tx.execute(update(pipeline_events).values(is_audited=False))
    await flush_audit(effect_setup.plane.context, pool)
    assert await busy.audited("pipeline_started") == 1
    assert await busy.audited("pipeline_paused") == 1


async def test_deactivating_a_user_cancels_and_refunds_their_single_jobs(
    effect_setup: EffectSetup,
) -> None:
    busy, other = await busy_customer(effect_setup), await busy_customer(effect_setup)
    job_id = await busy.customer.job(effect_setup.draw, properties={"width": 32})
    await busy.admin.post(f"{busy.path}/users/{busy.customer.user_id}/deactivate")
    async with effect_setup.plane.pools["main"].read() as tx:
        query = select(ai_jobs.c.status).where(ai_jobs.c.id == UUID(job_id))
        assert (await tx.execute(query)).scalar_one() == "cancelled"
    wallet = await busy.admin.get(f"{busy.path}/wallets/{busy.customer.user_id}")
    assert wallet.json()["balance"] == busy.balance
    (entry,) = await busy.entries("cancel_jobs")
    assert entry["details"]["jobs_cancelled"] == 1
    assert await other.active_jobs() == 3


async def test_single_items_are_stopped_and_paused(effect_setup: EffectSetup) -> None:
    busy = await busy_customer(effect_setup)
    for kind in ("graph_run", "pipeline_run", "trigger"):
        paused = await busy.act(f"{kind}/{busy.ids[kind]}/pause")
        assert paused["status"] == "paused"
    for _ in range(2):
        stopped = await busy.act(f"graph_run/{busy.ids['graph_run']}/stop")
        assert stopped["status"] == "cancelled"
    assert await busy.audited("stop_graph_run") == 1
    stopped = await busy.act(f"pipeline_run/{busy.ids['pipeline_run']}/stop")
    assert stopped["status"] == "cancelled"
    assert await busy.is_refunded()


async def test_pausing_leaves_submitted_jobs_alone(effect_setup: EffectSetup) -> None:
    busy = await busy_customer(effect_setup)
    paused = await busy.act("pause")
    assert paused == {"graph_runs": 1, "pipeline_runs": 1, "triggers": 1, "has_more": False}
    assert set((await busy.work()).values()) == {"paused"}
    assert await busy.active_jobs() == 3
    assert await busy.audited("pause_graph_run") == 1
    again = await busy.act("pause")
    assert again == {"graph_runs": 0, "pipeline_runs": 0, "triggers": 0, "has_more": False}


ONE_BY_ONE: dict[str, Any] = {
    "name": "one by one",
    "at_once": 1,
    "nodes": [
        {"id": "first", "type": "workflow", "workflow": "draw"},
        {"id": "second", "type": "workflow", "workflow": "draw"},
        {"id": "one", "type": "output"},
        {"id": "two", "type": "output"},
    ],
    "connections": [
        {"from": "first.output", "to": "one.value"},
        {"from": "second.output", "to": "two.value"},
    ],
}


async def test_a_paused_graph_run_starts_its_next_job_after_it_is_resumed(
    effect_setup: EffectSetup,
) -> None:
    customer, other = await effect_setup.customer(), await effect_setup.customer()
    graph = await made(customer, ONE_BY_ONE)
    plane = effect_setup.plane
    async with effect_setup.fleet_setup.worker("w1") as worker:
        run = (await customer.client.post(f"/api/graphs/{graph}/runs", json={})).json()
        path = f"/api/graph-runs/{run['id']}"
        for _ in range(2):
            paused = await customer.client.post(f"{path}/pause")
            assert paused.status_code == 200, paused.text
        assert paused.json()["paused_at"]
        assert (await other.client.post(f"{path}/pause")).status_code == 404
        assert (await other.client.post(f"{path}/resume")).status_code == 404
        assert (await worker.deliver(await worker.job())).status_code == 200
        for _ in range(2):
            await read_outbox(plane.graphs, plane.pools["main"])
            await sweep_runs(plane.graphs, plane.pools["main"])
        assert (await worker.poll(wait_seconds=0))["job"] is None
        seen = await customer.get(f"graph-runs/{run['id']}")
        assert [each["status"] for each in seen["executions"][:2]] == ["done", "held"]
        assert (await customer.client.post(f"{path}/resume")).json()["paused_at"] is None
        assert (await worker.deliver(await worker.job())).status_code == 200
        await read_outbox(plane.graphs, plane.pools["main"])
    assert (await customer.get(f"graph-runs/{run['id']}"))["status"] == "completed"
    assert (await customer.client.post(f"{path}/pause")).status_code == 409


async def test_what_one_call_does_not_stop_the_next_one_does(
    effect_setup: EffectSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_work, "STOPPED_PER_CALL_MAX", 1)
    busy = await busy_customer(effect_setup)
    first, second = [await busy.act("stop") for _ in range(2)]
    assert (first["has_more"], first["graph_runs"] + first["pipeline_runs"]) == (True, 1)
    assert (second["has_more"], second["graph_runs"] + second["pipeline_runs"]) == (False, 1)
    assert await busy.work() == {"trigger": "paused"}
    leaves = await busy_customer(effect_setup)
    await leaves.admin.post(f"{leaves.path}/users/{leaves.customer.user_id}/deactivate")
    assert len(await leaves.work()) == 2, "the sweep stops the rest"
    await flush_notes(effect_setup.plane)
    assert await leaves.work() == {"trigger": "paused"}


async def test_work_of_another_tenant_is_not_there(effect_setup: EffectSetup) -> None:
    busy, other = await busy_customer(effect_setup), await busy_customer(effect_setup)
    for kind in ("graph_run", "pipeline_run", "trigger"):
        for verb in ("stop", "pause"):
            await busy.act(f"{kind}/{other.ids[kind]}/{verb}", 404)
    await busy.act("stop", 404, user_id=str(other.customer.user_id))
    missing = await busy.admin.get(f"/api/admin/tenants/{uuid4()}/work")
    assert missing.status_code == 404
    assert (await other.work())["trigger"] == "active"


async def test_deactivating_a_user_stops_their_work_and_activating_resumes_nothing(
    effect_setup: EffectSetup,
) -> None:
    busy = await busy_customer(effect_setup)
    path = f"{busy.path}/users/{busy.customer.user_id}"
    assert (await busy.admin.post(f"{path}/deactivate")).status_code == 200
    assert await busy.work() == {"trigger": "paused"}
    wallet = await busy.admin.get(f"{busy.path}/wallets/{busy.customer.user_id}")
    assert wallet.json()["balance"] == busy.balance
    assert (await busy.admin.post(f"{path}/activate")).json()["is_active"] is True
    await flush_notes(effect_setup.plane)
    await advance_pipelines(effect_setup.plane.context, effect_setup.plane.pools["main"])
    assert await busy.work() == {"trigger": "paused"}
    for action in ("deactivate_user", "activate_user", "stop_pipeline_run"):
        assert await busy.audited(action) == 1


async def test_a_deactivation_that_was_cut_off_is_finished_by_a_sweep(
    effect_setup: EffectSetup,
) -> None:
    plane, fuse = effect_setup.plane, Fuse()
    for after in range(STEPS_MAX):
        busy = await busy_customer(effect_setup)
        scope = WorkOwner(UUID(str(busy.customer.tenant_id)), UUID(str(busy.customer.user_id)))
        fuse.left = after
        try:
            graphs = type(plane.graphs)(fused(plane.context, fuse))
            await deactivate_user(graphs, scope, actor="operator:bob")
            was_cut = False
        except ProcessDied:
            was_cut = True
        finally:
            fuse.left = None
        await flush_notes(plane)
        async with plane.pools["main"].read() as tx:
            query = select(users.c.is_active).where(users.c.id == scope.user_id)
            is_active = await tx.scalar(query)
            assert await tx.scalar(select(func.count()).select_from(outbox).where(NOTES)) == 0
        found = await busy.work()
        assert found == {"trigger": "paused"} if not is_active else len(found) == 3
        if not was_cut:
            assert after > 6, "its statements were not among the steps"
            return
    assert not is_active, "it never got as far as the user"


NOTES = outbox.c.kind.in_(("audit", "stop_user"))


async def test_a_new_user_and_its_audit_entry_come_together(effect_setup: EffectSetup) -> None:
    plane, fuse = effect_setup.plane, Fuse()
    tenant_id = UUID(str((await effect_setup.customer()).tenant_id))
    cut = fused(plane.context, fuse)
    admin = effect_setup.fleet_setup.admin
    for after in range(STEPS_MAX):
        new = actions.UserToCreate(uuid4(), tenant_id, None, f"number {after}")
        fuse.left = after
        try:
            await actions.create_user(
                cut.central, cut.pools["main"], new, operator="operator:bob", now=utc_now()
            )
            was_cut = False
        except ProcessDied:
            was_cut = True
        finally:
            fuse.left = None
        await flush_notes(plane)
        async with plane.pools["main"].read() as tx:
            is_there = await tx.scalar(select(users.c.id).where(users.c.id == new.id)) is not None
        log = await admin.get("/api/admin/audit", params={"subject": f"user:{new.id}"})
        assert bool(log.json()["entries"]) == is_there
        if not was_cut:
            assert is_there
            return
    pytest.fail("it never came to its end")

"""A client's prompts run in parallel, and its socket shows them one after another."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import insert
from tests.support.backends.engine_client import WAIT_SECONDS_MAX, SocketClient
from tests.support.backends.prompts import node
from tests.support.databases.factory import Databases
from tests.support.jobs.gateway_runs import done
from tests.support.server.gateway import (
    LOOK_SECONDS,
    PROMPT,
    GatewayInProcess,
    GatewayUser,
    gateway_on,
    history_entry,
    until,
)

from comfyfleet.api.worker import Job as Handed
from comfyfleet.server.db.central_tables import workflows
from comfyfleet.server.gateway.model import job_id_of
from comfyfleet.server.jobs import finish
from comfyfleet.server.jobs import submit as job_submit
from comfyfleet.server.jobs.files import LeaseKey, report_live
from comfyfleet.server.jobs.lease import lease_next
from comfyfleet.server.jobs.model import IN_ORDER, JobSpec
from comfyfleet.server.maintenance.embedded_fleet import FLEET, STAGE
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import QueueLane, RequeueReason, Waiter

CLIENT = "me"


@dataclass
class ParallelRuns:
    """A user's prompts, each leased by a worker of its own whose messages the test sends."""

    server: GatewayInProcess
    user: GatewayUser
    workflow_id: int
    leases: dict[str, Handed] = field(default_factory=dict)

    async def submit(self, name: str, *, in_order: bool = True, stage: str = "production") -> None:
        gateway = {
            "prompt_id": name,
            "number": len(self.leases),
            "client_id": CLIENT,
            "extra_data": {"client_id": CLIENT},
            **({IN_ORDER: True} if in_order else {}),
        }
        spec = JobSpec(
            workflow_id=self.workflow_id,
            workflow_slug="a-workflow",
            workflow_version=1,
            prompt=dict(PROMPT),
            stage=stage,
            user_id=self.user.user_id,
            gateway=gateway,
        )
        job_id = job_id_of(self.user.tenant_id, self.user.user_id, name)
        context = self.server.plane.context
        await job_submit.submit_many(context, self.user.tenant_id, {job_id: spec})

    async def lease(self, name: str, *, stage: str = "production") -> None:
        lane = QueueLane(self.workflow_id, stage, "self_hosted")
        waiter = Waiter(f"worker-{name}", lanes=frozenset({lane}), is_alone=True)
        lease = await lease_next(self.server.plane.context, waiter, wait_seconds=0)
        assert lease is not None
        self.leases[name] = lease

    async def start(self, name: str, *, in_order: bool = True) -> None:
        await self.submit(name, in_order=in_order)
        await self.lease(name)
        await self.report(name, 1, starts=True)

    async def report(self, name: str, number: int, *, starts: bool = False) -> None:
        """The message is `executing` of a node that has the prompt's name and this number."""
        lease = self.leases[name]
        key = LeaseKey(self.user.tenant_id, lease.job_id, lease.lease_token)
        start = [("execution_start", {"prompt_id": ""})] if starts else []
        events = [*start, ("executing", {"node": f"{name}{number}", "prompt_id": ""})]
        await report_live(self.server.plane.context, key, events, report=number)

    async def complete(self, name: str) -> None:
        await finish.complete(self.server.plane.context, done(self.leases[name]))

    async def requeue(self, name: str) -> None:
        lease = self.leases.pop(name)
        await finish.requeue(
            self.server.plane.context, lease.dispatch_id, lease.lease_token, RequeueReason.SPOT
        )


@asynccontextmanager
async def socket_of(user: GatewayUser) -> AsyncIterator[SocketClient]:
    with contextlib.ExitStack() as stack:
        talk = stack.enter_context(user.open_engine_client())
        ear = await asyncio.to_thread(talk.listen, CLIENT)
        try:
            yield ear
        finally:
            await asyncio.to_thread(stack.close)


async def wait_for(ear: SocketClient, node: str) -> None:
    await asyncio.to_thread(ear.wait, "executing", {"node": node})


async def wait_for_end(ear: SocketClient, name: str) -> None:
    await asyncio.to_thread(ear.wait, "executing", {"node": None, "prompt_id": name})


def shown(*ears: SocketClient) -> list[str]:
    """The nodes and ends that came, in order: `A1` `A2` `A.`"""
    events = [each for ear in ears for each in ear.events if isinstance(each, list)]
    told = [data for kind, data in events if kind == "executing" and "prompt_id" in data]
    return [data["node"] or f"{data['prompt_id']}." for data in told]


def count(ear: SocketClient, kind: str) -> int:
    return ear.names().count(kind)


async def runs_on(server: GatewayInProcess) -> ParallelRuns:
    row = {"slug": "a-workflow", "version": 1, "required_capabilities": [], "is_active": True}
    row |= {"created_at": server.plane.clock(), "output": "optional"}
    async with server.plane.central.transaction() as tx:
        added = await tx.execute(insert(workflows).values(row).returning(workflows.c.id))
        workflow_id = added.scalar_one()
    return ParallelRuns(server, await server.new_user(), workflow_id)


@pytest.fixture
async def runs(databases: Databases, tmp_path: Path) -> AsyncIterator[ParallelRuns]:
    async with gateway_on(databases, tmp_path, engines=0) as server:
        yield await runs_on(server)


async def test_a_prompt_that_finishes_first_is_shown_after_the_one_that_started_first(
    runs: ParallelRuns,
) -> None:
    """The backend of the first prompt is offline for as long as the second one runs."""
    async with socket_of(runs.user) as ear, runs.user.http_async() as http:
        await runs.start("A")
        await runs.start("B")
        await runs.complete("B")
        # Programs that poll don't wait.
        assert await history_entry(http, "B") is not None
        jobs = (await http.get("/api/jobs")).json()["jobs"]
        assert {each["id"]: each["status"] for each in jobs}["B"] == "completed"
        await runs.report("A", 2)
        await wait_for(ear, "A2")
        assert shown(ear) == ["A1", "A2"]
        await runs.complete("A")
        await wait_for_end(ear, "B")
        assert shown(ear) == ["A1", "A2", "A.", "B1", "B."]
        assert count(ear, "execution_start") == count(ear, "execution_success") == 2


async def test_a_prompt_that_waits_for_a_backend_holds_nothing_back(runs: ParallelRuns) -> None:
    async with socket_of(runs.user) as ear:
        await runs.submit("A", stage="staging")
        await runs.start("B")
        await wait_for(ear, "B1")
        await runs.complete("B")
        await wait_for_end(ear, "B")
        # Its backend comes back.
        await runs.lease("A", stage="staging")
        await runs.report("A", 1, starts=True)
        await runs.complete("A")
        await wait_for_end(ear, "A")
        assert shown(ear) == ["B1", "B.", "A1", "A."]


async def test_a_requeued_prompt_lets_the_next_one_pass(runs: ParallelRuns) -> None:
    async with socket_of(runs.user) as ear:
        await runs.start("A")
        await runs.start("B")
        await wait_for(ear, "A1")
        await runs.complete("B")
        await runs.requeue("A")
        await wait_for_end(ear, "B")
        await runs.lease("A")
        await runs.report("A", 2, starts=True)
        await wait_for(ear, "A2")
        await runs.complete("A")
        await wait_for_end(ear, "A")
        assert shown(ear) == ["A1", "B1", "B.", "A2", "A."]
        assert count(ear, "execution_start") == count(ear, "execution_success") == 2


async def test_a_requeued_prompt_takes_its_place_when_it_starts_again(runs: ParallelRuns) -> None:
    async with socket_of(runs.user) as ear:
        for name in ("A", "B", "C"):
            await runs.start(name)
        await runs.requeue("A")
        await wait_for(ear, "B1")
        await runs.lease("A")
        await runs.report("A", 2, starts=True)
        for name in ("A", "C", "B"):
            await runs.complete(name)
        await wait_for_end(ear, "A")
        assert shown(ear) == ["A1", "B1", "B.", "C1", "C.", "A2", "A."]


async def test_a_cancelled_prompt_lets_the_next_one_pass(runs: ParallelRuns) -> None:
    """An operator cancels it, so no worker reports its end."""
    async with socket_of(runs.user) as ear:
        await runs.start("A")
        await runs.start("B")
        await runs.complete("B")
        context, tenant_id = runs.server.plane.context, runs.user.tenant_id
        await job_submit.cancel_job(context, tenant_id, runs.leases["A"].job_id)
        await wait_for_end(ear, "B")
        assert shown(ear) == ["A1", "A.", "B1", "B."]
        assert count(ear, "execution_interrupted") == 1


async def test_a_long_run_that_was_held_back_comes_whole(
    runs: ParallelRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read from the log in several parts."""
    monkeypatch.setattr("comfyfleet.server.run_log.service.EVENTS_PER_READ_MAX", 3)
    async with socket_of(runs.user) as ear:
        await runs.start("A")
        await runs.start("B")
        for number in range(2, 12):
            await runs.report("B", number)
        await runs.complete("B")
        await runs.complete("A")
        await wait_for_end(ear, "B")
        assert shown(ear) == ["A1", "A.", *(f"B{number}" for number in range(1, 12)), "B."]


async def test_a_client_that_returns_to_the_same_control_plane_misses_nothing(
    runs: ParallelRuns,
) -> None:
    async with socket_of(runs.user) as ear:
        await runs.start("A")
        await runs.start("B")
        await wait_for(ear, "A1")
        await runs.report("A", 2)
        await wait_for(ear, "A2")
    await runs.complete("B")
    await runs.report("A", 3)
    async with socket_of(runs.user) as again:
        await wait_for(again, "A3")
        await runs.complete("A")
        await wait_for_end(again, "B")
        assert shown(ear, again) == ["A1", "A2", "A3", "A.", "B1", "B."]


async def test_a_client_that_returns_to_another_control_plane_misses_nothing(
    postgres_databases: Databases, tmp_path: Path
) -> None:
    both: dict[str, Any] = {
        "central_database_url": await postgres_databases.url("central"),
        "tenant_database_urls": f"main={await postgres_databases.url('tenant')}",
    }
    async with (
        gateway_on(postgres_databases, tmp_path, engines=0, **both) as here,
        gateway_on(postgres_databases, tmp_path, engines=0, **both) as there,
    ):
        runs = await runs_on(here)
        user_id = runs.user.user_id
        async with socket_of(runs.user) as ear:
            await runs.start("A")
            await runs.start("B")
            await runs.complete("B")
            await runs.report("A", 2)
            await wait_for(ear, "A2")

        async def is_known() -> bool:
            known = here.plane.cursors.of(user_id, CLIENT)
            return known is not None and there.plane.cursors.of(user_id, CLIENT) == known

        await until(is_known)
        await runs.report("A", 3)
        async with socket_of(replace(runs.user, url=there.url)) as again:
            await wait_for(again, "A3")
            await runs.complete("A")
            await wait_for_end(again, "B")
        assert shown(ear, again) == ["A1", "A2", "A3", "A.", "B1", "B."]
        both_ears = [*ear.names(), *again.names()]
        assert both_ears.count("execution_start") == both_ears.count("execution_success") == 2


async def test_the_queue_lists_one_running_prompt_of_a_client(runs: ParallelRuns) -> None:
    async with runs.user.http_async() as http:

        async def queue() -> tuple[list[str], list[str]]:
            lists = (await http.get("/queue")).json()
            keys = ("queue_running", "queue_pending")
            return tuple([each[1] for each in lists[key]] for key in keys)  # type: ignore[return-value]

        await runs.submit("A")
        await runs.lease("A")
        await runs.start("B")
        # A was leased first, and B has started.
        assert await queue() == (["B"], ["A"])
        await runs.start("other", in_order=False)
        assert await queue() == (["B", "other"], ["A"])
        await runs.report("A", 1, starts=True)
        assert await queue() == (["B", "other"], ["A"])
        await runs.complete("B")
        assert await queue() == (["A", "other"], [])


@pytest.mark.parametrize("how", ["delete", "clear"])
async def test_a_running_prompt_that_is_listed_as_pending_can_be_removed(
    runs: ParallelRuns, how: str
) -> None:
    shown, listed = str(uuid4()), str(uuid4())
    await runs.start(shown)
    await runs.start(listed)
    body = {"delete": [listed]} if how == "delete" else {"clear": True}
    async with runs.user.http_async() as http:
        assert (await http.post("/queue", json=body)).status_code == 200
    async with runs.server.plane.central.read() as tx:
        rows = {
            name: await dispatch.get(tx, lease.dispatch_id) for name, lease in runs.leases.items()
        }
    stops = {name: row.cancel_requested for name, row in rows.items()}
    assert stops == {shown: False, listed: True}


async def test_messages_come_at_once_where_the_order_is_turned_off(runs: ParallelRuns) -> None:
    async with socket_of(runs.user) as ear:
        await runs.start("A", in_order=False)
        await runs.start("B", in_order=False)
        await runs.complete("B")
        await runs.report("A", 2)
        await wait_for(ear, "A2")
        assert shown(ear) == ["A1", "B1", "B.", "A2"]


LONG = {
    **PROMPT,
    "3": node("ComfyfleetSteps", steps=2_000, step_ms=50, previews=True, image=["1", 0]),
    "2": node("SaveImage", images=["3", 0], filename_prefix="ComfyUI"),
}


@pytest.mark.parametrize("in_order", [True, False])
async def test_two_backends_show_one_prompt_at_a_time_unless_the_fleet_is_set_otherwise(
    databases: Databases, tmp_path: Path, in_order: bool
) -> None:
    async with gateway_on(databases, tmp_path, engines=2) as server:
        await set_order(server, in_order=in_order)
        user = await server.new_user()

        def run() -> None:
            with user.open_engine_client() as talk:
                ear = talk.listen(CLIENT)
                first = talk.submit(LONG, client_id=CLIENT)
                ear.wait("execution_start", {"prompt_id": first})
                second = talk.submit(PROMPT, client_id=CLIENT)
                wait_until(lambda: second in talk.http.get("/history").json())
                if in_order:
                    ear.wait("progress", {"prompt_id": first})
                    assert second not in str(ear.events)
                else:
                    ear.wait("executing", {"node": None, "prompt_id": second})
                talk.http.post("/interrupt", json={"prompt_id": first})
                if in_order:
                    ear.wait("executing", {"node": None, "prompt_id": first})
                    ear.wait("executing", {"node": None, "prompt_id": second})

        await asyncio.to_thread(run)


async def set_order(server: GatewayInProcess, *, in_order: bool) -> None:
    headers = {"Authorization": f"Bearer {server.admin_key}"}
    path = f"/api/admin/fleets/{FLEET}/{STAGE}/prompts"
    async with httpx.AsyncClient(base_url=server.url, headers=headers) as http:
        terms = (await http.get(path)).json()
        del terms["warning"]
        assert terms["in_order"] is True, "the default"
        answer = await http.put(path, json={**terms, "in_order": in_order})
        assert answer.json()["in_order"] is in_order, answer.text


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(LOOK_SECONDS)

"""A tenant with tokens and two workflows, and workers whose reports the test controls."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import func, select, update
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, WorkerClient, fleet_setup_on

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db.central_tables import dispatches, workers
from comfyfleet.server.db.dialect import EPOCH
from comfyfleet.server.db.tenant_tables import ai_jobs
from comfyfleet.server.graphs import actions
from comfyfleet.server.graphs.actions import NewGraphRun, Owner
from comfyfleet.server.graphs.apply import GraphContext, LoadedRun
from comfyfleet.server.graphs.run import Choice, ExecutionKey, QuestionAnswered
from comfyfleet.server.graphs.runner import read_outbox, sweep_runs
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants import wallet as ledger

PRICE = 3
DRAW = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64}},
    "3": {"class_type": "LoadImage", "inputs": {"image": "one.png"}},
    "4": {"class_type": "LoadImage", "inputs": {"image": "other.png"}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "drawn"}},
}
DRAW_PROPERTIES = [
    {"name": "width", "type": "integer", "binding": "1.width", "default": 64},
    {"name": "like", "type": "image", "binding": "3.image", "required": False},
    {"name": "and_like", "type": "image", "binding": "4.image", "required": False},
]


def node(id: str, **fields: Any) -> dict[str, Any]:
    return {"id": id, "type": "workflow", "workflow": "draw", **fields}


def output(id: str = "result") -> dict[str, Any]:
    return {"id": id, "type": "output"}


def graph(nodes: list[dict[str, Any]], *connections: str, **more: Any) -> dict[str, Any]:
    """Connections as `a.output > b.like`."""
    pairs = [each.split(" > ") for each in connections]
    return {
        "name": "a graph",
        "nodes": nodes,
        "connections": [{"from": source, "to": target} for source, target in pairs],
        **more,
    }


@dataclass
class GraphSetup:
    plane: ControlPlane
    fleet_setup: FleetSetup
    owner: Owner
    workers: dict[str, WorkerClient] = field(default_factory=dict)

    @property
    def graphs(self) -> GraphContext:
        return self.plane.graphs

    async def started(self, document: Mapping[str, Any], **wanted: Any) -> LoadedRun:
        made = await actions.create_graph(self.graphs, self.owner, document)
        return await self.run(made.id, **wanted)

    async def run(self, graph_id: UUID, **wanted: Any) -> LoadedRun:
        new = NewGraphRun(wanted.pop("inputs", {}), **wanted)
        kept, _ = await actions.start_run(self.graphs, self.owner, graph_id, new)
        return kept

    async def now(self, kept: LoadedRun) -> LoadedRun:
        return await actions.get_run(self.graphs, self.owner, kept.head.id)

    async def sweep(self) -> None:
        await read_outbox(self.graphs, self.plane.pools["main"])

    async def judge(self) -> None:
        self.graphs.environment._at = None
        await sweep_runs(self.graphs, self.plane.pools["main"])

    async def work(
        self, worker: str = "w1", *, wanted: Callable[[dict[str, Any]], Any] = lambda job: None
    ) -> list[dict[str, Any]]:
        """Runs all jobs that this worker gets, one after the other; returns them."""
        done = []
        while job := (await self.workers[worker].poll(wait_seconds=0))["job"]:
            if error := wanted(job):
                answer = await self.workers[worker].call_for(job, "fail", error=error)
                assert answer.status_code == 200, answer.text
            else:
                await self.deliver(job, worker)
            done.append(job)
            await self.sweep()
        return done

    async def deliver(self, job: dict[str, Any], worker: str = "w1", **more: Any) -> None:
        """Completes a job with a picture of 64 × 48, as its worker would report it."""
        calling, slot = self.workers[worker], job["outputs"][0]
        put = await calling.client.put(slot["url"], content=b"made", headers=slot["headers"])
        assert put.status_code in (200, 201), put.text
        said = {
            "name": slot["name"],
            "size": 4,
            "content_type": "image/png",
            "filename": "drawn.png",
            "width": 64,
            "height": 48,
        }
        answer = await calling.call_for(
            job, "complete", outputs=[said], execution_seconds=1.5, **more
        )
        assert answer.status_code == 200, answer.text

    async def answer(
        self, kept: LoadedRun, node: str, choice: Choice, backend: str | None = None
    ) -> LoadedRun:
        said = QuestionAnswered(ExecutionKey(node), choice, backend)
        return await actions.answer_question(self.graphs, self.owner, kept.head.id, said)

    async def lose(self, worker: str, since: datetime = EPOCH) -> None:
        """Makes the worker last seen long ago."""
        async with self.plane.central.transaction() as tx:
            await tx.execute(
                update(workers).where(workers.c.worker_id == worker).values(last_seen_at=since)
            )
        self.graphs.environment._at = None

    async def balance(self) -> int:
        async with self.plane.pools["main"].read() as tx:
            return await ledger.balance(tx, self.owner.tenant_id, self.owner.user_id)

    async def count_jobs(self, **states: Any) -> int:
        async with self.plane.pools["main"].read() as tx:
            query = select(func.count()).select_from(ai_jobs)
            for name, value in states.items():
                query = query.where(ai_jobs.c[name] == value)
            return int(await tx.scalar(query) or 0)

    async def count_dispatches(self, status: str) -> int:
        async with self.plane.central.read() as tx:
            query = select(func.count()).select_from(dispatches)
            return int(await tx.scalar(query.where(dispatches.c.status == status)) or 0)

    async def require_sound_ledger(self) -> None:
        async with self.plane.pools["main"].read() as tx:
            assert await ledger.verify(tx) == []


def statuses(kept: LoadedRun) -> dict[str, str]:
    return {str(key): str(record.status) for key, record in kept.run.records.items()}


async def new_owner(plane: ControlPlane, tokens: int) -> Owner:
    owner = Owner(uuid4(), uuid4())
    async with plane.central.transaction() as tx:
        await tenants.create_tenant(
            tx, tenant_id=owner.tenant_id, name="Ada", pool="main", now=plane.clock()
        )
    if tokens:
        async with plane.pools["main"].transaction() as tx:
            paid = f"paid-{owner.user_id}"
            await ledger.credit(tx, owner.tenant_id, owner.user_id, tokens, paid, now=plane.clock())
    return owner


@asynccontextmanager
async def graph_setup_on(
    databases: Databases,
    folder: Path,
    *,
    tokens: int = 100,
    workers: tuple[str, ...] = ("w1",),
    **settings: Any,
) -> AsyncIterator[GraphSetup]:
    async with AsyncExitStack() as stack:
        plane = await stack.enter_async_context(plane_on(databases, folder, **settings))
        fleet_setup = await stack.enter_async_context(fleet_setup_on(plane))
        made = await fleet_setup.register_workflow(
            "draw",
            document=DRAW,
            properties=DRAW_PROPERTIES,
            output_node_id="2",
            price_tokens=PRICE,
        )
        assert made.status_code == 201, made.text
        await fleet_setup.assign("invert", "draw")
        graph_setup = GraphSetup(plane, fleet_setup, await new_owner(plane, tokens))
        for worker in workers:
            graph_setup.workers[worker] = await stack.enter_async_context(
                fleet_setup.worker(worker)
            )
        yield graph_setup

"""A prompt of the gateway on a JobContext, with the reports of a worker that runs it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from blake3 import blake3
from sqlalchemy import select
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ManualClock, asked, give_tokens, job_context_on, waiter
from tests.support.jobs.fuse import Fuse, fused

from comfyfleet.api.values import DeliveredOutput
from comfyfleet.api.worker import Complete
from comfyfleet.api.worker import Job as Handed
from comfyfleet.clock import utc_now
from comfyfleet.server.db.tenant_tables import files, run_events
from comfyfleet.server.jobs import finish
from comfyfleet.server.jobs import submit as job_submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.files import LeaseKey, report_live, source_key
from comfyfleet.server.jobs.lease import lease_next
from comfyfleet.server.jobs.model import Job
from comfyfleet.server.maintenance.retention import remove_orphans

ONE, OTHER = b"a picture", b"another picture"


@dataclass
class Scene:
    whole: JobContext
    cut: JobContext
    fuse: Fuse
    clock: ManualClock
    tenant_id: UUID
    user_id: UUID

    async def lease(self, **changes: Any) -> Handed:
        """A new prompt, which is run."""
        gateway = {"prompt_id": str(uuid4()), "number": 1, "client_id": "c", "extra_data": {}}
        gateway |= changes.pop("gateway", {})
        new = {self.whole.new_id(): asked(user_id=self.user_id, gateway=gateway, **changes)}
        await job_submit.submit_many(self.whole, self.tenant_id, new)
        return await self.lease_again()

    async def lease_again(self) -> Handed:
        handed = await lease_next(self.whole, waiter("w"), wait_seconds=0)
        assert handed
        return handed

    def key(self, lease: Handed) -> LeaseKey:
        return LeaseKey(self.tenant_id, lease.job_id, lease.lease_token)

    async def upload(self, lease: Handed, output: DeliveredOutput, data: bytes) -> None:
        await self.whole.store.put(source_key(self.key(lease), output), data, "image/png")

    async def report(self, lease: Handed, data: bytes = ONE, name: str = "output.png") -> None:
        output = made(data, name)
        await self.upload(lease, output, data)
        await report_live(self.whole, self.key(lease), [executed(output)], [output])

    async def complete(self, lease: Handed, *outputs: DeliveredOutput) -> Job:
        return await finish.complete(self.whole, done(lease, *outputs))

    async def rows(self, table: Any, job_id: UUID) -> list[Any]:
        async with self.whole.tenant(self.tenant_id) as tx:
            query = select(table).order_by(table.c.created_at)
            return [row for row in await tx.execute(query) if str(job_id) in str(row)]

    async def files_of(self, job_id: UUID) -> list[Any]:
        async with self.whole.tenant(self.tenant_id) as tx:
            found = await tx.execute(select(files))
            return [row for row in found if f"/{job_id}/" in row.path]

    async def names_told(self, job_id: UUID) -> list[str]:
        return [
            picture["filename"]
            for row in await self.rows(run_events, job_id)
            for kind, data in row.events
            if kind == "executed"
            for picture in data["output"]["images"]
        ]

    async def require_tidy(self) -> None:
        """After a day there is an object for each row of a file, and no other."""
        await self.whole.deferred.flush()
        # Objects have the time of this machine.
        ahead = utc_now() + timedelta(hours=25) - self.clock()
        self.clock.advance(seconds=ahead.total_seconds())
        await remove_orphans(self.whole)
        async with self.whole.tenant(self.tenant_id) as tx:
            paths = {row.path for row in await tx.execute(select(files.c.path))}
        assert paths == {key async for key in self.whole.store.keys(f"tenants/{self.tenant_id}/")}


def made(data: bytes, name: str = "output.png", number: int = 1) -> DeliveredOutput:
    return DeliveredOutput(
        name=name,
        size=len(data),
        content_type="image/png",
        content_hash=blake3(data).hexdigest(),
        filename=f"x_{number:05}_.png",
        node_id="9",
        kind="images",
        folder="output",
        subfolder="",
        is_stripped=True,
    )


def executed(*outputs: DeliveredOutput) -> tuple[str, dict[str, Any]]:
    pictures = [{"filename": each.filename, "subfolder": "", "type": "output"} for each in outputs]
    return "executed", {"node": "9", "prompt_id": "x", "output": {"images": pictures}}


def done(lease: Handed, *outputs: DeliveredOutput) -> Complete:
    return Complete(
        dispatch_id=lease.dispatch_id,
        lease_token=lease.lease_token,
        outputs=outputs,
        events=(("execution_success", {"prompt_id": "x"}),),
        history={},
        told_outputs=True,
    )


@asynccontextmanager
async def scene_on(databases: Databases, folder: Path) -> AsyncIterator[Scene]:
    clock, fuse = ManualClock(), Fuse()
    async with job_context_on(databases, folder, clock) as (context, tenant_id):
        user_id = await give_tokens(context, tenant_id, 1000)
        cut = fused(context, fuse)
        yield Scene(context, cut, fuse, clock, tenant_id, user_id)
        await cut.deferred.flush()

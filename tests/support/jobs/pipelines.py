"""A tenant with workflows, a pipeline and tokens, and a worker whose images the test chooses."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from sqlalchemy import delete
from tests.support.databases.factory import Databases
from tests.support.jobs.context import (
    ManualClock,
    give_tokens,
    job_context_on,
    require_sound_ledger,
)
from tests.support.server import customers

from comfyfleet.api.values import DeliveredOutput, ShownValue
from comfyfleet.api.worker import Complete
from comfyfleet.api.worker import Job as Handed
from comfyfleet.server.catalog import service
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.draft import draft_workflow
from comfyfleet.server.catalog.model import Property, WorkflowTerms
from comfyfleet.server.db.central_tables import workflows
from comfyfleet.server.jobs import finish, submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.lease import lease_next
from comfyfleet.server.jobs.model import Failure, Job, output_folder_of
from comfyfleet.server.maintenance.sweeps import advance_pipelines
from comfyfleet.server.media.model import output_key
from comfyfleet.server.pipelines import actions, store_candidates
from comfyfleet.server.pipelines.actions import NewPipelineRun
from comfyfleet.server.pipelines.model import PipelineCandidate, StoredRun
from comfyfleet.server.pipelines.run_state import PipelineRunState, read_state
from comfyfleet.server.pipelines.store_candidates import CandidateFilter
from comfyfleet.server.queue.model import QueueLane, Waiter

PRICES = {"draw": 3, "fix": 2, "upscale": 1, "rate": 1}
TOKENS = 1000
DRAW = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0},
    },
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
}
CHANGE = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "photo.png"}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
}
DRAW_TAKES = [
    Property("hue", "seed", binding="1.height", minimum=1, maximum=255),
    Property("prefix", "text", binding="2.filename_prefix", default="x"),
    Property("color", "seed", binding="1.color"),
    Property("width", "integer", binding="1.width", default=8),
]
CHANGE_TAKES = [Property("input", "image", binding="1.image", required=True)]
THREE_STEPS: dict[str, Any] = {
    "name": "Three steps",
    "steps": [
        {"name": "Base", "workflow": "draw", "properties": {"width": "{{ variables.width }}"}},
        {
            "name": "Fix it",
            "workflow": "fix",
            "properties": {"input": "{{ parent.file }}"},
            "children_per_parent": 2,
        },
        {
            "name": "Upscale",
            "workflow": "upscale",
            "properties": {"input": "{{ parent.file }}"},
        },
    ],
}
ONE_STEP: dict[str, Any] = {"name": "One step", "steps": [{"name": "Base", "workflow": "draw"}]}


def png(pixel: int = 0) -> bytes:
    """A picture of one pixel, in a shade of grey."""
    return customers.png(width=1, colour=pixel % 256)


@dataclass
class PipelineSetup:
    context: JobContext
    tenant_id: UUID
    user_id: UUID
    clock: ManualClock
    lanes: frozenset[QueueLane]

    @property
    def whose(self) -> tuple[UUID, UUID]:
        return self.tenant_id, self.user_id

    @property
    def pool(self) -> Any:
        return self.context.pools["main"]

    async def start(
        self, document: dict[str, Any] = THREE_STEPS, *, base: int = 2, **more: Any
    ) -> StoredRun:
        made = await actions.create_pipeline(self.context, *self.whose, document)
        new = NewPipelineRun(base, **{"variables": {"width": 8}, **more})
        run, _ = await actions.start_run(self.context, *self.whose, made.id, new)
        return run

    async def sweep(self, context: JobContext | None = None) -> None:
        context = context or self.context
        self.clock.advance(seconds=1)
        while await advance_pipelines(context, context.pools["main"]):
            pass

    async def lease(self) -> Handed | None:
        return await lease_next(
            self.context, Waiter("w1", lanes=self.lanes, is_alone=True), wait_seconds=0
        )

    async def leased(self) -> Handed:
        handed = await self.lease()
        assert handed
        return handed

    async def finish(
        self,
        handed: Handed,
        pictures: Sequence[bytes] = (png(),),
        content_type: str = "image/png",
        texts: Sequence[str] = (),
    ) -> Job:
        outputs = []
        for number, data in enumerate(pictures):
            name = f"{number}.png"
            delivery = output_folder_of(handed.lease_token, handed.job_id)
            key = output_key(self.tenant_id, handed.job_id, delivery, name)
            await self.context.store.put(key, data, content_type)
            outputs.append(
                DeliveredOutput(name=name, size=len(data), content_type=content_type, filename=name)
            )
        said = Complete(
            dispatch_id=handed.dispatch_id,
            lease_token=handed.lease_token,
            outputs=tuple(outputs),
            values=tuple(ShownValue(node_id="9", name="text", value=each) for each in texts),
        )
        return await finish.complete(self.context, said)

    async def fail(self, handed: Handed) -> None:
        await finish.fail(
            self.context, handed.dispatch_id, handed.lease_token, Failure("out of memory")
        )

    async def work_off(self, jobs_max: int = 100) -> int:
        """Runs jobs until the run needs no more; returns their number."""
        for count in range(jobs_max):
            await self.sweep()
            handed = await self.lease()
            if handed is None:
                return count
            await self.finish(handed)
        raise AssertionError(f"still not done after {jobs_max} jobs")

    async def state(self, run: StoredRun) -> PipelineRunState:
        async with self.pool.read() as tx:
            return await read_state(tx, self.tenant_id, run.id)

    async def candidates(self, run: StoredRun, **wanted: Any) -> list[PipelineCandidate]:
        async with self.pool.read() as tx:
            return await store_candidates.list_page(
                tx, run.id, CandidateFilter(**wanted), after=None, limit=1000
            )

    async def made(self, run: StoredRun) -> list[int]:
        """The number of candidates of each step."""
        steps = [each.step for each in await self.candidates(run)]
        return [steps.count(number) for number in range(max(steps, default=-1) + 1)]

    async def job(self, job_id: UUID) -> Job:
        return await submit.get_job(self.context, self.tenant_id, job_id)

    async def require_sound(self, run: StoredRun, job_ids: Sequence[UUID]) -> None:
        jobs = [await self.job(each) for each in job_ids]
        await require_sound_ledger(self.context, self.tenant_id, jobs)


@asynccontextmanager
async def pipeline_setup_on(
    databases: Databases, folder: Path, **settings: Any
) -> AsyncIterator[PipelineSetup]:
    clock = ManualClock()
    async with job_context_on(databases, folder, clock, **settings) as (context, tenant_id):
        async with context.central.transaction() as tx:
            # Their numbers were chosen by hand, and PostgreSQL would give them out once more.
            await tx.execute(delete(workflows))
        lanes = frozenset([await _register(context, slug) for slug in PRICES])
        user_id = await give_tokens(context, tenant_id, TOKENS)
        yield PipelineSetup(context, tenant_id, user_id, clock, lanes)


async def _register(context: JobContext, slug: str) -> QueueLane:
    made = draft_workflow(
        slug=slug,
        document=DRAW if slug == "draw" else CHANGE,
        properties=DRAW_TAKES if slug == "draw" else CHANGE_TAKES,
        output_node_id="2",
        object_info=OBJECT_INFO,
    )
    await service.store_document(context.store, made)
    async with context.central.transaction() as tx:
        workflow, _ = await catalog.register_workflow(
            tx,
            made,
            WorkflowTerms(price_tokens=PRICES[slug], output="optional"),
            now=context.clock(),
        )
    return QueueLane(workflow.id, "production", "self_hosted")


def _input(kind: Any, **options: Any) -> list[Any]:
    return [kind, options]


OBJECT_INFO: dict[str, Any] = {
    "EmptyImage": {
        "input": {
            "required": {
                "width": _input("INT", default=8, min=1, max=16384),
                "height": _input("INT", default=8, min=1, max=16384),
                "batch_size": _input("INT", default=1, min=1, max=4096),
                "color": _input("INT", default=0, min=0, max=0xFFFFFFFFFFFFFFFF),
            }
        },
        "output": ["IMAGE"],
    },
    "LoadImage": {
        "input": {"required": {"image": _input([], image_upload=True)}},
        "output": ["IMAGE", "MASK"],
    },
    "SaveImage": {
        "input": {
            "required": {
                "images": _input("IMAGE"),
                "filename_prefix": _input("STRING", default="x"),
            }
        },
        "output": [],
        "output_node": True,
    },
}

"""A small file may come with the final report instead of an upload."""

from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ManualClock, asked, give_tokens, job_context_on, waiter

from comfyfleet.api.values import DeliveredOutput
from comfyfleet.api.worker import Complete, Job
from comfyfleet.errors import InvalidInput
from comfyfleet.server.jobs import finish, submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.lease import lease_next
from comfyfleet.server.jobs.model import JobStatus

Given = tuple[JobContext, UUID]


@pytest.fixture
async def given(databases: Databases, tmp_path: Path) -> AsyncIterator[Given]:
    async with job_context_on(databases, tmp_path, ManualClock()) as found:
        yield found


async def leased(context: JobContext, tenant_id: UUID) -> Job:
    user_id = await give_tokens(context, tenant_id, 10)
    await submit.submit_many(context, tenant_id, {context.new_id(): asked(user_id=user_id)})
    job = await lease_next(context, waiter(), wait_seconds=0)
    assert job
    return job


def report(job: Job, content: str, size: int = 7) -> Complete:
    output = DeliveredOutput(
        name="a.png", size=size, content_type="image/png", is_stripped=True, content=content
    )
    return Complete(dispatch_id=job.dispatch_id, lease_token=job.lease_token, outputs=(output,))


async def stored(context: JobContext) -> list[bytes]:
    return [await context.store.get(key) async for key in context.store.keys("")]


PICTURE = b64encode(b"picture").decode()


async def test_a_file_in_the_report_is_stored_once_however_often_it_is_sent(given: Given) -> None:
    context, tenant_id = given
    job = await leased(context, tenant_id)
    assert job.inline_bytes_max > 0
    for _ in range(2):
        ended = await finish.complete(context, report(job, PICTURE))
        assert ended.status == JobStatus.COMPLETED
        assert len(ended.outputs) == 1
    await context.deferred.flush()
    assert await stored(context) == [b"picture"]


@pytest.mark.parametrize(("content", "size"), [(PICTURE, 8), ("not base64!", 7)])
async def test_a_file_that_is_not_as_announced_is_refused(
    given: Given, content: str, size: int
) -> None:
    context, tenant_id = given
    job = await leased(context, tenant_id)
    with pytest.raises(InvalidInput, match=r"a\.png"):
        await finish.complete(context, report(job, content, size))
    assert await stored(context) == []
    assert (await submit.get_job(context, tenant_id, job.job_id)).status == JobStatus.PROCESSING

"""Submits, finds, lists and follows jobs for Comfy API v2. These jobs are also visible to ComfyUI's
own clients as prompts.
"""

import asyncio
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from comfyfleet.errors import FleetError, InvalidInput, NotFound, Refused, TooManyCalls
from comfyfleet.protocol.http import json_text
from comfyfleet.protocol.payloads import MalformedBody, RefusedPrompt, parse_submission
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.gateway import assets, history, prompts
from comfyfleet.server.gateway.history import BoundedCache
from comfyfleet.server.gateway.model import gateway_data, is_running, job_id_of
from comfyfleet.server.gateway.offers import offer_to
from comfyfleet.server.gateway.v2_model import (
    OWN_STATUSES,
    STATUSES,
    JobFacts,
    LoggedProgress,
    is_editor_format,
    status_of,
)
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.model import Job, JobStatus
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File
from comfyfleet.server.notifications import webhooks
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.run_log.model import LogPage, UserFile, record_from
from comfyfleet.server.tenants.model import Caller
from comfyfleet.server.turns import FairThreads
from comfyfleet.workflow.conversion import convert
from comfyfleet.workflow.model import Limits

KEY_VALID = timedelta(hours=24)
KEY_CHARACTERS_MAX = 255
# Maximum number of jobs to search for a page with a label filter. The next page continues the
# search.
JOBS_SCANNED_MAX = 100
# Limits for converting a workflow to a prompt. Larger prompts would be refused anyway. The strings
# can be larger than the request body only if subgraphs repeat them.
CONVERSION_LIMITS = Limits(nodes_max=prompts.NODES_MAX, text_characters_max=16 * 1024**2)
AT_ONCE_MAX, WAITING_PER_TENANT_MAX = 2, 20
conversions = FairThreads("conversions", AT_ONCE_MAX, waiting_each_max=WAITING_PER_TENANT_MAX)


class KeyReused(InvalidInput):
    code = "idempotency_key_reuse"


class WorkflowRefused(Refused):
    code = "invalid_workflow"


@dataclass(frozen=True, slots=True)
class WorkflowJob:
    """A job to submit. `metadata` is either a mapping of labels or a string."""

    workflow: Mapping[str, Any]
    idempotency_key: str | None = None
    metadata: Mapping[str, str] | str | None = None
    priority: int | None = None
    webhook_url: str | None = None
    extra_data: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None


async def submit_job(
    plane: ControlPlane,
    caller: Caller,
    asked: WorkflowJob,
    number: float,
    *,
    at_id: Callable[[UUID], None],
) -> Job:
    """Submits a job. Raises KeyReused, WorkflowRefused or MissingAsset. In the last two cases,
    nothing is queued and the idempotency key can be used again.
    """
    key = None if asked.idempotency_key is None else stored_key(asked.idempotency_key)
    if key is not None:
        await _refuse_used(plane, caller, key)
    workflow = await assets.name_references(plane, caller, asked.workflow)
    prompt = await _prompt_of(plane, caller, workflow)
    stored_data = _stored_data(asked, workflow)
    if asked.webhook_url is not None:
        async with plane.pools[caller.tenant.pool].transaction() as tx:
            stored_data["webhook_url"] = await webhooks.prepare_for_jobs(
                tx, caller.tenant.id, caller.user_id, asked.webhook_url, now=plane.clock()
            )
    prompt_id = str(uuid4())
    options = prompts.PromptOptions(key, asked.priority or 0, stored_data, asked.max_tokens)
    try:
        # The job id also serves as the client id, so that no other client receives the run's
        # messages. comfy-api-proxy does the same.
        submission = parse_submission(
            {
                "prompt": prompt,
                "prompt_id": prompt_id,
                "client_id": prompt_id,
                "extra_data": _extra_data(asked, workflow),
            }
        )
        receipt = await prompts.submit_prompt(
            plane, caller, submission, number, options=options, at_id=at_id
        )
    except RefusedPrompt as refused:
        raise _refusal(refused) from refused
    except MalformedBody as error:
        raise WorkflowRefused(error.message) from error
    if not receipt.is_new:
        raise _reused()
    return await find_job(plane, caller, prompt_id)


def stored_key(key: str) -> str:
    """Returns the stored form of an idempotency key. The prefix separates the keys of Comfy API v2
    from the keys of our own API.
    """
    return f"v2:{hashlib.sha256(key.encode()).hexdigest()}"


async def _refuse_used(plane: ControlPlane, caller: Caller, key: str) -> None:
    since = plane.clock() - KEY_VALID
    async with plane.pools[caller.tenant.pool].transaction() as tx:
        if await jobs.is_key_used(tx, caller.tenant.id, caller.user_id, key, since=since):
            raise _reused()


def _reused() -> KeyReused:
    return KeyReused(
        "this Idempotency-Key was already used for another job; list your jobs to find that job"
    )


def _stored_data(asked: WorkflowJob, workflow: Mapping[str, Any]) -> dict[str, Any]:
    stored_data: dict[str, Any] = {}
    if is_editor_format(workflow):
        stored_data["workflow"] = dict(workflow)
    if asked.metadata is not None:
        stored_data["metadata"] = asked.metadata
    if asked.priority is not None:
        stored_data["priority"] = asked.priority
    return stored_data


def _extra_data(asked: WorkflowJob, workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the job's extra data. A workflow in the editor's format is added to the metadata of
    images, as if the editor had submitted it.
    """
    shown = {"extra_pnginfo": {"workflow": workflow}} if is_editor_format(workflow) else {}
    return {**asked.extra_data, **shown}


async def _prompt_of(
    plane: ControlPlane, caller: Caller, workflow: Mapping[str, Any]
) -> Mapping[str, Any]:
    if not is_editor_format(workflow):
        return workflow
    offer = await offer_to(plane, caller)
    try:
        # Unknown node types stay in the prompt, so that validation can refuse them by name.
        work = partial(
            convert,
            workflow,
            offer.object_info,
            unknown="keep",
            now=plane.clock(),
            limits=CONVERSION_LIMITS,
        )
        return await conversions.run(caller.tenant.id, work)
    except TooManyCalls:
        raise
    except FleetError as error:
        raise WorkflowRefused(error.message, **error.details) from error


def _refusal(refused: RefusedPrompt) -> WorkflowRefused:
    error = refused.body["error"]
    return WorkflowRefused(
        str(error.get("message") or "the workflow was refused"),
        type=error.get("type"),
        reason=error.get("details"),
        node_errors=refused.body["node_errors"],
    )


async def find_job(plane: ControlPlane, caller: Caller, prompt_id: str) -> Job:
    """Returns the user's job. Raises NotFound for other users' jobs as well."""
    job_id = job_id_of(caller.tenant.id, caller.user_id, prompt_id)
    async with plane.context.tenant(caller.tenant.id) as tx:
        return await _find(tx, caller, job_id)


async def _find(tx: Tx, caller: Caller, job_id: UUID) -> Job:
    job = await jobs.find(tx, caller.tenant.id, job_id)
    if job is None or job.spec.gateway is None or job.spec.user_id != caller.user_id:
        raise NotFound("the job was not found")
    return job


async def cancel_job(plane: ControlPlane, caller: Caller, prompt_id: str) -> Job:
    await find_job(plane, caller, prompt_id)
    await prompts.cancel_prompt(plane, caller, prompt_id, leaves_trace=True)
    return await find_job(plane, caller, prompt_id)


def workflow_of(job: Job) -> dict[str, Any]:
    """Returns the job's workflow in the format in which it was submitted: the editor's format or a
    prompt.
    """
    data = gateway_data(job)
    saved = data.get("workflow")
    if isinstance(saved, Mapping):
        return {"workflow": saved, "format": "save"}
    return {"workflow": data.get("prompt") or job.spec.prompt, "format": "api"}


async def facts_of(plane: ControlPlane, caller: Caller, job: Job, cache: BoundedCache) -> JobFacts:
    if not job.status.is_active:
        return (await facts_of_ended(plane, caller, [job], cache))[job.id]
    async with plane.context.tenant(caller.tenant.id) as tx:
        if not is_running(job):
            ahead = await jobs.count_prompts_ahead(tx, job)
            return JobFacts(queue_position=ahead + 1)
        events = await run_log.messages_of_job(tx, caller.tenant.id, job.id)
        names = await run_log.files_of_jobs(tx, caller.tenant.id, [job.id])
        files = await _files_of(tx, caller, [job], names)
    progress = LoggedProgress(job.spec.prompt)
    for event in events:
        progress.take(event)
    return JobFacts(
        record_from(events, None, is_success=False),
        names.get(job.id, ()),
        files,
        progress.snapshot(),
        is_cancelling=job.id in await cancelling_among(plane, caller, [job]),
    )


async def cancelling_among(
    plane: ControlPlane, caller: Caller, found_jobs: Sequence[Job]
) -> frozenset[UUID]:
    """Returns the ids of running jobs whose workers were sent a stop request."""
    running = [job.id for job in found_jobs if is_running(job)]
    if not running:
        return frozenset()
    async with plane.central.read() as tx:
        rows = await dispatch.of_jobs(tx, caller.tenant.id, running)
    return frozenset(job_id for job_id, row in rows.items() if row.cancel_requested)


async def facts_of_ended(
    plane: ControlPlane, caller: Caller, ended: Sequence[Job], cache: BoundedCache
) -> dict[UUID, JobFacts]:
    records = await history.entries_of(plane, caller, ended, cache)
    async with plane.context.tenant(caller.tenant.id) as tx:
        names = await run_log.files_of_jobs(tx, caller.tenant.id, [job.id for job in ended])
        files = await _files_of(tx, caller, ended, names)
    return {job.id: JobFacts(records.get(job.id), names.get(job.id, ()), files) for job in ended}


async def _files_of(
    tx: Tx, caller: Caller, found_jobs: Sequence[Job], names: Mapping[UUID, Sequence[UserFile]]
) -> dict[UUID, File]:
    named = {file.file_id for job_names in names.values() for file in job_names if file.file_id}
    ids = sorted(named | {output.file_id for job in found_jobs for output in job.outputs})
    files: dict[UUID, File] = {}
    for start in range(0, len(ids), media.FILES_AT_ONCE_MAX):
        part = ids[start : start + media.FILES_AT_ONCE_MAX]
        files |= await media.find_existing(tx, caller.tenant.id, part)
    return files


@dataclass(frozen=True, slots=True)
class WorkflowJobQuery:
    statuses: Collection[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    before: tuple[datetime, UUID] | None = None
    limit: int = 50

    def own_statuses(self) -> list[JobStatus]:
        """Converts the requested statuses of the API to our own job statuses."""
        requested = set(self.statuses) or set(STATUSES.values())
        own = [*dict.fromkeys(own for status, own in OWN_STATUSES.items() if status in requested)]
        # A prefetched job counts as queued until its worker starts it.
        return own + [JobStatus.PROCESSING] * ("queued" in requested and "running" not in requested)

    def wants(self, job: Job, cancelling: Collection[UUID] = ()) -> bool:
        status = status_of(job, is_cancelling=job.id in cancelling)
        if self.statuses and status not in self.statuses:
            return False
        metadata = gateway_data(job).get("metadata")
        labels = metadata if isinstance(metadata, Mapping) else {}
        return all(labels.get(key) == value for key, value in self.labels.items())


class WorkflowJobPage(NamedTuple):
    """A page of jobs. The next page begins after the job `last`. None means that there are no more
    jobs.
    """

    jobs: list[Job]
    facts: Mapping[UUID, JobFacts]
    last: Job | None


async def list_jobs(
    plane: ControlPlane, caller: Caller, query: WorkflowJobQuery, cache: BoundedCache
) -> WorkflowJobPage:
    """Returns a page of jobs, newest first."""
    async with plane.context.tenant(caller.tenant.id) as tx:
        found_jobs, is_more = await _read_jobs(tx, caller, query)
    cancelling = await cancelling_among(plane, caller, found_jobs)
    page, last = _cut(query, found_jobs, cancelling, is_more=is_more)
    ended = [job for job in page if not job.status.is_active]
    facts = await facts_of_ended(plane, caller, ended, cache)
    facts |= {job.id: JobFacts(is_cancelling=True) for job in page if job.id in cancelling}
    return WorkflowJobPage(page, facts, last)


async def _read_jobs(tx: Tx, caller: Caller, query: WorkflowJobQuery) -> tuple[list[Job], bool]:
    """Returns the jobs for a page, and whether there may be more. The page has fewer jobs if their
    prompts are large.
    """
    scanned = JOBS_SCANNED_MAX if query.labels else query.limit + 1
    read_jobs: list[Job] = []
    before, size = query.before, 0
    while len(read_jobs) < scanned and size < history.READ_BYTES_MAX:
        limit = min(history.READ_FIRST, scanned - len(read_jobs))
        part = await jobs.list_prompts(
            tx,
            caller.tenant.id,
            caller.user_id,
            statuses=query.own_statuses(),
            before=before,
            limit=limit,
        )
        read_jobs += part
        if len(part) < limit:
            return read_jobs, False
        before = part[-1].submitted_at, part[-1].id
        for job in part:
            size += len(json_text(job.spec.prompt))
            await asyncio.sleep(0)
    return read_jobs, True


def _cut(
    query: WorkflowJobQuery,
    read_jobs: Sequence[Job],
    cancelling: Collection[UUID],
    *,
    is_more: bool,
) -> tuple[list[Job], Job | None]:
    """Returns the jobs of a page, and the job after which the next page begins. Returns None
    instead of that job if there are no more jobs.
    """
    page: list[Job] = []
    for place, job in enumerate(read_jobs):
        page += [job] * query.wants(job, cancelling)
        if len(page) == query.limit:
            return page, job if is_more or place + 1 < len(read_jobs) else None
    return page, read_jobs[-1] if is_more else None


async def read_run(
    plane: ControlPlane, caller: Caller, job_id: UUID, *, after_id: int
) -> tuple[Job, LogPage]:
    """Returns a job and a page of its messages. The job is read first. Thus, if it has ended and
    this is the last page, all messages have been returned.
    """
    async with plane.context.tenant(caller.tenant.id) as tx:
        job = await _find(tx, caller, job_id)
        messages = await run_log.events_of_job(tx, caller.tenant.id, job_id, after_id=after_id)
    return job, messages

"""Finds the output of a worker that reports a result without naming its files.

Such a worker uploads one file to the `output_url` that came with its job. The control plane then reads size and
type from the object store.
"""

from uuid import UUID

from comfyfleet.api.values import DeliveredOutput, WantedOutput
from comfyfleet.api.worker import Complete
from comfyfleet.errors import NotFound, OutputMissing
from comfyfleet.media import ENDINGS, SNIFF_BYTES, sniff_type
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.db import Database
from comfyfleet.server.jobs import store, store_prompts
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.model import Job, JobSpec, JobStatus, output_folder_of
from comfyfleet.server.media.model import output_key
from comfyfleet.server.queue.model import Dispatch

DEFAULT_OUTPUT = WantedOutput(name="output")
PNG_OUTPUT = WantedOutput(name="output.png", content_type="image/png")
UNKNOWN_TYPE = "application/octet-stream"


def guess_output(asked: JobSpec) -> WantedOutput:
    """Guesses the upload slot of the output, which saves a worker one request: most prompts save a
    PNG.
    """
    named = {asked.output_node_id} if asked.output_node_id else asked.prompt.keys()
    saves = any(asked.prompt.get(each, {}).get("class_type") == "SaveImage" for each in named)
    return PNG_OUTPUT if saves else DEFAULT_OUTPUT


async def with_unreported_output(
    context: JobContext, pool: Database, row: Dispatch, message: Complete
) -> Complete:
    """Returns the report with the file at the lease's own output key, if the report names no file.

    Raises OutputMissing if there is neither a file nor a value and the workflow requires one. Nothing is changed
    then, so that the worker can upload the file and repeat its report.
    """
    if message.outputs:
        return message
    async with pool.read() as tx:
        has_messages = bool(message.events) or message.history is not None
        if has_messages and await store_prompts.is_prompt(tx, row.tenant_id, row.job_id):
            return (
                message  # a worker that sends a prompt's messages names the files that it uploaded
            )
        job = await store.get(tx, row.tenant_id, row.job_id)
    # A requeued job keeps the token of its last lease. Completing it fails with LeaseLost.
    if job is None or job.status != JobStatus.PROCESSING or job.lease_token != message.lease_token:
        return message
    output = await _find_output(context, job, message.lease_token)
    if output is not None:
        return message.model_copy(update={"outputs": (output,)})
    if message.values or not await _is_output_required(context, job):
        return message
    raise await _missing(context, job, message.lease_token)


async def _find_output(context: JobContext, job: Job, token: UUID) -> DeliveredOutput | None:
    wanted = guess_output(job.asked)
    key = _key(job, token, wanted)
    facts = await context.store.head(key)
    if facts is None or not facts.size:
        return None
    try:
        start = await context.store.get_start(key, SNIFF_BYTES)
    except NotFound:
        return None
    media_type = sniff_type(start) or UNKNOWN_TYPE
    return DeliveredOutput(
        name=wanted.name,
        filename=f"output{ENDINGS.get(media_type, '')}",
        size=facts.size,
        content_type=media_type,
        node_id=job.asked.output_node_id,
    )


def _key(job: Job, token: UUID, wanted: WantedOutput) -> str:
    return output_key(job.tenant_id, job.id, output_folder_of(token, job.id), wanted.name)


async def _is_output_required(context: JobContext, job: Job) -> bool:
    if job.asked.gateway is not None:
        return False
    async with context.central.read() as tx:
        terms = await catalog.run_terms(tx, job.asked.workflow_id, job.asked.effect_id)
    return terms.output == "required"


async def _missing(context: JobContext, job: Job, token: UUID) -> OutputMissing:
    wanted = guess_output(job.asked)
    put = await context.store.url_to_put(
        _key(job, token, wanted),
        content_type=wanted.content_type,
        seconds=context.settings.url_seconds,
    )
    return OutputMissing(
        "the report names no output and no value, and nothing was uploaded to the job's output_url; "
        "PUT the file there and send the report again",
        output_url=put.url,
        output_headers=dict(put.headers),
    )

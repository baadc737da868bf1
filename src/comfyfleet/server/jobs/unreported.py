"""Finds the output of a worker that reports a result without naming its files.

Such a worker uploads one file to the `output_url` of its job. The control plane then reads the
file's size and type from the object store.
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


def guess_output(spec: JobSpec) -> WantedOutput:
    """Guesses the name and type of the job's output, so that the worker gets the upload URL without
    another request. Most prompts save a PNG file.
    """
    node_ids = {spec.output_node_id} if spec.output_node_id else spec.prompt.keys()
    saves = any(
        spec.prompt.get(node_id, {}).get("class_type") == "SaveImage" for node_id in node_ids
    )
    return PNG_OUTPUT if saves else DEFAULT_OUTPUT


async def with_unreported_output(
    context: JobContext, pool: Database, row: Dispatch, message: Complete
) -> Complete:
    """Returns the report. If it names no file, the file that was uploaded to the lease's output URL
    is added.

    Raises OutputMissing if there is neither a file nor a value and the workflow requires an output.
    Nothing is changed in that case, so the worker can upload the file and repeat its report.
    """
    if message.outputs:
        return message
    async with pool.read() as tx:
        has_messages = bool(message.events) or message.history is not None
        if has_messages and await store_prompts.is_prompt(tx, row.tenant_id, row.job_id):
            # A worker that reports a prompt's messages also names the files that it uploaded.
            return message
        job = await store.get(tx, row.tenant_id, row.job_id)
    # A requeued job keeps the token of its last lease. Its completion will fail with LeaseLost.
    if job is None or job.status != JobStatus.PROCESSING or job.lease_token != message.lease_token:
        return message
    output = await _find_output(context, job, message.lease_token)
    if output is not None:
        return message.model_copy(update={"outputs": (output,)})
    if message.values or not await _is_output_required(context, job):
        return message
    raise await _missing(context, job, message.lease_token)


async def _find_output(context: JobContext, job: Job, token: UUID) -> DeliveredOutput | None:
    output_slot = guess_output(job.spec)
    key = _key(job, token, output_slot)
    facts = await context.store.head(key)
    if facts is None or not facts.size:
        return None
    try:
        start = await context.store.get_start(key, SNIFF_BYTES)
    except NotFound:
        return None
    media_type = sniff_type(start) or UNKNOWN_TYPE
    return DeliveredOutput(
        name=output_slot.name,
        filename=f"output{ENDINGS.get(media_type, '')}",
        size=facts.size,
        content_type=media_type,
        node_id=job.spec.output_node_id,
    )


def _key(job: Job, token: UUID, output: WantedOutput) -> str:
    return output_key(job.tenant_id, job.id, output_folder_of(token, job.id), output.name)


async def _is_output_required(context: JobContext, job: Job) -> bool:
    if job.spec.gateway is not None:
        return False
    async with context.central.read() as tx:
        terms = await catalog.run_terms(tx, job.spec.workflow_id, job.spec.effect_id)
    return terms.output == "required"


async def _missing(context: JobContext, job: Job, token: UUID) -> OutputMissing:
    output = guess_output(job.spec)
    put = await context.store.url_to_put(
        _key(job, token, output),
        content_type=output.content_type,
        seconds=context.settings.url_seconds,
    )
    return OutputMissing(
        "the report contains no output and no value, and no file was uploaded to the job's "
        "output_url; PUT the file to that URL and send the report again",
        output_url=put.url,
        output_headers=dict(put.headers),
    )

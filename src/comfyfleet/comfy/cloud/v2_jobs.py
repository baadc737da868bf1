"""Jobs of API v2: asked for, found by our sign, and as places of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from comfyfleet.comfy.backend import OutputFile, Outputs
from comfyfleet.comfy.calls import Call, Calls, json_of
from comfyfleet.comfy.cloud.job import Job, JobOutput, parse_job
from comfyfleet.comfy.cloud.marker import is_marked
from comfyfleet.comfy.cloud.patience import ask
from comfyfleet.comfy.cloud.routes import about
from comfyfleet.comfy.events import Cancelled, End, Failed, Succeeded
from comfyfleet.comfy.places import Ended, Place, Running, Waiting
from comfyfleet.comfy.shapes import list_in, mapping_in
from comfyfleet.kernel.errors import NotOffered

JOBS_SEARCHED_MAX = 100
SETTLING_SECONDS = 0.1
JOB_ROUTE = "/jobs/{id}"
WORKFLOW_ROUTE = "/jobs/{id}/workflow"
# A node's own words for what it made, as far as v2 lets them be guessed.
KEYS = {"image": "images", "file": "files", "latent": "latents"}


async def job_of(calls: Calls, run_id: str) -> Job | None:
    call = about("GET", JOB_ROUTE, run_id)
    response = await ask(calls, call)
    if response.status_code == 404:
        return None
    with calls.reading(call.operation):
        return parse_job(json_of(call, response))


async def settled_job_of(calls: Calls, run_id: str) -> Job | None:
    """comfy-api-proxy asks for ended jobs, then for the others: one that ends meanwhile seems gone.

    So that a job has expired must be told twice.
    """
    job = await job_of(calls, run_id)
    if job is None or job.status != "expired":
        return job
    await calls.surroundings.sleep(SETTLING_SECONDS)
    return await job_of(calls, run_id)


async def jobs_of(calls: Calls, statuses: Sequence[str] = ()) -> tuple[tuple[Job, ...], bool]:
    """The newest, and whether these are all."""
    params = {"limit": str(JOBS_SEARCHED_MAX)}
    if statuses:
        params["status"] = ",".join(statuses)
    call = Call("GET", "/jobs", params=params)
    response = await ask(calls, call)
    if response.status_code in (404, 405, 501):
        raise NotOffered("this server does not list its jobs")
    with calls.reading(call.operation):
        answer = mapping_in(json_of(call, response), "a list of jobs")
        jobs = tuple(map(parse_job, list_in(answer.get("jobs"), "'jobs'")))
        return jobs, len(jobs) < JOBS_SEARCHED_MAX and not answer.get("truncated")


async def search(calls: Calls, prompt_id: str) -> tuple[Job | None, bool]:
    """The job that carries our sign, and whether all jobs could be searched."""
    jobs, is_complete = await jobs_of(calls)
    for job in jobs:
        workflow = await _workflow_of(calls, job.job_id)
        if workflow is None:
            is_complete = False
        elif is_marked(workflow, prompt_id):
            return job, True
    return None, is_complete


async def _workflow_of(calls: Calls, job_id: str) -> Mapping[str, Any] | None:
    call = about("GET", WORKFLOW_ROUTE, job_id)
    response = await ask(calls, call)
    if response.status_code == 404:
        return None
    with calls.reading(call.operation):
        return mapping_in(json_of(call, response), "the workflow of a job")


def place_of(job: Job, *, was_cancelled: bool) -> Place:
    match job.status:
        case "queued":
            return Waiting(None, job.queue_position or 0, None)
        case "running" | "canceling":
            return Running(None)
    reused = reused_nodes(job)
    return Ended(_end(job, reused, was_cancelled=was_cancelled), reused, {})


def _end(job: Job, reused: tuple[str, ...], *, was_cancelled: bool) -> End:
    match job.status:
        case "succeeded":
            return Succeeded(job.job_id, reused)
        case "canceled":
            return Cancelled(job.job_id)
        case "expired" if was_cancelled:
            # A server that forgets what it takes out of its queue says so.
            return Cancelled(job.job_id)
        case "expired":
            return Failed(job.job_id, "the server gave the job up", retryable=True)
    return _failure(job)


def _failure(job: Job) -> Failed:
    fault = job.fault
    if fault is None:
        return Failed(job.job_id, "the server says that the job failed, and no more")
    trace = tuple((fault.traceback or "").splitlines())
    message = fault.message.strip() or fault.code
    return Failed(job.job_id, message, fault.node_id, fault.class_type, fault.code, trace)


def reused_nodes(job: Job) -> tuple[str, ...]:
    """v2 tells that something was reused, not what: any output may be an old one."""
    nodes = (output.node_id for output in job.outputs) if job.is_reused else ()
    return tuple(dict.fromkeys(nodes))


def outputs_of(job: Job) -> Outputs:
    files = tuple(_file(output, job.is_reused) for output in job.outputs)
    return Outputs(files, (), reused_nodes(job))


def _file(output: JobOutput, reused: bool) -> OutputFile:
    key = KEYS.get(output.kind, output.kind)
    return OutputFile(output.node_id, key, output.name, reused=reused, reference=output.asset_id)

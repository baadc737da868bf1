"""Returns a backend's refusal of a prompt in the response to the submission.

Only the backend can run the `VALIDATE_INPUTS` function of a custom node. If a worker is idle, the
response to a prompt with custom nodes waits until the backend has accepted or refused it, as in
ComfyUI. A refused prompt doesn't appear anywhere else.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from datetime import timedelta
from time import monotonic
from typing import Any
from uuid import UUID

from comfyfleet.errors import NotFound
from comfyfleet.protocol.payloads import RefusedPrompt
from comfyfleet.protocol.validation import Prompt, fault
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.gateway.offers import OfferedNode
from comfyfleet.server.gateway.placement import PromptMatch, fitting_errors
from comfyfleet.server.gateway.policy import core_nodes
from comfyfleet.server.gateway.visible_backends import sees_backends
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.model import AWAITS_BACKEND, REFUSAL, Job, JobStatus
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.tenants.model import Caller

# Maximum seconds to wait for the backend's validation. An idle worker leases a prompt within
# milliseconds, and ComfyUI validates it in a few more. A refusal after this limit becomes an
# `execution_error`.
AWAITED_SECONDS_MAX = 2.0
# Maximum seconds to wait for a lease. If the prompt has a preferred worker, only that worker can
# get the lease during the first 0.3 seconds (`preferred_max_wait`).
LEASE_SECONDS_MAX = 1.0
# Seconds between two reads of the job if no change is reported, for example because the worker
# reports to another control plane.
LOOK_SECONDS = 0.1
# Maximum number of workers per fleet to check when looking for an idle one.
WORKERS_MAX = 500
_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][\w.@%+~-]+){2,}|\bcomfyfleet/[\w./-]+")


def is_left_to_backend(prompt: Prompt) -> bool:
    """Checks whether a prompt contains custom nodes, which may validate their inputs themselves."""
    return any(node.get("class_type") not in core_nodes() for node in prompt.values())


async def is_left_to_idle_worker(plane: ControlPlane, match: PromptMatch, prompt: Prompt) -> bool:
    """Checks whether a backend must validate the prompt and a worker of its fleets is idle."""
    if not is_left_to_backend(prompt):
        return False
    seen_since = plane.clock() - timedelta(seconds=plane.settings.offline_after_seconds)
    async with plane.central.read() as tx:
        workers = [
            worker
            for fleet in match.fleets
            for worker in await fleets.workers_of(tx, fleet, limit=WORKERS_MAX)
            if worker.takes_jobs and worker.last_seen_at >= seen_since
        ]
        leases = await dispatch.count_leases(tx, [worker.worker_id for worker in workers])
    return any(leases.get(worker.worker_id, 0) < worker.max_concurrency for worker in workers)


async def require_accepted(
    plane: ControlPlane, caller: Caller, job_id: UUID, nodes: Mapping[str, OfferedNode]
) -> None:
    """Waits until the backend has accepted the prompt or the time limit is reached. Raises
    RefusedPrompt if the backend has refused it.
    """
    started = monotonic()
    while True:
        # Starts waiting before the job is read, so that no change is missed in between.
        changed = asyncio.create_task(plane.context.notifier.changed(job_id, LOOK_SECONDS))
        try:
            job = await _get_job(plane, caller, job_id)
            if not await _is_undecided(plane, job):
                break
            is_leased = job.status != JobStatus.QUEUED
            if monotonic() - started >= (AWAITED_SECONDS_MAX if is_leased else LEASE_SECONDS_MAX):
                job = await _stop_waiting(plane, caller, job)
                break
            await changed
        finally:
            changed.cancel()
    if job.status == JobStatus.FAILED and await _is_hidden(plane, caller, job):
        raise refused(job, nodes, hides=not sees_backends(plane, caller.tenant))


async def repeat_refusal(
    plane: ControlPlane, caller: Caller, job_id: UUID, nodes: Mapping[str, OfferedNode]
) -> None:
    """Raises RefusedPrompt again if the backend refused an earlier prompt with this id."""
    try:
        job = await _get_job(plane, caller, job_id)
    except NotFound:
        return  # The prompt has the same idempotency key as a job with another id.
    is_awaited = (job.spec.gateway or {}).get(AWAITS_BACKEND)
    if is_awaited and job.status == JobStatus.FAILED and await _is_hidden(plane, caller, job):
        raise refused(job, nodes, hides=not sees_backends(plane, caller.tenant))


async def _is_undecided(plane: ControlPlane, job: Job) -> bool:
    """Checks whether the backend has neither accepted nor refused the prompt yet. The run log
    contains messages of accepted prompts.
    """
    if not job.status.is_active:
        return False
    async with plane.context.tenant(job.tenant_id) as tx:
        return not await run_log.has_messages(tx, job.tenant_id, job.id)


async def _get_job(plane: ControlPlane, caller: Caller, job_id: UUID) -> Job:
    async with plane.context.tenant(caller.tenant.id) as tx:
        return await jobs.get(tx, caller.tenant.id, job_id)


async def _stop_waiting(plane: ControlPlane, caller: Caller, job: Job) -> Job:
    async with plane.context.tenant_transaction(caller.tenant.id) as tx:
        await jobs.stop_awaiting(tx, job)
        return await jobs.get(tx, caller.tenant.id, job.id)


async def _is_hidden(plane: ControlPlane, caller: Caller, job: Job) -> bool:
    """Checks whether the prompt is hidden, which means that only the response to its submission
    reports it.
    """
    async with plane.context.tenant(caller.tenant.id) as tx:
        shown = await jobs.find_prompt(tx, caller.tenant.id, caller.user_id, job.id)
    return shown is None


def refused(job: Job, nodes: Mapping[str, OfferedNode], *, hides: bool) -> RefusedPrompt:
    """Returns the backend's refusal in ComfyUI's format, without lists of files.

    If `hides` is set, paths are removed, because the customer may not see backends.
    """
    refusal = _refusal_in(job.raw_error or "")
    error, entries = refusal.get("error"), refusal.get("node_errors")
    reported = error if isinstance(error, dict) else {}
    summary = fault(
        str(reported.get("type") or "prompt_outputs_failed_validation"),
        _shown_text(reported.get("message") or job.error_message, hides=hides),
        _shown_text(reported.get("details"), hides=hides),
    )
    prompt = job.spec.prompt or {}
    node_errors = {
        node_id: {
            **entry,
            "errors": [_shown(detail, entry, nodes, hides=hides) for detail in entry["errors"]],
        }
        for node_id, entry in (entries.items() if isinstance(entries, dict) else ())
        if node_id in prompt and isinstance(entry, dict) and _are_errors(entry.get("errors"))
    }
    return RefusedPrompt(summary, fitting_errors(node_errors))


def _refusal_in(raw_error: str) -> Mapping[str, Any]:
    """Returns the backend's response from a worker's report, or an empty dict if the report was
    truncated.
    """
    try:
        refusal = json.loads(raw_error)[REFUSAL]
    except (ValueError, TypeError, KeyError):
        return {}
    return refusal if isinstance(refusal, dict) else {}


def _are_errors(errors: object) -> bool:
    return isinstance(errors, list) and all(isinstance(error, dict) for error in errors)


def _shown(
    error: Mapping[str, Any],
    entry: Mapping[str, Any],
    nodes: Mapping[str, OfferedNode],
    *,
    hides: bool,
) -> dict[str, Any]:
    extra = error.get("extra_info")
    info: dict[str, Any] = dict(extra) if isinstance(extra, dict) else {}
    name, kind = info.get("input_name"), entry.get("class_type")
    details = _shown_text(error.get("details"), hides=hides)
    node = nodes.get(str(kind))
    if node is not None and name in node.uploads:
        # The list of allowed values is removed, because it contains the files of all users.
        info = {key: info[key] for key in ("input_name", "received_value") if key in info}
        details = str(name)
    return {
        "type": str(error.get("type", "")),
        "message": _shown_text(error.get("message"), hides=hides),
        "details": details,
        "extra_info": info,
    }


def _shown_text(text: object, *, hides: bool) -> str:
    shown = str(text or "")
    return _PATH.sub("…", shown) if hides else shown

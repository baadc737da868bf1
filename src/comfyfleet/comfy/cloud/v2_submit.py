"""Sending a prompt to API v2 exactly once: its key for repeats is refused, not answered again."""

from collections.abc import Mapping
from typing import Any

import httpx

from comfyfleet.comfy.backend import Prompt, Submitted
from comfyfleet.comfy.calls import Call, Calls
from comfyfleet.comfy.cloud.assets import with_references
from comfyfleet.comfy.cloud.complaints import Complaint, complaint_in
from comfyfleet.comfy.cloud.job import parse_job
from comfyfleet.comfy.cloud.marker import with_marker
from comfyfleet.comfy.cloud.patience import send
from comfyfleet.comfy.cloud.v2_jobs import search
from comfyfleet.comfy.refusals import refusal
from comfyfleet.comfy.shapes import parse_json
from comfyfleet.kernel.errors import (
    CreditsExhausted,
    NotOffered,
    OutcomeUnknown,
    PromptRefused,
    ServerUnavailable,
    UnexpectedAnswer,
)

# v2 refuses a submit with any other.
EXTRA_DATA_KEYS = ("api_key_comfy_org",)
REPEATED = "idempotency_key_reuse"


async def submit_prompt(
    calls: Calls, prompt: Prompt, prompt_id: str, extra_data: Mapping[str, Any]
) -> Submitted:
    call = _call(prompt, prompt_id, extra_data)
    trouble: OutcomeUnknown | UnexpectedAnswer | None = None
    for attempt in range(calls.limits.max_retries + 1):
        if attempt:
            await calls.surroundings.back_off(attempt)
        try:
            response = await send(calls, call)
        except OutcomeUnknown as error:
            # Safe to repeat: under one key the server takes one submit only.
            trouble = error
            continue
        if complaint_in(response.content).code == REPEATED:
            break
        try:
            return Submitted(_read(calls, call, response, prompt))
        except UnexpectedAnswer as error:
            trouble = error
            break
    return await _find_again(calls, prompt_id, trouble)


def _call(prompt: Prompt, prompt_id: str, extra_data: Mapping[str, Any]) -> Call:
    body: dict[str, Any] = {"workflow": with_references(with_marker(prompt, prompt_id))}
    if kept := {key: extra_data[key] for key in EXTRA_DATA_KEYS if key in extra_data}:
        body["extra_data"] = kept
    return Call("POST", "/jobs", json=body, headers={"Idempotency-Key": prompt_id})


def _read(calls: Calls, call: Call, response: httpx.Response, prompt: Prompt) -> str:
    complaint = complaint_in(response.content)
    told = complaint.message or complaint.code
    if response.status_code == 402:
        raise CreditsExhausted(f"the cloud wants to be paid first: {told}")
    if response.status_code in (400, 422) and complaint.has_envelope:
        raise _refused(complaint, prompt)
    with calls.reading(call.operation):
        if response.status_code not in (200, 201):
            raise UnexpectedAnswer(
                f"{call.operation} was answered {response.status_code}: {told}",
                status=response.status_code,
            )
        return parse_job(parse_json(response.content, "a job")).job_id


def _refused(complaint: Complaint, prompt: Prompt) -> PromptRefused:
    node_errors = complaint.details.get("node_errors") or {}
    error = {"type": complaint.code, "message": complaint.message}
    return refusal({"error": error, "node_errors": node_errors}, prompt)


async def _find_again(
    calls: Calls, prompt_id: str, error: OutcomeUnknown | UnexpectedAnswer | None
) -> Submitted:
    """It was received: by the refusal of its repeat, or as far as we know."""
    if error is not None and 400 <= int(error.details.get("status") or 0) < 500:
        raise error
    for attempt in range(1, calls.limits.max_retries + 2):
        try:
            job, _ = await search(calls, prompt_id)
        except NotOffered:
            break
        except (ServerUnavailable, UnexpectedAnswer):
            job = None
        if job is not None:
            return Submitted(job.job_id, adopted=True)
        await calls.surroundings.back_off(attempt)
    raise OutcomeUnknown(
        "the prompt was sent and not confirmed, and no job of the account carries its sign; "
        "it may still appear: adopt it later by its id",
        prompt_id=prompt_id,
    ) from error

"""Sending a prompt to a ComfyUI server exactly once, whatever becomes of the answer."""

from collections.abc import Mapping
from typing import Any

import httpx

from comfyfleet.comfy.backend import Prompt
from comfyfleet.comfy.calls import NETWORK_ERRORS, NOT_SENT, Call, Calls, checked, json_of
from comfyfleet.comfy.places import Absent, locate
from comfyfleet.comfy.refusals import refusal
from comfyfleet.comfy.shapes import mapping_in, parse_json, text_at
from comfyfleet.kernel.errors import (
    FleetError,
    OutcomeUnknown,
    PromptRefused,
    ServerUnavailable,
    UnexpectedAnswer,
)

ROUTE = "/prompt"


async def send_prompt(
    calls: Calls,
    prompt: Prompt,
    *,
    prompt_id: str,
    client_id: str,
    extra_data: Mapping[str, Any] | None,
) -> str:
    """The run's id. Raises PromptRefused (also when only part would run: see `PARTLY`)."""
    body = {"prompt": prompt, "prompt_id": prompt_id, "client_id": client_id}
    if extra_data:
        body["extra_data"] = extra_data
    # No number: two waiting prompts of one number and id kill the server's prompt thread.
    call = Call("POST", ROUTE, json=body)
    try:
        response = await _send(calls, call)
        return _read(calls, call, response, prompt)
    except (*NETWORK_ERRORS, UnexpectedAnswer) as error:
        return await _look_for(calls, call, prompt_id, error)


async def _send(calls: Calls, call: Call) -> httpx.Response:
    """Again only if it has not left: a ComfyUI runs whatever arrives, twice if it comes twice."""
    for attempt in range(calls.limits.max_retries + 1):
        if attempt:
            await calls.surroundings.back_off(attempt)
        try:
            return checked(call, await calls.once(call))
        except NOT_SENT as error:
            trouble = calls.unavailable(call, error)
    raise trouble


def _read(calls: Calls, call: Call, response: httpx.Response, prompt: Prompt) -> str:
    with calls.reading(call.operation):
        if response.status_code == 400:
            body = mapping_in(parse_json(response.content, "a refusal"), "a refusal")
            if "error" in body:
                raise refusal(body, prompt)
        answer = mapping_in(json_of(call, response), "the answer to a prompt")
        run_id = text_at(answer, "prompt_id", "the answer to a prompt")
    if answer.get("node_errors"):
        partly = refusal(answer, prompt)
        raise PromptRefused(partly.message, **partly.details, run_id=run_id)
    return run_id


async def _look_for(calls: Calls, call: Call, prompt_id: str, error: Exception) -> str:
    """Whether it was taken, after an answer that did not come or made no sense."""
    for attempt in range(1, calls.limits.max_retries + 2):
        try:
            if not isinstance(await locate(calls, prompt_id), Absent):
                return prompt_id
        except (ServerUnavailable, UnexpectedAnswer) as trouble:
            error = trouble
        await calls.surroundings.back_off(attempt)
    raise _verdict(calls, call, prompt_id, error) from error


def _verdict(calls: Calls, call: Call, prompt_id: str, error: Exception) -> FleetError:
    if isinstance(error, UnexpectedAnswer) and (error.details.get("status") or 0) >= 400:
        return error
    reason = error.message if isinstance(error, FleetError) else str(error) or type(error).__name__
    return OutcomeUnknown(
        f"the prompt was sent and not confirmed ({reason}); it was not found in queue or history. "
        "It may still arrive: adopt it by its id, or submit it under another",
        prompt_id=prompt_id,
    )

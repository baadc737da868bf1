"""Calls to the cloud, which may ask to be called later, and which may take a prompt unheard."""

import email.utils
from collections.abc import Awaitable, Callable, Mapping

import httpx

from comfyfleet.comfy.calls import NETWORK_ERRORS, NOT_SENT, Call, Calls, checked
from comfyfleet.comfy.cloud.complaints import Complaint, complaint_in
from comfyfleet.kernel.errors import CreditsExhausted, OutcomeUnknown, ServerUnavailable

# A server that asks for more is not waited for, its wish is told instead.
RETRY_AFTER_SECONDS_MAX = 60.0


async def ask(calls: Calls, call: Call) -> httpx.Response:
    """For what may be asked twice."""
    return await _patiently(calls, call, lambda: calls.ask(call))


async def send(calls: Calls, call: Call) -> httpx.Response:
    """For what must not happen twice: repeated only if it was not sent, or refused for now.

    OutcomeUnknown: it was sent, and no answer came that tells what became of it.
    """
    return await _patiently(calls, call, lambda: _send(calls, call))


async def _patiently(
    calls: Calls, call: Call, ask_now: Callable[[], Awaitable[httpx.Response]]
) -> httpx.Response:
    for _ in range(calls.limits.max_retries + 1):
        response = await ask_now()
        if response.status_code != 429:
            return response
        seconds = retry_after_seconds(response.headers)
        trouble = _put_off(call, complaint_in(response.content), seconds)
        if seconds is None or seconds > RETRY_AFTER_SECONDS_MAX:
            break
        await calls.surroundings.sleep(seconds)
    raise trouble


async def _send(calls: Calls, call: Call) -> httpx.Response:
    for attempt in range(calls.limits.max_retries + 1):
        if attempt:
            await calls.surroundings.back_off(attempt)
        try:
            response = await calls.once(call)
        except NOT_SENT as error:
            trouble = calls.unavailable(call, error)
            continue
        except NETWORK_ERRORS as error:
            raise OutcomeUnknown(f"{call.operation} was sent and got no answer") from error
        if response.status_code >= 500:
            # Something between us and the queue may say so after the queue has taken it.
            raise OutcomeUnknown(f"{call.operation} was answered {response.status_code}")
        return checked(call, response)
    raise trouble


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """How long the server asks to wait: told in seconds, or as a moment by its own clock."""
    text = headers.get("retry-after", "")
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        moment = email.utils.parsedate_to_datetime(text)
        now = email.utils.parsedate_to_datetime(headers.get("date", ""))
        return max(0.0, (moment - now).total_seconds())
    except (TypeError, ValueError):
        return None


def _put_off(
    call: Call, complaint: Complaint, seconds: float | None
) -> CreditsExhausted | ServerUnavailable:
    told = complaint.message or complaint.code or "no reason was told"
    if complaint.is_about_money:
        return CreditsExhausted(f"the cloud wants to be paid first: {told}")
    return ServerUnavailable(
        f"{call.operation} was put off: {told}",
        received_code=complaint.code,
        retry_after_seconds=seconds,
    )

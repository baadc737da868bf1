"""Builds ComfyUI's queue and history entries from gateway jobs, and calculates the prices of
prompts. This module does no I/O.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple, Protocol, TypeVar
from uuid import UUID, uuid5

from comfyfleet.api.admin import FleetPrompts
from comfyfleet.errors import InsufficientTokens
from comfyfleet.protocol.payloads import QueuedPrompt, Record, RefusedPrompt
from comfyfleet.protocol.validation import Fault, fault
from comfyfleet.server.catalog.model import PRICE_TOKENS_MAX
from comfyfleet.server.jobs.model import (
    MAX_TOKENS,
    MIN_TOKENS,
    PRICE_PER_SECOND,
    Job,
    JobSpec,
    JobStatus,
    cost_of,
    sees_in_order,
)
from comfyfleet.server.run_log.model import (
    Event,
    LoggedEvents,
    RunEnd,
    missing_events,
    record_from,
)

CLIENT_ID_CHARACTERS_MAX = 200


def job_id_of(tenant_id: UUID, user_id: UUID, prompt_id: str) -> UUID:
    """Returns the job id of a client's prompt. The same user and prompt id always produce the same
    job id."""
    return uuid5(user_id, f"{tenant_id}/{prompt_id}")


def gateway_data(job: Job) -> Mapping[str, Any]:
    """Returns the data that was stored with a gateway prompt, such as `prompt_id`, `number`,
    `client_id`, `extra_data` and `outputs`. Returns an empty mapping for other jobs.
    """
    return job.spec.gateway or {}


def prompt_id_of(job: Job) -> str:
    return str(gateway_data(job)["prompt_id"])


def client_in_order(job: Job) -> str | None:
    """Returns the id of the client that sees its prompts one after another. Returns None if this
    prompt's messages are sent immediately.
    """
    data = gateway_data(job)
    return data["client_id"] if sees_in_order(data) else None


def is_running(job: Job) -> bool:
    return job.shown_status == JobStatus.PROCESSING


def queued_prompt(job: Job) -> QueuedPrompt:
    """Returns the prompt as its client submitted it, for the queue and the history."""
    data = gateway_data(job)
    return QueuedPrompt(
        number=data["number"],
        prompt_id=data["prompt_id"],
        prompt=data.get("prompt") or job.spec.prompt,
        extra_data=data.get("extra_data") or {},
        outputs=tuple(data.get("outputs") or ()),
    )


class Numbered(Protocol):
    @property
    def number(self) -> float: ...


N = TypeVar("N", bound=Numbered)


def as_in_heap(waiting: Iterable[N]) -> list[N]:
    """Returns waiting prompts in the order of ComfyUI's queue. The queue is a heap, so only its
    first prompt is certain to be the next one.
    """
    heap: list[tuple[float, int, N]] = []
    for arrival, item in enumerate(waiting):
        heapq.heappush(heap, (item.number, arrival, item))
    return [item for _, _, item in heap]


def history_entry(job: Job, record: Mapping[str, Any]) -> Record:
    return {"prompt": queued_prompt(job).row(), **record}


def record_of_end(job: Job, messages: Sequence[Event]) -> dict[str, Any]:
    """Builds the history record of a job that ended without a report of its run."""
    at = job.completed_at or job.submitted_at
    end = RunEnd(job.status.value, job.spec.prompt, job.error_message)
    events = [*messages, *missing_events(prompt_id_of(job), end, messages, at)]
    return record_from(events, None, is_success=job.status == JobStatus.COMPLETED)


def events_in(rows: Iterable[LoggedEvents]) -> list[Event]:
    return [event for row in rows for event in row.events]


class UserdataEntry(NamedTuple):
    """The metadata of a file that an editor stores on its server."""

    path: str
    size: int
    created_at: datetime
    modified_at: datetime


class StoredUserdata(NamedTuple):
    entry: UserdataEntry
    data: bytes


# Run time in seconds to reserve for a prompt if the user hasn't run a similar one. If the balance
# allows it, at least this much is also reserved for prompts that are similar to an earlier run,
# which leaves room for a few more steps.
DEFAULT_SECONDS = 60.0
# The usual reservation for a prompt and the smallest possible one, as multiples of the longest
# similar run. The smallest one applies if the balance doesn't cover the usual one.
USUAL_MARGIN, LEAST_MARGIN = 3, 1.5
MAX_TOKENS_HEADER = "x-max-tokens"


def max_tokens_of(
    headers: Mapping[str, str], query: Mapping[str, str], extra_data: Mapping[str, Any]
) -> int | None:
    """Returns the caller's price limit from a header, the query or `extra_data`. Returns None if
    there is no limit.
    """
    value = headers.get(MAX_TOKENS_HEADER, query.get(MAX_TOKENS, extra_data.get(MAX_TOKENS)))
    if value is None:
        return None
    try:
        most = int(value) if isinstance(value, str | int) else -1
    except ValueError:
        most = -1
    if isinstance(value, bool) or not 0 <= most <= PRICE_TOKENS_MAX:
        message = f"max_tokens must be a whole number from 0 to {PRICE_TOKENS_MAX:,}"
        raise RefusedPrompt(fault("invalid_max_tokens", message, str(value)[:100]))
    return most


class PricedPrompt(NamedTuple):
    """A prompt with its usual reservation, and the smallest reservation with which it may run."""

    spec: JobSpec
    least_tokens: int

    def with_balance(self, balance: int) -> JobSpec | None:
        """Returns the prompt with the whole balance reserved. Returns None if the balance is too
        low, or if it covers the usual reservation.
        """
        if not self.least_tokens <= balance < self.spec.price_tokens:
            return None
        return replace(self.spec, price_tokens=balance)


def with_price(
    spec: JobSpec,
    terms: FleetPrompts,
    longest: float | None,
    max_tokens: int | None,
    *,
    least_price: int = 0,
) -> PricedPrompt:
    """Returns the prompt with its price. Raises RefusedPrompt if the price is above `max_tokens`.

    `longest` is the duration in seconds of the longest recent run of a similar prompt by the same
    user. `least_price` is the price of the most expensive registered workflow in the prompt.
    """
    if terms.price_per_second is not None:
        return _metered(spec, terms, longest, max_tokens, least_price)
    fixed = _fixed(spec, max(terms.price_tokens, least_price), max_tokens)
    return PricedPrompt(fixed, fixed.price_tokens)


def _metered(
    spec: JobSpec,
    terms: FleetPrompts,
    longest: float | None,
    max_tokens: int | None,
    least_price: int,
) -> PricedPrompt:
    """Returns the prompt with a price per second. The price is stored with the prompt, so a price
    change applies only to new prompts.

    A run is stopped when it has used up its reservation. Therefore, a caller's `max_tokens` is
    reserved in full. Without it, more is reserved than the run will probably need.
    """
    price = terms.price_per_second or 0.0
    least = max(cost_of(1, price), least_price)
    if max_tokens is not None and max_tokens < least:
        message = f"The prompt costs at least {least} tokens, and max_tokens is {max_tokens}"
        raise RefusedPrompt(
            fault("price_above_max_tokens", message, required_tokens=least, max_tokens=max_tokens)
        )
    most = min(cost_of(terms.run_limit_seconds, price), PRICE_TOKENS_MAX)
    if max_tokens is not None:
        most = min(most, max_tokens)
    expected, enough = DEFAULT_SECONDS, DEFAULT_SECONDS
    if longest is not None:
        expected = max(DEFAULT_SECONDS, longest * USUAL_MARGIN)
        enough = math.ceil(longest * LEAST_MARGIN)
    usual = most if max_tokens is not None else min(cost_of(expected, price), most)
    data = {PRICE_PER_SECOND: price}
    data |= {MIN_TOKENS: least_price} if least_price else {}
    data |= {} if max_tokens is None else {MAX_TOKENS: max_tokens}
    metered = replace(
        spec, price_tokens=max(usual, least), gateway={**(spec.gateway or {}), **data}
    )
    return PricedPrompt(metered, max(least, min(cost_of(enough, price), most)))


def _fixed(spec: JobSpec, price: int, max_tokens: int | None) -> JobSpec:
    if max_tokens is not None and price > max_tokens:
        message = f"The prompt costs {price} tokens, and max_tokens is {max_tokens}"
        raise RefusedPrompt(
            fault("price_above_max_tokens", message, required_tokens=price, max_tokens=max_tokens)
        )
    return replace(spec, price_tokens=price)


def shortfall(error: InsufficientTokens) -> Fault:
    """Returns the error for a user whose balance is too low for a prompt. The error contains the
    required tokens and the balance."""
    required, balance = error.details["required_tokens"], error.details["balance"]
    message = f"The prompt needs {required} tokens, and the balance is {balance}"
    return fault(error.code, message, required_tokens=required, balance=balance)

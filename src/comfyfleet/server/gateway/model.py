"""Gateway prompts as ComfyUI shows them in its queue, history and jobs, and their prices. Pure."""

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
    """Returns the job id of a client's prompt. For one user, the same prompt id always has the same
    job id.
    """
    return uuid5(user_id, f"{tenant_id}/{prompt_id}")


def gateway_data(job: Job) -> Mapping[str, Any]:
    """Returns the data that was submitted with the prompt: `prompt_id`, `number`, `client_id`,
    `extra_data`, `outputs`.
    """
    return job.asked.gateway or {}


def prompt_id_of(job: Job) -> str:
    return str(gateway_data(job)["prompt_id"])


def client_in_order(job: Job) -> str | None:
    """Returns the client that sees this prompt in order with its others, or None if it is shown at
    once.
    """
    data = gateway_data(job)
    return data["client_id"] if sees_in_order(data) else None


def is_running(job: Job) -> bool:
    return job.shown_status == JobStatus.PROCESSING


def queued_prompt(job: Job) -> QueuedPrompt:
    """Returns the complete prompt for queue and history, with the names that its client used."""
    data = gateway_data(job)
    return QueuedPrompt(
        number=data["number"],
        prompt_id=data["prompt_id"],
        prompt=data.get("prompt") or job.asked.prompt,
        extra_data=data.get("extra_data") or {},
        outputs=tuple(data.get("outputs") or ()),
    )


class Numbered(Protocol):
    @property
    def number(self) -> float: ...


N = TypeVar("N", bound=Numbered)


def as_in_heap(waiting: Iterable[N]) -> list[N]:
    """Returns prompts in ComfyUI's order: the next one first, and the others in the order of its
    heap.
    """
    heap: list[tuple[float, int, N]] = []
    for arrival, item in enumerate(waiting):
        heapq.heappush(heap, (item.number, arrival, item))
    return [item for _, _, item in heap]


def history_entry(job: Job, record: Mapping[str, Any]) -> Record:
    return {"prompt": queued_prompt(job).row(), **record}


def record_of_end(job: Job, told: Sequence[Event]) -> dict[str, Any]:
    """Builds the history record of a job that ended without a report of its run."""
    at = job.completed_at or job.submitted_at
    end = RunEnd(job.status.value, job.asked.prompt, job.error_message)
    events = [*told, *missing_events(prompt_id_of(job), end, told, at)]
    return record_from(events, None, is_success=job.status == JobStatus.COMPLETED)


def events_in(rows: Iterable[LoggedEvents]) -> list[Event]:
    return [event for row in rows for event in row.events]


class UserdataEntry(NamedTuple):
    """A file that an editor stores on its server, without its content."""

    path: str
    size: int
    created_at: datetime
    modified_at: datetime


class StoredUserdata(NamedTuple):
    entry: UserdataEntry
    data: bytes


# Seconds that are reserved for a prompt unlike any that its user has run, and the minimum for
# others if the balance allows it, so that a few more steps don't exceed the reservation.
DEFAULT_SECONDS = 60.0
# Reserved for a prompt like earlier ones, as a multiple of the longest of their runs: the usual
# reservation, and the smallest that is accepted where the balance doesn't cover the usual one.
USUAL_MARGIN, LEAST_MARGIN = 3, 1.5
MAX_TOKENS_HEADER = "x-max-tokens"


def max_tokens_of(
    headers: Mapping[str, str], query: Mapping[str, str], extra_data: Mapping[str, Any]
) -> int | None:
    """Returns the caller's maximum price, from a header, the query or `extra_data`."""
    value = headers.get(MAX_TOKENS_HEADER, query.get(MAX_TOKENS, extra_data.get(MAX_TOKENS)))
    if value is None:
        return None
    try:
        most = int(value) if isinstance(value, str | int) else -1
    except ValueError:
        most = -1
    if isinstance(value, bool) or not 0 <= most <= PRICE_TOKENS_MAX:
        says = f"max_tokens must be a whole number from 0 to {PRICE_TOKENS_MAX:,}"
        raise RefusedPrompt(fault("invalid_max_tokens", says, str(value)[:100]))
    return most


class PricedPrompt(NamedTuple):
    """A prompt with its reservation, and the smallest reservation with which it may run."""

    asked: JobSpec
    least_tokens: int

    def with_balance(self, balance: int) -> JobSpec | None:
        """Returns the prompt with all of a balance reserved; None if that isn't enough."""
        if not self.least_tokens <= balance < self.asked.price_tokens:
            return None
        return replace(self.asked, price_tokens=balance)


def with_price(
    asked: JobSpec,
    terms: FleetPrompts,
    longest: float | None,
    max_tokens: int | None,
    *,
    least_price: int = 0,
) -> PricedPrompt:
    """Returns the prompt with its price. Raises RefusedPrompt if that is above `max_tokens`.

    `longest` is the longest of the last runs of such prompts of the same user. `least_price` is the
    price of the most expensive registered workflow that the prompt contains.
    """
    if terms.price_per_second is not None:
        return _metered(asked, terms, longest, max_tokens, least_price)
    fixed = _fixed(asked, max(terms.price_tokens, least_price), max_tokens)
    return PricedPrompt(fixed, fixed.price_tokens)


def _metered(
    asked: JobSpec,
    terms: FleetPrompts,
    longest: float | None,
    max_tokens: int | None,
    least_price: int,
) -> PricedPrompt:
    """The price is stored with the prompt, so that new terms apply only to new prompts.

    The run is stopped when it has used its reservation. So a caller's `max_tokens` is reserved
    whole, and without it, more than a run is likely to take.
    """
    price = terms.price_per_second or 0.0
    least = max(cost_of(1, price), least_price)
    if max_tokens is not None and max_tokens < least:
        says = f"The prompt costs at least {least} tokens, and max_tokens is {max_tokens}"
        raise RefusedPrompt(
            fault("price_above_max_tokens", says, required_tokens=least, max_tokens=max_tokens)
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
        asked, price_tokens=max(usual, least), gateway={**(asked.gateway or {}), **data}
    )
    return PricedPrompt(metered, max(least, min(cost_of(enough, price), most)))


def _fixed(asked: JobSpec, price: int, max_tokens: int | None) -> JobSpec:
    if max_tokens is not None and price > max_tokens:
        says = f"The prompt costs {price} tokens, and max_tokens is {max_tokens}"
        raise RefusedPrompt(
            fault("price_above_max_tokens", says, required_tokens=price, max_tokens=max_tokens)
        )
    return replace(asked, price_tokens=price)


def shortfall(error: InsufficientTokens) -> Fault:
    """Returns the error of a prompt that its user can't pay, with the required tokens and the
    balance.
    """
    required, balance = error.details["required_tokens"], error.details["balance"]
    says = f"The prompt needs {required} tokens, and the balance is {balance}"
    return fault(error.code, says, required_tokens=required, balance=balance)

"""What a user's clients can look up: queue, history and jobs, as ComfyUI tells them."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from uuid import UUID

from comfyfleet.protocol.payloads import QueuedPrompt, Record
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.gateway.model import (
    as_in_heap,
    events_in,
    history_entry,
    is_running,
    job_id_of,
    prompt_id_of,
    queued_prompt,
    record_of_end,
)
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.model import Job
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.tenants.model import Caller

HISTORY_ENTRIES_MAX = 1_000
ENTRIES_KEPT_MAX = 20_000
# Clients poll ten times a second.
POLL_SECONDS = 0.5
POLLING_USERS_MAX = 200
ANSWERS_PER_USER_MAX = 8
ANSWER_BYTES_MAX = 4 * 1024 * 1024


@dataclass
class EntryCache:
    """Entries of prompts that have ended, which never change."""

    _entries: OrderedDict[UUID, Record] = field(default_factory=OrderedDict)

    def get(self, job: Job) -> Record | None:
        return self._entries.get(job.id)

    def keep(self, job: Job, entry: Record) -> Record:
        self._entries[job.id] = entry
        if len(self._entries) > ENTRIES_KEPT_MAX:
            self._entries.popitem(last=False)
        return entry


@dataclass
class PollCache:
    """Answers to a user's polls, as bytes, until something of that user changes.

    Changes in this process are told at once; those at another control plane count after `POLL_SECONDS`, or
    when a socket of the user is told of them.
    """

    _answers: OrderedDict[UUID, dict[str, tuple[float, bytes]]] = field(default_factory=OrderedDict)
    _versions: dict[UUID, int] = field(default_factory=dict)

    def forget(self, user_id: UUID) -> None:
        self._answers.pop(user_id, None)
        if user_id in self._versions:
            self._versions[user_id] += 1

    async def get(self, user_id: UUID, what: str, make: Callable[[], Awaitable[bytes]]) -> bytes:
        made_at, answer = self._answers.get(user_id, {}).get(what, (0.0, b""))
        if answer and monotonic() - made_at < POLL_SECONDS:
            return answer
        started, version = monotonic(), self._versions.setdefault(user_id, 0)
        answer = await make()
        if self._versions.get(user_id) == version:
            self._keep(user_id, what, started, answer)
        return answer

    def _keep(self, user_id: UUID, what: str, made_at: float, answer: bytes) -> None:
        kept = self._answers.setdefault(user_id, {})
        self._answers.move_to_end(user_id)
        if len(kept) < ANSWERS_PER_USER_MAX and len(answer) <= ANSWER_BYTES_MAX:
            kept[what] = made_at, answer
        while len(self._answers) > POLLING_USERS_MAX:
            user, _ = self._answers.popitem(last=False)
            self._versions.pop(user, None)


async def active_jobs(plane: ControlPlane, caller: Caller) -> list[Job]:
    async with plane.context.tenant(caller.tenant.id) as tx:
        return await jobs.active_prompts(tx, caller.tenant.id, caller.user_id)


async def queue_of(
    plane: ControlPlane, caller: Caller
) -> tuple[list[QueuedPrompt], list[QueuedPrompt]]:
    """Prompts that run, and those that wait."""
    found = await active_jobs(plane, caller)
    running = [queued_prompt(job) for job in found if is_running(job)]
    waiting = [queued_prompt(job) for job in found if not is_running(job)]
    return running, as_in_heap(waiting)


async def history_of(
    plane: ControlPlane, caller: Caller, cache: EntryCache, *, limit: int = HISTORY_ENTRIES_MAX
) -> dict[str, Record]:
    """The entries of prompts that have ended, the oldest of them first."""
    async with plane.context.tenant(caller.tenant.id) as tx:
        ended = await jobs.ended_prompts(tx, caller.tenant.id, caller.user_id, limit=limit)
        entries = await _entries(tx, caller, ended, cache)
    return {prompt_id_of(job): entries[job.id] for job in reversed(ended)}


async def find_job(plane: ControlPlane, caller: Caller, prompt_id: str) -> Job | None:
    """None: this user has no such prompt."""
    job_id = job_id_of(caller.tenant.id, caller.user_id, prompt_id)
    async with plane.context.tenant(caller.tenant.id) as tx:
        return await jobs.find_prompt(tx, caller.tenant.id, caller.user_id, job_id)


async def entry_of(plane: ControlPlane, caller: Caller, job: Job, cache: EntryCache) -> Record:
    """Of a prompt that has ended."""
    async with plane.context.tenant(caller.tenant.id) as tx:
        return (await _entries(tx, caller, [job], cache))[job.id]


async def entries_of(
    plane: ControlPlane, caller: Caller, ended: Sequence[Job], cache: EntryCache
) -> dict[UUID, Record]:
    """Of several prompts that have ended."""
    async with plane.context.tenant(caller.tenant.id) as tx:
        return await _entries(tx, caller, ended, cache)


async def _entries(
    tx: Tx, caller: Caller, ended: Sequence[Job], cache: EntryCache
) -> dict[UUID, Record]:
    found = {job.id: entry for job in ended if (entry := cache.get(job)) is not None}
    missing = [job for job in ended if job.id not in found]
    records = await run_log.records_of(tx, caller.tenant.id, [job.id for job in missing])
    for job in missing:
        lease, record = records.get(job.id, (None, {}))
        if lease != job.lease_number:
            told = await run_log.events_of_job(tx, caller.tenant.id, job.id)
            record = record_of_end(job, events_in(told))
        found[job.id] = cache.keep(job, history_entry(job, record))
    return found

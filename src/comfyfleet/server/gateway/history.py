"""Builds the responses that a user's clients poll: queue, history and jobs, in ComfyUI's format.

Clients poll up to ten times a second. Therefore, a response is cached as bytes until one of the
user's prompts changes. The rendered prompts are cached separately, so that only changed prompts are
read and rendered after a change.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic
from typing import Any, NamedTuple
from uuid import UUID

from blake3 import blake3

from comfyfleet.protocol.http import json_text
from comfyfleet.protocol.payloads import (
    JobQuery,
    Record,
    ended_job,
    pagination,
    select_jobs,
    waiting_job,
)
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.gateway.failures import redacted_record
from comfyfleet.server.gateway.model import (
    as_in_heap,
    client_in_order,
    history_entry,
    is_running,
    job_id_of,
    prompt_id_of,
    queued_prompt,
    record_of_end,
)
from comfyfleet.server.gateway.visible_backends import sees_backends
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.model import Job
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.tenants.model import Caller

HISTORY_ENTRIES_MAX = 1_000
# Maximum size of the cache in bytes, for all users together.
CACHE_BYTES_MAX = 64 * 1024 * 1024
# Responses above this size in bytes aren't cached, so that a large history leaves room for other
# users.
CACHED_ANSWER_BYTES_MAX = 16 * 1024 * 1024
# Approximate memory in bytes that Python needs for an entry in addition to its content.
OVERHEAD_BYTES = 500
# Seconds after which a response is rendered again even if no change was reported. The second value
# applies while this process can't receive changes from other control planes.
NOTIFIED_SECONDS, UNNOTIFIED_SECONDS = 5.0, 0.5
USERS_KEPT_MAX = 10_000
# Maximum size of a response in bytes, because it is stored, sent and compared in one piece. A
# larger history is sent without its oldest prompts, and a larger queue without the content of its
# last prompts.
BODY_BYTES_MAX = 4 * 1024 * 1024
# Maximum rows and bytes of a list's first page.
READ_FIRST, READ_BYTES_MAX = 20, 16 * 1024 * 1024


class PromptForm(StrEnum):
    """The format in which a prompt is rendered. A prompt's content in a given format never
    changes."""

    ROW = "row"  # An entry of the queue.
    WAITING = "pending"  # A waiting prompt in the list of jobs.
    RUNNING = "in_progress"  # A running prompt in the list of jobs.
    ENTRY = "entry"  # An entry of the history.
    ENDED = "ended"  # An ended prompt in the list of jobs.


class RenderedPrompt(NamedTuple):
    """A prompt as JSON. `job` contains the fields by which jobs are filtered and sorted."""

    prompt_id: str
    number: float
    text: bytes
    job: Mapping[str, Any]
    in_order_for: str | None = None  # The id of the client, if it sees its prompts one at a time.

    @property
    def size(self) -> int:
        # Parsed JSON needs several times as much memory as its text.
        return OVERHEAD_BYTES + len(self.text) * (4 if self.job else 1)


class PollAnswer(NamedTuple):
    body: bytes
    etag: str


class BoundedCache:
    """An LRU cache with a limit for the total size in bytes."""

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()

    @property
    def size(self) -> int:
        return self._bytes

    def get(self, key: Hashable) -> Any:
        """Returns the cached value, or None if the key isn't cached."""
        entry = self._kept.get(key)
        if entry is None:
            return None
        self._kept.move_to_end(key)
        return entry[1]

    def keep(self, key: Hashable, value: Any, size: int) -> None:
        self.drop(key)
        self._kept[key] = size, value
        self._bytes += size
        while self._bytes > self._bytes_max:
            _, (freed, _) = self._kept.popitem(last=False)
            self._bytes -= freed

    def drop(self, key: Hashable) -> None:
        size, _ = self._kept.pop(key, (0, None))
        self._bytes -= size


@dataclass
class PollCache:
    """Caches responses to polls until one of the user's prompts changes."""

    entries: BoundedCache = field(default_factory=BoundedCache)
    # Returns whether this process receives changes from other control planes.
    hears_others: Callable[[], bool] = lambda: True
    _changes: int = 0
    # The number of each user's last change, by user id.
    _changed: OrderedDict[UUID, int] = field(default_factory=OrderedDict)
    _all_changed: int = 0

    def forget(self, user_id: UUID) -> None:
        self._changes += 1
        self._changed[user_id] = self._changes
        self._changed.move_to_end(user_id)
        if len(self._changed) > USERS_KEPT_MAX:
            _, self._all_changed = self._changed.popitem(last=False)

    def forget_all(self) -> None:
        self._changes += 1
        self._all_changed = self._changes

    async def get(
        self, user_id: UUID, what: Hashable, make: Callable[[], Awaitable[bytes]]
    ) -> PollAnswer:
        key, change = (user_id, what), self._last_change(user_id)
        entry = self.entries.get(key)
        if entry is not None:
            seen, made_at, answer = entry
            limit = NOTIFIED_SECONDS if self.hears_others() else UNNOTIFIED_SECONDS
            if seen == change and monotonic() - made_at < limit:
                cached: PollAnswer = answer
                return cached
        started = monotonic()
        body = await make()
        answer = PollAnswer(body, f'"{blake3(body).hexdigest(length=16)}"')
        if len(body) <= CACHED_ANSWER_BYTES_MAX and self._last_change(user_id) == change:
            self.entries.keep(key, (change, started, answer), OVERHEAD_BYTES + len(body))
        return answer

    def _last_change(self, user_id: UUID) -> int:
        return max(self._changed.get(user_id, 0), self._all_changed)


async def started_jobs(plane: ControlPlane, caller: Caller) -> list[Job]:
    async with plane.context.tenant(caller.tenant.id) as tx:
        return await jobs.started_prompts(tx, caller.tenant.id, caller.user_id)


async def count_active(plane: ControlPlane, caller: Caller) -> int:
    async with plane.context.tenant(caller.tenant.id) as tx:
        return len(await jobs.active_prompt_ids(tx, caller.tenant.id, caller.user_id))


async def queue_body(plane: ControlPlane, caller: Caller, kept: BoundedCache) -> bytes:
    async with plane.context.tenant(caller.tenant.id) as tx:
        active = await jobs.active_prompt_ids(tx, caller.tenant.id, caller.user_id)
        rows = await _rendered(
            plane, tx, caller, [(job_id, PromptForm.ROW) for job_id, _ in active], kept
        )
        left_out = [job_id for job_id, _ in active if job_id not in rows]
        # Clients assume that prompts that aren't listed have ended, so the remaining prompts are
        # listed without their content.
        names = await jobs.prompt_names(tx, caller.tenant.id, left_out)
        rows |= {job_id: _without_content(*name) for job_id, name in names.items()}
        rows = {job_id: rows[job_id] for job_id, _ in active if job_id in rows}
        runs = {
            job_id: rows[job_id].in_order_for for job_id, runs in active if runs and job_id in rows
        }
        hidden = await _held_back(tx, caller, runs)
    running = [row for job_id, row in rows.items() if job_id in runs and job_id not in hidden]
    waiting = as_in_heap(
        row for job_id, row in rows.items() if job_id not in runs or job_id in hidden
    )
    return b'{"queue_running":%b,"queue_pending":%b}' % (_array(running), _array(waiting))


async def held_back_ids(plane: ControlPlane, caller: Caller) -> set[UUID]:
    """Returns the ids of the running prompts that their clients see as queued."""
    async with plane.context.tenant(caller.tenant.id) as tx:
        active = await jobs.active_prompt_ids(tx, caller.tenant.id, caller.user_id)
        if sum(runs for _, runs in active) < 2:
            return set()
        started = await jobs.started_prompts(tx, caller.tenant.id, caller.user_id)
        runs = {job.id: client_in_order(job) for job in started if is_running(job)}
        return await _held_back(tx, caller, runs)


async def _held_back(tx: Tx, caller: Caller, runs: Mapping[UUID, str | None]) -> set[UUID]:
    """Returns the ids of the running prompts that their clients see as queued.

    `runs` contains the running jobs in the order of submission, each with the client that sees its
    prompts one at a time. A client's socket shows the attempt that started first. As long as none
    has started, the client sees the prompt that was submitted first as running.
    """
    clients = [client_id for client_id in runs.values() if client_id is not None]
    if len(clients) == len(set(clients)):
        return set()
    attempts = await run_log.running_attempts(tx, caller.tenant.id, caller.user_id)
    started = [attempt.job_id for attempt in attempts if attempt.job_id in runs]
    shown: dict[str, UUID] = {}
    for job_id in [*started, *runs]:
        client_id = runs[job_id]
        if client_id is not None:
            shown.setdefault(client_id, job_id)
    return {
        job_id
        for job_id, client_id in runs.items()
        if client_id is not None and shown[client_id] != job_id
    }


async def history_body(
    plane: ControlPlane,
    caller: Caller,
    kept: BoundedCache,
    *,
    offset: int | None = None,
    most: int | None = None,
) -> bytes:
    """Returns the history of ended prompts, oldest first."""
    async with plane.context.tenant(caller.tenant.id) as tx:
        ended = await _ended_ids(tx, caller)
        start = -1 if offset is None else offset
        if start < 0 and most is not None:
            start = len(ended) - most
        part = ended[max(start, 0) :]
        part = part if most is None else part[: max(most, 1)]
        entries = await _rendered(
            plane, tx, caller, [(job_id, PromptForm.ENTRY) for job_id in part], kept
        )
    return _object(entries.values())


async def entry_body(
    plane: ControlPlane, caller: Caller, prompt_id: str, kept: BoundedCache
) -> bytes:
    """Returns the history entry of a prompt, or an empty object if the prompt hasn't ended."""
    job_id = job_id_of(caller.tenant.id, caller.user_id, prompt_id)
    async with plane.context.tenant(caller.tenant.id) as tx:
        if not await jobs.is_prompt_ended(tx, caller.tenant.id, caller.user_id, job_id):
            return b"{}"
        entries = await _rendered(plane, tx, caller, [(job_id, PromptForm.ENTRY)], kept)
    return _object(entries.values())


async def jobs_body(
    plane: ControlPlane, caller: Caller, query: JobQuery, kept: BoundedCache
) -> bytes:
    async with plane.context.tenant(caller.tenant.id) as tx:
        active = await jobs.active_prompt_ids(tx, caller.tenant.id, caller.user_id)
        ended = await _ended_ids(tx, caller)
        running = [(job_id, PromptForm.RUNNING) for job_id, is_running in active if is_running]
        waiting = [(job_id, PromptForm.WAITING) for job_id, is_running in active if not is_running]
        pending = await _rendered(plane, tx, caller, waiting, kept)
        forms = [*running, *((job_id, PromptForm.ENDED) for job_id in ended)]
        started = await _rendered(plane, tx, caller, forms, kept)
    in_progress = [started[job_id] for job_id, _ in running if job_id in started]
    over = [started[job_id] for job_id in ended if job_id in started]
    listed = [*in_progress, *as_in_heap(pending.values()), *over]
    page, total = select_jobs(query, listed, lambda prompt: prompt.job)
    placed = json_text(pagination(query, len(page), total)).encode()
    return b'{"jobs":%b,"pagination":%b}' % (_array(page), placed)


async def _ended_ids(tx: Tx, caller: Caller) -> list[UUID]:
    """Returns the ids of ended prompts, oldest first."""
    newest_first = await jobs.ended_prompt_ids(
        tx, caller.tenant.id, caller.user_id, limit=HISTORY_ENTRIES_MAX
    )
    return newest_first[::-1]


def _without_content(number: float, prompt_id: str) -> RenderedPrompt:
    row = json_text([number, prompt_id, {}, {}, []]).encode()
    return RenderedPrompt(prompt_id, number, row, {})


def _array(rendered: Iterable[RenderedPrompt]) -> bytes:
    return b"[" + b",".join(prompt.text for prompt in rendered) + b"]"


def _object(rendered: Iterable[RenderedPrompt]) -> bytes:
    entries = (
        b"%b:%b" % (json_text(prompt.prompt_id).encode(), prompt.text) for prompt in rendered
    )
    return b"{" + b",".join(entries) + b"}"


async def find_job(plane: ControlPlane, caller: Caller, prompt_id: str) -> Job | None:
    """Returns the prompt's job, or None if the user has no prompt with this id."""
    job_id = job_id_of(caller.tenant.id, caller.user_id, prompt_id)
    async with plane.context.tenant(caller.tenant.id) as tx:
        return await jobs.find_prompt(tx, caller.tenant.id, caller.user_id, job_id)


async def entry_of(plane: ControlPlane, caller: Caller, job: Job, kept: BoundedCache) -> Record:
    """Returns the history record of an ended prompt."""
    return (await entries_of(plane, caller, [job], kept))[job.id]


async def entries_of(
    plane: ControlPlane, caller: Caller, ended: Sequence[Job], kept: BoundedCache
) -> dict[UUID, Record]:
    """Returns the history records of several ended prompts."""
    forms = [(job.id, PromptForm.ENTRY) for job in ended]
    async with plane.context.tenant(caller.tenant.id) as tx:
        rendered = await _rendered(
            plane, tx, caller, forms, kept, known={job.id: job for job in ended}
        )
    entries: dict[UUID, Record] = {}
    for job_id, prompt in rendered.items():
        entries[job_id] = json.loads(prompt.text)
        await asyncio.sleep(0)
    return entries


async def _rendered(
    plane: ControlPlane,
    tx: Tx,
    caller: Caller,
    wanted: Sequence[tuple[UUID, PromptForm]],
    kept: BoundedCache,
    *,
    known: Mapping[UUID, Job] | None = None,
) -> dict[UUID, RenderedPrompt]:
    """Returns rendered prompts by job id, in the order of `wanted`. Reads only prompts that are not
    cached. If they don't all fit into a response, a history contains the last ones, and other lists
    contain the first ones. One is included even if it is too large.
    """
    rendered: dict[UUID, RenderedPrompt] = {}
    missing: list[tuple[UUID, PromptForm]] = []
    is_history = bool(wanted) and wanted[-1][1] is PromptForm.ENTRY
    order = wanted[::-1] if is_history else wanted
    sees = sees_backends(plane, caller.tenant)
    for key in order:
        prompt = kept.get((*key, sees))
        if prompt is None:
            missing.append(key)
        else:
            rendered[key[0]] = prompt
    free_bytes = BODY_BYTES_MAX - sum(len(prompt.text) for prompt in rendered.values())
    if missing and (free_bytes > 0 or not rendered):
        async with aclosing(_render_in_parts(tx, caller, missing, known or {}, sees)) as parts:
            async for part in parts:
                for key, prompt in part.items():
                    kept.keep((*key, sees), prompt, prompt.size)
                    rendered[key[0]] = prompt
                free_bytes -= sum(len(prompt.text) for prompt in part.values())
                if free_bytes <= 0:
                    break
    fitting = _fitting(rendered, [job_id for job_id, _ in order if job_id in rendered])
    return {job_id: rendered[job_id] for job_id, _ in wanted if job_id in fitting}


def _fitting(rendered: Mapping[UUID, RenderedPrompt], order: Sequence[UUID]) -> set[UUID]:
    """Returns the ids of the first prompts that fit into a response, with at least one id."""
    fitting: set[UUID] = set()
    size = 0
    for job_id in order:
        size += len(rendered[job_id].text)
        if fitting and size > BODY_BYTES_MAX:
            break
        fitting.add(job_id)
    return fitting


async def _render_in_parts(
    tx: Tx,
    caller: Caller,
    forms: Sequence[tuple[UUID, PromptForm]],
    known: Mapping[UUID, Job],
    sees: bool,
) -> AsyncGenerator[dict[tuple[UUID, PromptForm], RenderedPrompt], None]:
    """Renders prompts in parts, so that other tasks can run between the parts."""
    form_of = dict(forms)
    for job_id, job in known.items():
        if job_id in form_of:
            yield await _render(tx, caller, [(job, form_of[job_id])], sees)
            await asyncio.sleep(0)
    unread = [job_id for job_id, _ in forms if job_id not in known]
    async for part in jobs.get_in_parts(tx, caller.tenant.id, unread):
        yield await _render(tx, caller, [(job, form_of[job.id]) for job in part], sees)


async def _render(
    tx: Tx, caller: Caller, shown: Sequence[tuple[Job, PromptForm]], sees: bool
) -> dict[tuple[UUID, PromptForm], RenderedPrompt]:
    prompts = [(job, form) for job, form in shown if job.spec.gateway is not None]
    records = await _records(tx, caller, [job for job, form in prompts if _shows_end(form)])
    if not sees:
        records = {job_id: redacted_record(record) for job_id, record in records.items()}
    return {
        (job.id, form): _rendered_as(form, job, records.get(job.id, {})) for job, form in prompts
    }


def _shows_end(form: PromptForm) -> bool:
    return form in (PromptForm.ENTRY, PromptForm.ENDED)


async def _records(tx: Tx, caller: Caller, ended: Sequence[Job]) -> dict[UUID, Mapping[str, Any]]:
    stored = await run_log.records_of(tx, caller.tenant.id, [job.id for job in ended])
    records: dict[UUID, Mapping[str, Any]] = {}
    for job in ended:
        lease, record = stored.get(job.id, (None, {}))
        if lease != job.lease_number and job.spec.gateway is not None:
            messages = await run_log.messages_of_job(tx, caller.tenant.id, job.id)
            record = record_of_end(job, messages)
        records[job.id] = record
    return records


def _rendered_as(form: PromptForm, job: Job, record: Mapping[str, Any]) -> RenderedPrompt:
    prompt_id, shown = prompt_id_of(job), queued_prompt(job)
    listed: Mapping[str, Any] = {}
    whole: Any
    match form:
        case PromptForm.ROW:
            whole = shown.row()
        case PromptForm.ENTRY:
            whole = history_entry(job, record)
        case PromptForm.ENDED:
            whole = listed = ended_job(prompt_id, history_entry(job, record))
        case _:
            whole = listed = waiting_job(shown, form.value)
    text = json_text(whole).encode()
    return RenderedPrompt(prompt_id, shown.number, text, listed, client_in_order(job))

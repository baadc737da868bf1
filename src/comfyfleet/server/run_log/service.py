"""Logs what a run told and names the files that it made. Takes a tenant's transaction, never commits."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.api.values import DeliveredOutput
from comfyfleet.server.db import Tx
from comfyfleet.server.run_log import store
from comfyfleet.server.run_log.model import (
    COMPLETED,
    PATH_CHARACTERS_MAX,
    REMOVED,
    BackendFile,
    Event,
    LoggedEvents,
    LoggedRun,
    LogLook,
    RunEnd,
    UserFile,
    counters_used,
    delivered_files,
    events_since_start,
    file_named,
    is_ended,
    missing_events,
    path_after,
    record_from,
    with_other_files,
    with_prompt_id,
)

EVENTS_PER_READ_MAX = 200
MISSED_PER_READ_MAX = 2_000
NAMES_TRIED_MAX = 1_000
QUEUE_FOLDER = "queue"  # beside those of files: their counters are kept together
# Told once, however often a run has to begin again on another backend.
OPENING = ("execution_start", "execution_cached")


async def log_live(tx: Tx, run: LoggedRun, events: Sequence[Event], *, now: datetime) -> None:
    """Messages of a run that goes on."""
    named = [(kind, with_prompt_id(data, run.prompt_id)) for kind, data in events]
    told = await _without_repeated_opening(tx, run, named)
    if told:
        await store.add_events(tx, run, told, None, now=now)


async def log_end(
    tx: Tx,
    run: LoggedRun,
    end: RunEnd,
    events: Sequence[Event],
    *,
    outputs: Sequence[DeliveredOutput] = (),
    history: Mapping[str, Any] | None = None,
    now: datetime,
) -> None:
    """The last messages of a run, with its files under their users' names, and its record.

    Whatever the backend has not told of the end is added: clients wait for it.
    """
    names = await _name_files(tx, run, delivered_files(outputs), now=now)

    def renamed(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
        path = names.get(file_named(value))
        if path is None:
            return None
        subfolder, _, filename = path.rpartition("/")
        return {**value, "filename": filename, "subfolder": subfolder}

    named = [
        (kind, with_prompt_id(with_other_files(data, renamed), run.prompt_id))
        for kind, data in events
    ]
    told = list(await _without_repeated_opening(tx, run, named))
    heard: list[Event] = []
    if not history or not is_ended(told):
        earlier = await store.events_of_job(tx, run.tenant_id, run.job_id)
        heard = events_since_start([*(each for row in earlier for each in row.events), *told])
        missing = missing_events(run.prompt_id, end, heard, now)
        told, heard = [*told, *missing], [*heard, *missing]
    shown = with_prompt_id(with_other_files(history, renamed), run.prompt_id)
    record = record_from(heard, shown, is_success=end.status == COMPLETED)
    await store.add_events(tx, run, told, record, now=now)


async def log_removed(tx: Tx, run: LoggedRun, *, count: int, tells: int, now: datetime) -> None:
    """So many prompts that had not begun were taken back. `tells`: how often ComfyUI would tell of it."""
    await store.add_events(tx, run, [(REMOVED, {"count": count, "tells": tells})], None, now=now)


async def _without_repeated_opening(
    tx: Tx, run: LoggedRun, events: Sequence[Event]
) -> Sequence[Event]:
    begins = any(kind in OPENING for kind, _ in events)
    if run.lease_number <= 1 or not begins or not await store.was_logged(tx, run):
        return events
    return [(kind, data) for kind, data in events if kind not in OPENING]


async def _name_files(
    tx: Tx, run: LoggedRun, files: Mapping[BackendFile, str], *, now: datetime
) -> dict[BackendFile, str]:
    """The path of each as its user knows it. The same again for a report that is repeated."""
    known = {
        each.output: each.path for each in await store.files_of_job(tx, run.tenant_id, run.job_id)
    }
    missing = {file: output for file, output in files.items() if output not in known}
    ranges = counters_used(missing)
    needed = {key: each.size for key, each in ranges.items()}
    before = await store.take_numbers(tx, run.tenant_id, run.user_id, needed)
    names = {file: known[output] for file, output in files.items() if output in known}
    for file, output in missing.items():
        names[file] = await _take_name(
            tx, run, file, path_after(file, ranges, before), output, now=now
        )
    return names


async def _take_name(
    tx: Tx, run: LoggedRun, file: BackendFile, path: str, output: str, *, now: datetime
) -> str:
    stem, dot, ending = path[:PATH_CHARACTERS_MAX].rpartition(".")
    for number in range(NAMES_TRIED_MAX):
        tried = path if number == 0 else f"{stem} ({number}){dot}{ending}"
        named = UserFile(file.folder, tried, job_id=run.job_id, output=output)
        if await store.add_file(tx, run.tenant_id, run.user_id, named, now=now):
            return tried
    return path


async def take_prompt_numbers(tx: Tx, tenant_id: UUID, user_id: UUID, count: int) -> int:
    """So many numbers of a user's queue; returns the first."""
    key = QUEUE_FOLDER, "number"
    return (await store.take_numbers(tx, tenant_id, user_id, {key: count}))[key]


async def look(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    after_id: int,
    but_jobs: Collection[UUID] = (),
) -> LogLook:
    """What was told after this id, and how many prompts wait or run, but for `but_jobs`.

    Of at most `EVENTS_PER_READ_MAX` reports: who gets so many looks again.
    """
    return await store.look(
        tx,
        tenant_id,
        user_id,
        after_id=after_id,
        but_jobs=but_jobs,
        limit=EVENTS_PER_READ_MAX,
    )


async def events_of_client(
    tx: Tx, tenant_id: UUID, user_id: UUID, client_id: str, *, after_id: int, to_id: int
) -> list[LoggedEvents]:
    """The oldest first."""
    return await store.events_of_client(
        tx,
        tenant_id,
        user_id,
        client_id,
        after_id=after_id,
        to_id=to_id,
        limit=MISSED_PER_READ_MAX,
    )


async def first_id_of_client(
    tx: Tx, tenant_id: UUID, user_id: UUID, client_id: str, *, since: datetime
) -> int | None:
    """Of the oldest report for a client that is not older than this."""
    return await store.first_id_of_client(tx, tenant_id, user_id, client_id, since=since)


async def last_id(tx: Tx, tenant_id: UUID, user_id: UUID) -> int:
    return await store.last_id(tx, tenant_id, user_id)


async def events_of_job(
    tx: Tx, tenant_id: UUID, job_id: UUID, *, after_id: int = 0
) -> list[LoggedEvents]:
    return await store.events_of_job(tx, tenant_id, job_id, after_id=after_id)


async def records_of(
    tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]
) -> dict[UUID, tuple[int, Mapping[str, Any]]]:
    """The lease and the record of each job that has one."""
    return await store.records_of(tx, tenant_id, job_ids) if job_ids else {}


async def get_file(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, path: str
) -> UserFile | None:
    return await store.get_file(tx, tenant_id, user_id, folder, path)


async def files_of_jobs(
    tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]
) -> dict[UUID, list[UserFile]]:
    """The names of what each job has made."""
    found: dict[UUID, list[UserFile]] = {}
    for each in await store.files_of_jobs(tx, tenant_id, job_ids) if job_ids else ():
        if each.job_id is not None:
            found.setdefault(each.job_id, []).append(each)
    return found


async def names_of_file(tx: Tx, tenant_id: UUID, user_id: UUID, file_id: UUID) -> list[UserFile]:
    """Of an upload, by all names that its user gave it."""
    return await store.names_of_file(tx, tenant_id, user_id, file_id)


async def delete_names(tx: Tx, tenant_id: UUID, user_id: UUID, file_id: UUID) -> None:
    """Of an upload that is deleted."""
    await store.delete_names(tx, tenant_id, user_id, file_id)


async def list_files(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, *, limit: int
) -> list[UserFile]:
    return await store.list_files(tx, tenant_id, user_id, folder, limit=limit)


async def numbered_files(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, path: str, *, limit: int
) -> dict[str, tuple[UserFile, str | None]]:
    """By path, those called `a.png` or `a (1).png`, each with the hash of its content, if known."""
    found = await store.numbered_files(tx, tenant_id, user_id, folder, path, limit=limit)
    return {each.path: (each, content_hash) for each, content_hash in found}


async def has_files_under(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, subfolder: str
) -> bool:
    return await store.has_files_under(tx, tenant_id, user_id, folder, subfolder)


async def add_file(
    tx: Tx, tenant_id: UUID, user_id: UUID, file: UserFile, *, now: datetime
) -> bool:
    """False: the name is taken."""
    return await store.add_file(tx, tenant_id, user_id, file, now=now)


async def replace_file(
    tx: Tx, tenant_id: UUID, user_id: UUID, file: UserFile, *, now: datetime
) -> None:
    await store.replace_file(tx, tenant_id, user_id, file, now=now)


async def prune_live(tx: Tx, *, before: datetime, limit: int) -> int:
    return await store.prune_live(tx, before=before, limit=limit)

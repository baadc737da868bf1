"""Logs the messages of runs and names their output files. All functions use the caller's
transaction on the tenant's database and never commit.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from comfyfleet.api.sizes import is_small
from comfyfleet.server.db import Tx
from comfyfleet.server.run_log import store
from comfyfleet.server.run_log.model import (
    COMPLETED,
    NO_FILES,
    PATH_CHARACTERS_MAX,
    PICTURE,
    REMOVED,
    TEXT,
    BackendFile,
    Cursor,
    Event,
    LoggedRun,
    LoggedState,
    LogLook,
    LogPage,
    RunEnd,
    RunFiles,
    StartedAttempt,
    UserFile,
    counters_used,
    delivered_files,
    file_named,
    is_ended,
    missing_events,
    path_after,
    record_from,
    reportable_events,
    with_one_end,
    with_other_files,
    with_prompt_id,
    without_ends,
    without_repeated_start,
)
from comfyfleet.server.turns import FairThreads

T = TypeVar("T")
EVENTS_PER_READ_MAX = 200
ATTEMPTS_MAX = 10_000
NAMES_TRIED_MAX = 1_000  # maximum number of names that are tried for a file
# Reports are converted by a few threads. The limit for waiting reports is so high that none is
# refused.
AT_ONCE_MAX, WAITING_PER_TENANT_MAX = 2, 10_000
_threads = FairThreads("run log", AT_ONCE_MAX, waiting_each_max=WAITING_PER_TENANT_MAX)
# The counter for prompt numbers is stored in the same table as those for files, under this folder
# name.
QUEUE_FOLDER = "queue"


async def lock_log(tx: Tx, user_id: UUID) -> None:
    """Locks a user's log. If a transaction also locks a job's row, it must call this first."""
    await store.lock_log(tx, user_id)


async def lock_run(
    tx: Tx, tenant_id: UUID, user_id: UUID, job_id: UUID, *, report: int | None = None
) -> LoggedState | None:
    """Locks a run for a report and returns its state. Returns None if the user doesn't have this
    job.

    Must be called before the report changes anything, so that the second of two identical reports
    finds the first one.
    """
    return await store.lock_run(tx, tenant_id, user_id, job_id, report)


async def is_reported(tx: Tx, run: LoggedRun) -> bool:
    """Checks whether the report has already been logged. Takes no locks, so a negative result may
    be outdated."""
    if run.report is None:
        return False
    return await store.is_reported(tx, run.tenant_id, run.job_id, run.lease_number, run.report)


async def log_live(
    tx: Tx,
    run: LoggedRun,
    events: Sequence[Event],
    files: RunFiles = NO_FILES,
    *,
    state: LoggedState,
    now: datetime,
) -> list[UUID]:
    """Logs messages of an unfinished run, and names its new files. Returns the ids of
    replaced files.

    `state` is the result of `lock_run` for this report. The report must not have been logged
    before.
    """
    names, replaced = await _name_files(tx, run, files, now=now)
    named = await _events_for_client(events, run, names)
    logged = without_repeated_start(without_ends(named), state, run.lease_number)
    if logged or run.report is not None:
        await store.add_events(tx, run.in_attempt(state), logged, None, now=now)
    return replaced


async def _events_for_client(
    events: Iterable[Event], run: LoggedRun, names: Mapping[BackendFile, str]
) -> list[Event]:
    """Returns a run's messages with the client's file names and prompt id."""
    reported = reportable_events(events)
    converted = await _for_client([data for _, data in reported], run, names)
    return [(kind, data) for (kind, _), data in zip(reported, converted, strict=True)]


async def _for_client(value: T, run: LoggedRun, names: Mapping[BackendFile, str]) -> T:
    """Returns a JSON value with the client's file names and prompt id. Large values are converted
    in a thread.
    """
    work = partial(_converted, value, run, names)
    return work() if is_small(value) else await _threads.run(run.tenant_id, work)


def _converted(value: Any, run: LoggedRun, names: Mapping[BackendFile, str]) -> Any:
    """Returns a JSON value with the client's file names and prompt id."""

    def renamed(entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
        path = names.get(file_named(entry))
        if path is None:
            return None
        subfolder, _, filename = path.rpartition("/")
        return {**entry, "filename": filename, "subfolder": subfolder}

    return with_prompt_id(with_other_files(value, renamed) if names else value, run.prompt_id)


async def log_end(
    tx: Tx,
    run: LoggedRun,
    end: RunEnd,
    events: Sequence[Event],
    *,
    state: LoggedState,
    files: RunFiles = NO_FILES,
    history: Mapping[str, Any] | None = None,
    now: datetime,
) -> list[UUID]:
    """Logs the last messages of a run, names its new files, and stores its history record. Returns
    the ids of replaced files.

    Adds messages that the worker didn't report but clients wait for, such as the end. `state` is
    the result of `lock_run` from before the job's row was changed.
    """
    names, replaced = await _name_files(tx, run, files, now=now)
    named = await _events_for_client(events, run, names)
    logged = with_one_end(without_repeated_start(named, state, run.lease_number))
    client_history = await _for_client(history, run, names)
    all_events: list[Event] = []
    if not history or not is_ended(logged):
        all_events = [*await messages_of_job(tx, run.tenant_id, run.job_id), *logged]
        missing = missing_events(run.prompt_id, end, all_events, now, history=client_history)
        logged, all_events = [*logged, *missing], [*all_events, *missing]
    record = record_from(all_events, client_history, is_success=end.status == COMPLETED)
    await store.add_events(tx, run.in_attempt(state), logged, record, now=now)
    return replaced


async def log_removed(tx: Tx, run: LoggedRun, *, count: int, tells: int, now: datetime) -> None:
    """Logs that queued prompts were removed. `count` is the number of prompts, and `tells` is the
    number of messages that ComfyUI would send.
    """
    await store.lock_log(tx, run.user_id)
    await store.add_events(tx, run, [(REMOVED, {"count": count, "tells": tells})], None, now=now)


async def _name_files(
    tx: Tx, run: LoggedRun, delivered: RunFiles, *, now: datetime
) -> tuple[dict[BackendFile, str], list[UUID]]:
    """Names the files of a report. Returns the paths under which the user sees the files, and the
    ids of replaced files. A repeated report gets the same paths."""
    outputs, aliases, file_ids = delivered
    files = delivered_files(outputs)
    if not files:
        return {}, []
    rows = {row.output: row for row in await store.files_of_job(tx, run.tenant_id, run.job_id)}
    known = {
        output: rows[aliases.get(output, output)]
        for output in files.values()
        if aliases.get(output, output) in rows
    }
    replaced = []
    for output, row in known.items():
        new = file_ids.get(output)
        if new is not None and new != row.file_id:
            await store.set_file(tx, run.tenant_id, run.job_id, row, new)
            replaced += [row.file_id] if row.file_id else []
    missing = {file: output for file, output in files.items() if output not in known}
    ranges = counters_used(missing, after=rows.values())
    needed = {key: counters.size for key, counters in ranges.items()}
    before = await store.take_numbers(tx, run.tenant_id, run.user_id, needed)
    names = {file: known[output].path for file, output in files.items() if output in known}
    for file, output in missing.items():
        path = path_after(file, ranges, before)
        named = UserFile(file.folder, path, file_ids.get(output), run.job_id, output)
        names[file] = await _take_name(tx, run, named, now=now)
    return names, replaced


async def _take_name(tx: Tx, run: LoggedRun, file: UserFile, *, now: datetime) -> str:
    path = file.path
    stem, dot, ending = path[:PATH_CHARACTERS_MAX].rpartition(".")
    for number in range(NAMES_TRIED_MAX):
        candidate_path = path if number == 0 else f"{stem} ({number}){dot}{ending}"
        candidate = file._replace(path=candidate_path)
        if await store.add_file(tx, run.tenant_id, run.user_id, candidate, now=now):
            return candidate_path
    return path


async def take_prompt_numbers(tx: Tx, tenant_id: UUID, user_id: UUID, count: int) -> int:
    """Reserves numbers of a user's queue and returns the first one."""
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
    """Returns the messages after an id and the number of queued and running prompts. Jobs in
    `but_jobs` don't count.

    The number of messages is limited. The caller must read again while there are more.
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
) -> LogPage:
    """Returns a page of a client's rows that are sent regardless of other prompts, oldest first.
    The caller must read again while there are more."""
    return await store.events_of_client(
        tx,
        tenant_id,
        user_id,
        client_id,
        after_id=after_id,
        to_id=to_id,
        limit=EVENTS_PER_READ_MAX,
    )


async def events_in_order(
    tx: Tx, tenant_id: UUID, user_id: UUID, client_id: str, cursor: Cursor, *, to_id: int
) -> LogPage:
    """Returns a page of the rows after the cursor that must be sent to a client. Attempts come one
    after another, in the order in which they started.

    The caller must read again while there are more.
    """
    return await store.events_in_order(
        tx, tenant_id, user_id, client_id, cursor, to_id=to_id, limit=EVENTS_PER_READ_MAX
    )


async def job_of_attempt(tx: Tx, tenant_id: UUID, start_id: int) -> UUID | None:
    """Returns the job whose attempt started with this row, or None if the row was deleted."""
    return await store.job_of_attempt(tx, tenant_id, start_id)


async def is_attempt_over(tx: Tx, tenant_id: UUID, start_id: int, *, to_id: int) -> bool:
    """Checks whether an attempt has ended, been requeued or been deleted, and has no rows after
    `to_id`.
    """
    return await store.is_attempt_over(tx, tenant_id, start_id, to_id=to_id)


async def running_attempts(tx: Tx, tenant_id: UUID, user_id: UUID) -> list[StartedAttempt]:
    """Returns a user's running attempts in the order in which they started. Includes only attempts
    whose clients see their prompts run one after another.
    """
    return await store.running_attempts(tx, tenant_id, user_id, limit=ATTEMPTS_MAX)


async def first_id_of_client(
    tx: Tx, tenant_id: UUID, user_id: UUID, client_id: str, *, since: datetime
) -> int | None:
    """Returns the id of the client's first report since a given time, or None if there hasn't been
    one."""
    return await store.first_id_of_client(tx, tenant_id, user_id, client_id, since=since)


async def last_id(tx: Tx, tenant_id: UUID, user_id: UUID) -> int:
    return await store.last_id(tx, tenant_id, user_id)


async def events_of_job(tx: Tx, tenant_id: UUID, job_id: UUID, *, after_id: int = 0) -> LogPage:
    """Returns a page of a run's messages after an id. The caller must read again while there are
    more.
    """
    return await store.events_of_job(
        tx, tenant_id, job_id, after_id=after_id, limit=EVENTS_PER_READ_MAX
    )


async def messages_of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> list[Event]:
    """Returns all messages of a run except for images and text frames, which are large."""
    events: list[Event] = []
    after_id, has_more = 0, True
    while has_more:
        rows, has_more = await events_of_job(tx, tenant_id, job_id, after_id=after_id)
        events += [event for row in rows for event in row.events if event[0] not in (PICTURE, TEXT)]
        after_id = rows[-1].id if rows else after_id
    return events


async def has_messages(tx: Tx, tenant_id: UUID, job_id: UUID) -> bool:
    return bool((await store.events_of_job(tx, tenant_id, job_id, limit=1)).rows)


async def records_of(
    tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]
) -> dict[UUID, tuple[int, Mapping[str, Any]]]:
    """Returns the lease number and the history record of each job that has a record."""
    return await store.records_of(tx, tenant_id, job_ids) if job_ids else {}


async def get_file(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, path: str
) -> UserFile | None:
    return await store.get_file(tx, tenant_id, user_id, folder, path)


async def live_files_of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> list[UserFile]:
    """Returns the files that were stored during the job's run, before its result existed."""
    return [file for file in await store.files_of_job(tx, tenant_id, job_id) if file.file_id]


async def settle_outputs(
    tx: Tx, tenant_id: UUID, job_id: UUID, names: Mapping[str, str]
) -> list[UUID]:
    """Points the output names of a completed job at the outputs in its result. Removes the names of
    files that aren't part of the result.

    `names` maps the name under which an output was stored during the run to its name in the job's
    result. Returns the ids of the files that the names referred to before.
    """
    before = []
    for row in await live_files_of_job(tx, tenant_id, job_id):
        before += [row.file_id] if row.file_id else []
        if (output := names.get(row.output or "")) is not None:
            await store.settle_file(tx, tenant_id, job_id, row, output)
        else:
            await store.remove_name(tx, tenant_id, job_id, row)
    return before


async def files_of_jobs(
    tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]
) -> dict[UUID, list[UserFile]]:
    """Returns the output files of each job, with their names."""
    files_by_job: dict[UUID, list[UserFile]] = {}
    for file in await store.files_of_jobs(tx, tenant_id, job_ids) if job_ids else ():
        if file.job_id is not None:
            files_by_job.setdefault(file.job_id, []).append(file)
    return files_by_job


async def names_of_file(tx: Tx, tenant_id: UUID, user_id: UUID, file_id: UUID) -> list[UserFile]:
    """Returns all names of a user's upload."""
    return await store.names_of_file(tx, tenant_id, user_id, file_id)


async def delete_names(tx: Tx, tenant_id: UUID, user_id: UUID, file_id: UUID) -> None:
    """Deletes all names of an upload, because the upload is deleted."""
    await store.delete_names(tx, tenant_id, user_id, file_id)


async def list_files(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, *, limit: int
) -> list[UserFile]:
    return await store.list_files(tx, tenant_id, user_id, folder, limit=limit)


async def count_uploads(tx: Tx, tenant_id: UUID, user_id: UUID, *, most: int) -> int:
    """Counts uploads in all folders, including replaced ones, up to `most`."""
    return await store.count_uploads(tx, tenant_id, user_id, most=most)


async def numbered_files(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, path: str, *, limit: int
) -> dict[str, tuple[UserFile, str | None]]:
    """Returns a file and its numbered copies by path, such as `a.png` and `a (1).png`, each with
    its content hash or None if that is unknown.
    """
    files = await store.numbered_files(tx, tenant_id, user_id, folder, path, limit=limit)
    return {file.path: (file, content_hash) for file, content_hash in files}


async def has_files_under(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, subfolder: str
) -> bool:
    return await store.has_files_under(tx, tenant_id, user_id, folder, subfolder)


async def add_file(
    tx: Tx, tenant_id: UUID, user_id: UUID, file: UserFile, *, now: datetime
) -> bool:
    """Adds a file. Returns False if its name is already in use."""
    return await store.add_file(tx, tenant_id, user_id, file, now=now)


async def replace_file(
    tx: Tx, tenant_id: UUID, user_id: UUID, file: UserFile, *, now: datetime
) -> None:
    await store.replace_file(tx, tenant_id, user_id, file, now=now)


async def prune_live(tx: Tx, *, before: datetime, limit: int) -> int:
    return await store.prune_live(tx, before=before, limit=limit)

"""Logs the messages of runs and names their output files. Every function uses the caller's
transaction with the tenant's database and never commits.
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
    told_by_run,
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
NAMES_TRIED_MAX = 1_000
# Large, so that no report is refused. Reports wait for a thread instead.
AT_ONCE_MAX, WAITING_PER_TENANT_MAX = 2, 10_000
_threads = FairThreads("run log", AT_ONCE_MAX, waiting_each_max=WAITING_PER_TENANT_MAX)
# stored next to the folders of files, because their counters are in the same table
QUEUE_FOLDER = "queue"


async def lock_log(tx: Tx, user_id: UUID) -> None:
    """Locks a user's log. Must be called before a job's row is locked whose messages are logged in
    the same transaction.
    """
    await store.lock_log(tx, user_id)


async def lock_run(
    tx: Tx, tenant_id: UUID, user_id: UUID, job_id: UUID, *, report: int | None = None
) -> LoggedState | None:
    """Locks a run for a report and returns its state, or None if the user has no such job.

    Must be called before anything that the report changes, so that the second of two equal reports
    sees the first.
    """
    return await store.lock_run(tx, tenant_id, user_id, job_id, report)


async def is_reported(tx: Tx, run: LoggedRun) -> bool:
    """Whether this report was logged before. It takes no locks, so the result is only a hint that
    saves work.
    """
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
    """Logs messages of a run that continues, and the files that they name. Returns the files that
    were replaced by these.

    `state` is what `lock_run` returned for this report. The caller must not pass a report that was
    logged before.
    """
    names, replaced = await _name_files(tx, run, files, now=now)
    named = await _events_as_known(events, run, names)
    told = without_repeated_start(without_ends(named), state, run.lease_number)
    if told or run.report is not None:
        await store.add_events(tx, run.in_attempt(state), told, None, now=now)
    return replaced


async def _events_as_known(
    events: Iterable[Event], run: LoggedRun, names: Mapping[BackendFile, str]
) -> list[Event]:
    """Returns the run's messages with the names and the prompt id that the client knows."""
    told = told_by_run(events)
    known = await _as_known([data for _, data in told], run, names)
    return [(kind, data) for (kind, _), data in zip(told, known, strict=True)]


async def _as_known(value: T, run: LoggedRun, names: Mapping[BackendFile, str]) -> T:
    """Returns the value with the names and the prompt id that the client knows. Large values are
    converted in a thread.
    """
    work = partial(_converted, value, run, names)
    return work() if is_small(value) else await _threads.run(run.tenant_id, work)


def _converted(value: Any, run: LoggedRun, names: Mapping[BackendFile, str]) -> Any:
    """Returns the value with the names and the prompt id that the client knows."""

    def renamed(said: Mapping[str, Any]) -> Mapping[str, Any] | None:
        path = names.get(file_named(said))
        if path is None:
            return None
        subfolder, _, filename = path.rpartition("/")
        return {**said, "filename": filename, "subfolder": subfolder}

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
    """Logs the last messages of a run, with its files under their users' names, and its record.
    Returns the files that were replaced by these.

    Missing messages about the end are added, because clients wait for them. `state` is what
    `lock_run` returned before the job's row was changed.
    """
    names, replaced = await _name_files(tx, run, files, now=now)
    named = await _events_as_known(events, run, names)
    told = with_one_end(without_repeated_start(named, state, run.lease_number))
    shown = await _as_known(history, run, names)
    heard: list[Event] = []
    if not history or not is_ended(told):
        heard = [*await messages_of_job(tx, run.tenant_id, run.job_id), *told]
        missing = missing_events(run.prompt_id, end, heard, now, history=shown)
        told, heard = [*told, *missing], [*heard, *missing]
    record = record_from(heard, shown, is_success=end.status == COMPLETED)
    await store.add_events(tx, run.in_attempt(state), told, record, now=now)
    return replaced


async def log_removed(tx: Tx, run: LoggedRun, *, count: int, tells: int, now: datetime) -> None:
    """Logs that queued prompts were removed. `count` is their number, and `tells` is how often
    ComfyUI would report it.
    """
    await store.lock_log(tx, run.user_id)
    await store.add_events(tx, run, [(REMOVED, {"count": count, "tells": tells})], None, now=now)


async def _name_files(
    tx: Tx, run: LoggedRun, delivered: RunFiles, *, now: datetime
) -> tuple[dict[BackendFile, str], list[UUID]]:
    """Returns each file's path as its user knows it, which is the same for a repeated report, and
    the files that others have replaced.
    """
    outputs, aliases, file_ids = delivered
    files = delivered_files(outputs)
    if not files:
        return {}, []
    rows = {each.output: each for each in await store.files_of_job(tx, run.tenant_id, run.job_id)}
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
    needed = {key: each.size for key, each in ranges.items()}
    before = await store.take_numbers(tx, run.tenant_id, run.user_id, needed)
    names = {file: known[output].path for file, output in files.items() if output in known}
    for file, output in missing.items():
        path = path_after(file, ranges, before)
        named = UserFile(file.folder, path, file_ids.get(output), run.job_id, output)
        names[file] = await _take_name(tx, run, named, now=now)
    return names, replaced


async def _take_name(tx: Tx, run: LoggedRun, wanted: UserFile, *, now: datetime) -> str:
    path = wanted.path
    stem, dot, ending = path[:PATH_CHARACTERS_MAX].rpartition(".")
    for number in range(NAMES_TRIED_MAX):
        tried = path if number == 0 else f"{stem} ({number}){dot}{ending}"
        named = wanted._replace(path=tried)
        if await store.add_file(tx, run.tenant_id, run.user_id, named, now=now):
            return tried
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
    """Returns messages after this id, and the number of queued and running prompts, without the
    jobs in `but_jobs`.

    The messages are limited to some reports. The caller reads again while there are more.
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
    """Returns rows that aren't shown in order, the oldest first. A caller reads again while there are more."""
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
    """Returns rows that a client sees after this cursor: one attempt of a prompt after another, as they started.

    A caller reads again while there are more.
    """
    return await store.events_in_order(
        tx, tenant_id, user_id, client_id, cursor, to_id=to_id, limit=EVENTS_PER_READ_MAX
    )


async def job_of_attempt(tx: Tx, tenant_id: UUID, start_id: int) -> UUID | None:
    """Returns the job whose attempt started with this row; None if the row was deleted."""
    return await store.job_of_attempt(tx, tenant_id, start_id)


async def is_attempt_over(tx: Tx, tenant_id: UUID, start_id: int, *, to_id: int) -> bool:
    """Checks whether an attempt has ended, was requeued or was deleted, and has no row after `to_id`."""
    return await store.is_attempt_over(tx, tenant_id, start_id, to_id=to_id)


async def running_attempts(tx: Tx, tenant_id: UUID, user_id: UUID) -> list[StartedAttempt]:
    """Returns a user's running attempts that clients see in order, in the order in which they started."""
    return await store.running_attempts(tx, tenant_id, user_id, limit=ATTEMPTS_MAX)


async def first_id_of_client(
    tx: Tx, tenant_id: UUID, user_id: UUID, client_id: str, *, since: datetime
) -> int | None:
    """Returns the id of the oldest report for a client that is not older than `since`."""
    return await store.first_id_of_client(tx, tenant_id, user_id, client_id, since=since)


async def last_id(tx: Tx, tenant_id: UUID, user_id: UUID) -> int:
    return await store.last_id(tx, tenant_id, user_id)


async def events_of_job(tx: Tx, tenant_id: UUID, job_id: UUID, *, after_id: int = 0) -> LogPage:
    """Returns the messages of a run after an id. A caller reads again while there are more."""
    return await store.events_of_job(
        tx, tenant_id, job_id, after_id=after_id, limit=EVENTS_PER_READ_MAX
    )


async def messages_of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> list[Event]:
    """Returns all messages of a run except images and texts, which are large."""
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
    """Returns the lease number and the record of each job that has a record."""
    return await store.records_of(tx, tenant_id, job_ids) if job_ids else {}


async def get_file(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, path: str
) -> UserFile | None:
    return await store.get_file(tx, tenant_id, user_id, folder, path)


async def live_files_of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> list[UserFile]:
    """Returns the files that were stored while the job ran or before it failed."""
    return [each for each in await store.files_of_job(tx, tenant_id, job_id) if each.file_id]


async def settle_outputs(
    tx: Tx, tenant_id: UUID, job_id: UUID, names: Mapping[str, str]
) -> list[UUID]:
    """Settles the outputs of a completed job, whose result contains their files. Removes the names
    of files that are not part of the result.

    `names` maps the name under which an output was known to its name in the job's result. Returns
    the files that the names referred to.
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
    """Returns the names of each job's output files."""
    found: dict[UUID, list[UserFile]] = {}
    for each in await store.files_of_jobs(tx, tenant_id, job_ids) if job_ids else ():
        if each.job_id is not None:
            found.setdefault(each.job_id, []).append(each)
    return found


async def names_of_file(tx: Tx, tenant_id: UUID, user_id: UUID, file_id: UUID) -> list[UserFile]:
    """Returns all names that a user gave to an upload."""
    return await store.names_of_file(tx, tenant_id, user_id, file_id)


async def delete_names(tx: Tx, tenant_id: UUID, user_id: UUID, file_id: UUID) -> None:
    """Deletes the names of an upload that is deleted."""
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
    """Returns the files called `a.png` or `a (1).png` by path, each with the hash of its content if
    it is known.
    """
    found = await store.numbered_files(tx, tenant_id, user_id, folder, path, limit=limit)
    return {each.path: (each, content_hash) for each, content_hash in found}


async def has_files_under(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, subfolder: str
) -> bool:
    return await store.has_files_under(tx, tenant_id, user_id, folder, subfolder)


async def add_file(
    tx: Tx, tenant_id: UUID, user_id: UUID, file: UserFile, *, now: datetime
) -> bool:
    """Adds a file. Returns False if the name is taken."""
    return await store.add_file(tx, tenant_id, user_id, file, now=now)


async def replace_file(
    tx: Tx, tenant_id: UUID, user_id: UUID, file: UserFile, *, now: datetime
) -> None:
    await store.replace_file(tx, tenant_id, user_id, file, now=now)


async def prune_live(tx: Tx, *, before: datetime, limit: int) -> int:
    return await store.prune_live(tx, before=before, limit=limit)

"""Files of jobs: confirms uploads, and stores the outputs that workers deliver.

Both are moved to keys that no upload URL names, so that nobody can change them afterwards. Embedded prompts
and workflows are stripped from outputs unless the effect keeps them.

Of a prompt of the gateway that costs nothing, files of nodes that have ended are stored, named and told while the
run goes on. Their rows are there from then on. With the end of the job they become its result; those of a run that
failed or was cancelled stay, under the names that were told."""

import asyncio
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from blake3 import blake3

from comfyfleet.api.values import DeliveredOutput
from comfyfleet.api.worker import RunEvent
from comfyfleet.delivery import prepare_file
from comfyfleet.errors import Conflict, InvalidInput, LimitExceeded, NotFound, Refused, Unavailable
from comfyfleet.media import (
    HEADER_BYTES,
    LONG_HEADER_BYTES,
    picture_size,
    require_pixels,
)
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.jobs import store
from comfyfleet.server.jobs.ai_marks import DeliveryRules, delivery_rules
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.model import (
    Job,
    asks_for_previews,
    output_folder_of,
    sees_in_order,
    tells_results_live,
)
from comfyfleet.server.jobs.progress import ALL_CHANGED, ONLY_TOLD
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import (
    SNIFF_BYTES,
    File,
    check_claim,
    extension_of,
    kept_output_key,
    kind_of,
    output_key,
    safe_name,
    sniff_type,
    stored_key,
)
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.run_log.model import (
    PREVIEWS,
    LoggedRun,
    LoggedState,
    RunFiles,
    without_results,
)
from comfyfleet.server.storage.model import CHUNK_BYTES
from comfyfleet.server.storage.outage import system_scratch
from comfyfleet.transport.files import open_file

ANNOUNCED_SIZE = "announced_size"
# In the metadata of an output: who has delivered it.
MADE_BY = "made_by"
_RESUMED = re.compile(r"(?:\d+-)?([0-9a-f]{8})-(.+)")
# What `arrived` raises of a file that can't be used.
REFUSALS = (Conflict, InvalidInput, LimitExceeded, Refused)


async def confirm_upload(context: JobContext, pool: Database, file: File) -> File:
    """Checks an upload and moves it to its final key; a confirmed file is returned unchanged. Holds
    no transaction meanwhile.
    """
    if not file.is_announced:
        return file
    try:
        return await _take_upload(context, pool, file)
    except (NotFound, Refused):
        # Somebody else may have taken it at the same moment, and then it lies elsewhere.
        async with pool.read() as tx:
            seen = await media.get_file(tx, file.tenant_id, file.id)
        if seen.is_announced:
            raise
        return seen


async def _take_upload(context: JobContext, pool: Database, file: File) -> File:
    media_type = await _media_type(context, file)
    key = stored_key(
        file.tenant_id, file.id, context.new_id(), suffix_of(file.filename, media_type)
    )
    try:
        await context.store.copy(file.path, key, media_type)
        # Looked at where nobody can write: what lay there before may have been replaced.
        kept = await _inspect_upload(context, replace(file, path=key))
        async with pool.transaction() as tx:
            confirmed = await media.confirm_file(
                tx,
                file.tenant_id,
                file.id,
                size=kept.size or 0,
                mime_type=kept.mime_type,
                content_hash=kept.content_hash,
                path=key,
            )
    except (NotFound, *REFUSALS):
        # Of anything else nobody knows whether it was committed: the sweep of leftovers finds out.
        await context.store.delete(key)
        raise
    # Whoever was faster has a copy of their own.
    await context.store.delete(file.path if confirmed.path == key else key)
    return confirmed


def suffix_of(filename: str, media_type: str) -> str:
    """Returns the suffix by the media type; by the filename only if the file is no media."""
    stem, dot, ending = safe_name(filename).rpartition(".")
    return extension_of(media_type) or (f"{dot}{ending}" if stem else "")


# A browser or a desktop runs such a file as a program, with a right to all that its user may read.
_RUN_TYPES = frozenset(
    {"application/hta", "application/xhtml+xml", "message/rfc822", "multipart/related", "text/html"}
)
_RUN_ENDINGS = (".hta", ".htm", ".html", ".mht", ".mhtml", ".shtml", ".xhtml", ".xht")
TEXT_ENDING, TEXT_TYPE = ".txt", "text/plain"


def harmless(filename: str, media_type: str) -> tuple[str, str]:
    """Returns the name and the type of a delivered file, those of a text for one that a desktop would run."""
    kind = media_type.partition(";")[0].strip().lower()
    if kind in _RUN_TYPES or "javascript" in kind or filename.lower().endswith(_RUN_ENDINGS):
        return f"{filename}{TEXT_ENDING}", TEXT_TYPE
    return filename, media_type


def detect_media_type(claimed: str, first: bytes, *, pixels_max: int, is_operators: bool) -> str:
    """Returns the media type that the first bytes confirm. Operators may upload files that are no
    media.
    """
    start = first[:SNIFF_BYTES]
    if is_operators and kind_of(claimed) is None:
        media_type = sniff_type(start) or claimed
    else:
        media_type = check_claim(claimed, start)
    require_pixels(picture_size(media_type, first), pixels_max)
    return media_type


async def _inspect_upload(context: JobContext, file: File) -> File:
    """Reads the size, the type and, unless it is very large, the hash of the content."""
    facts = await context.store.head(file.path)
    if facts is None:
        raise _not_uploaded()
    announced = file.metadata.get(ANNOUNCED_SIZE, facts.size)
    if facts.size != announced:
        raise Refused(
            f"the file has {facts.size:,} bytes, and {announced:,} were announced", field="file_id"
        )
    return replace(
        file,
        size=facts.size,
        mime_type=await _media_type(context, file),
        content_hash=await _object_hash(context, file.path, facts.size),
    )


async def _media_type(context: JobContext, file: File) -> str:
    first = await _read_header(context, file.path, HEADER_BYTES)
    told = sniff_type(first[:SNIFF_BYTES]) or ""
    if kind_of(told) == "image" and len(first) == HEADER_BYTES and not picture_size(told, first):
        first = await _read_header(context, file.path, LONG_HEADER_BYTES)
    return detect_media_type(
        file.mime_type,
        first,
        pixels_max=context.settings.max_picture_pixels,
        is_operators=file.user_id is None,
    )


async def _read_header(context: JobContext, key: str, size: int) -> bytes:
    try:
        return await context.store.get_start(key, size)
    except NotFound:
        raise _not_uploaded() from None


def _not_uploaded() -> Refused:
    return Refused("the file was not uploaded", field="file_id")


async def _object_hash(context: JobContext, key: str, size: int) -> str | None:
    if size > context.settings.max_hashed_bytes:
        return None
    hasher = blake3()
    async for chunk in context.store.chunks(key):
        hasher.update(chunk)
    return hasher.hexdigest()


class LeaseKey(NamedTuple):
    """A job and the lease under which it is run."""

    tenant_id: UUID
    job_id: UUID
    token: UUID


@dataclass(frozen=True, slots=True)
class StoredOutput:
    """A stored output; `source` is the key to which the worker uploaded it, None if it came with the report.
    `is_known`: it was stored before."""

    source: str | None
    file: File
    is_known: bool = False
    lost_manifest: bool = False  # its C2PA manifest was removed with its prompt


async def store_outputs(
    context: JobContext, key: LeaseKey, outputs: Sequence[DeliveredOutput]
) -> list[StoredOutput]:
    """Stores the outputs of a job; each must be at its upload URL's key, in the announced size."""
    names = [output.name for output in outputs]
    if len(set(names)) < len(names):
        raise InvalidInput("two outputs have the same name", field="outputs")
    rules = await _rules_of(context, key, outputs)
    taken: list[StoredOutput] = []
    try:
        for output in outputs:
            wanted = None if output.is_stripped else rules
            taken.append(await _store_output(context, key, output, wanted))
    except BaseException:
        await discard_outputs(context, taken)
        raise
    return taken


async def discard_outputs(context: JobContext, taken: Sequence[StoredOutput]) -> None:
    """Deletes stored outputs that no row names, as the job has ended otherwise or was completed
    before.
    """
    if taken:
        await context.store.delete(*(each.file.path for each in taken))


def delete_sources(context: JobContext, taken: Sequence[StoredOutput]) -> None:
    """Deletes what the worker uploaded, once rows name the stored copies."""
    keys = [each.source for each in taken if each.source is not None]
    context.deferred.delete_objects(context.store, keys)


async def _rules_of(
    context: JobContext, key: LeaseKey, outputs: Sequence[DeliveredOutput]
) -> DeliveryRules | None:
    """Returns the rules for outputs that the worker has not prepared."""
    if all(each.is_stripped for each in outputs):
        return None
    async with context.tenant(key.tenant_id) as tx:
        job = await store.get(tx, key.tenant_id, key.job_id)
    if job is None or job.asked.gateway is not None:
        return None
    async with context.central.read() as tx:
        terms = await catalog.run_terms(tx, job.asked.workflow_id, job.asked.effect_id)
    return delivery_rules(job.asked, terms)


def name_of(output: DeliveredOutput) -> str:
    return safe_name(output.filename or output.name)


def source_key(key: LeaseKey, output: DeliveredOutput) -> str:
    folder = output_folder_of(key.token, key.job_id)
    return output_key(key.tenant_id, key.job_id, folder, output.name)


async def _store_output(
    context: JobContext, lease: LeaseKey, output: DeliveredOutput, rules: DeliveryRules | None
) -> StoredOutput:
    source = None if output.content is not None else source_key(lease, output)
    if output.size > context.settings.max_output_bytes:
        raise InvalidInput(f"output {output.name!r} is too large", field="outputs")
    file_id = context.new_id()
    filename, media_type = harmless(name_of(output), output.content_type)
    output = output.model_copy(update={"content_type": media_type})
    suffix = suffix_of(filename, media_type)
    key = kept_output_key(lease.tenant_id, lease.job_id, file_id, suffix)
    made = PreparedObject(output.size, output.content_hash, output.lost_manifest)
    if source is None:
        made = await _put_content(context, key, output, rules, made)
    elif rules is not None:
        await _require_size(context, source, output)
        made = await _copy_prepared(context, source, key, output, rules)
    else:
        await _copy(context, source, key, output)
    file = File(
        id=file_id,
        tenant_id=lease.tenant_id,
        user_id=None,
        disk=context.store.disk,
        path=key,
        filename=filename,
        mime_type=media_type,
        size=made.size,
        content_hash=made.content_hash,
        metadata={MADE_BY: _maker_of(lease, output)},
        created_at=context.clock(),
    )
    return StoredOutput(source, file, lost_manifest=made.lost_manifest)


async def _put_content(
    context: JobContext,
    key: str,
    output: DeliveredOutput,
    rules: DeliveryRules | None,
    made: "PreparedObject",
) -> "PreparedObject":
    """Stores a file that came with the report."""
    data = _content_of(output)
    if rules is not None:
        data, made = await asyncio.to_thread(_prepare_bytes, data, rules, name_of(output))
    await context.store.put(key, data, output.content_type)
    return made


def _content_of(output: DeliveredOutput) -> bytes:
    try:
        data = b64decode(output.content or "", validate=True)
    except ValueError:
        raise InvalidInput(f"output {output.name!r} is not base64", field="outputs") from None
    if len(data) != output.size:
        raise _wrong_size(output, len(data))
    return data


def _wrong_size(output: DeliveredOutput, size: int) -> InvalidInput:
    return InvalidInput(
        f"output {output.name!r} has {size} bytes, not {output.size}", field="outputs"
    )


async def _copy(context: JobContext, source: str, key: str, output: DeliveredOutput) -> None:
    try:
        if await context.store.copy(source, key, output.content_type, size=output.size):
            return
    except NotFound:
        raise _output_missing(output) from None
    await _require_size(context, source, output)
    raise Unavailable(f"output {output.name!r} was replaced while it was taken")


async def _require_size(context: JobContext, source: str, output: DeliveredOutput) -> None:
    facts = await context.store.head(source)
    if facts is None:
        raise _output_missing(output)
    if facts.size != output.size:
        raise _wrong_size(output, facts.size)


def _output_missing(output: DeliveredOutput) -> InvalidInput:
    return InvalidInput(
        f"output {output.name!r} was never uploaded: PUT it first, to the URL that came with that name",
        field="outputs",
    )


class PreparedObject(NamedTuple):
    size: int
    content_hash: str | None
    lost_manifest: bool


async def _copy_prepared(
    context: JobContext, source: str, key: str, output: DeliveredOutput, rules: DeliveryRules
) -> PreparedObject:
    if output.size <= CHUNK_BYTES:
        data = await context.store.get(source)
        data, made = await asyncio.to_thread(_prepare_bytes, data, rules, name_of(output))
        await context.store.put(key, data, output.content_type)
        return made
    with system_scratch().opened() as folder:
        path = folder / "output"
        with await open_file(path, "wb") as file:
            async for chunk in context.store.chunks(source):
                await asyncio.to_thread(file.write, chunk)
        made = await asyncio.to_thread(_prepare_path, path, rules, name_of(output))
        await context.store.put_file(key, path, output.content_type)
    return made


def _prepare_bytes(data: bytes, rules: DeliveryRules, name: str) -> tuple[bytes, PreparedObject]:
    with system_scratch().opened() as folder:
        path = folder / "output"
        path.write_bytes(data)
        made = _prepare_path(path, rules, name)
        return path.read_bytes(), made


def _prepare_path(path: Path, rules: DeliveryRules, name: str) -> PreparedObject:
    prepared = prepare_file(path, mark=rules.mark, strips=rules.strips, name=name)
    return PreparedObject(prepared.size, _path_hash(path), prepared.lost_manifest)


def _path_hash(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


@dataclass(frozen=True, slots=True)
class TakenOutputs:
    """Delivered outputs, each with its file. `aliases`: by name of an output, that of the one which was stored
    before with the same content."""

    outputs: Sequence[DeliveredOutput] = ()
    stored: Sequence[StoredOutput] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    may_be_known: bool = False  # some may have been stored before

    @property
    def new(self) -> list[StoredOutput]:
        return [each for each in self.stored if not each.is_known]

    @property
    def files(self) -> list[File]:
        return [each.file for each in self.stored]

    def named(self, *, is_result: bool = False) -> RunFiles:
        """`is_result`: the job itself says which files they are."""
        pairs = zip(self.outputs, self.stored, strict=bool(self.stored))
        file_ids = {} if is_result else {output.name: each.file.id for output, each in pairs}
        return RunFiles(self.outputs, self.aliases, file_ids)


async def take_outputs(
    context: JobContext,
    key: LeaseKey,
    outputs: Sequence[DeliveredOutput],
    known: Mapping[str, File] | None = None,
) -> TakenOutputs:
    """Stores those that are not among the known ones, which were stored while the job ran. None: there are none."""
    aliases: dict[str, str] = {}
    before = known or {}
    for each in outputs:
        if (name := _find_same(each, before, aliases, maker=_maker_of(key, each))) is not None:
            aliases[each.name] = name
    missing = [each for each in outputs if each.name not in aliases]
    new = iter(await store_outputs(context, key, missing))
    stored = [
        StoredOutput(source_key(key, each), before[aliases[each.name]], is_known=True)
        if each.name in aliases
        else next(new)
        for each in outputs
    ]
    named = [each.model_copy(update={"content": None}) for each in outputs]
    return TakenOutputs(named, stored, aliases, may_be_known=known is not None)


def _maker_of(key: LeaseKey, output: DeliveredOutput) -> str:
    """Names the lease and, if a worker was restarted under it, the process that delivers the output.

    A restarted worker puts the same eight digits before the name of each file.
    """
    folder = str(output_folder_of(key.token, key.job_id))
    match = _RESUMED.fullmatch(output.name)
    is_restarted = match is not None and match[2] == safe_name(output.filename or "")
    return f"{folder}/{match[1]}" if match and is_restarted else folder


def _find_same(
    output: DeliveredOutput, known: Mapping[str, File], aliases: Mapping[str, str], *, maker: str
) -> str | None:
    """A worker that began again gives the same file another name.

    Files that one worker delivers under several names are several files, even if their content is the same.
    """
    if output.content_hash is None:
        return None
    same = [
        name
        for name, file in known.items()
        if (file.content_hash, file.size) == (output.content_hash, output.size)
        and name not in aliases.values()
        and (name == output.name or file.metadata.get(MADE_BY) != maker)
    ]
    return output.name if output.name in same else next(iter(same), None)


async def known_outputs(tx: Tx, tenant_id: UUID, job_id: UUID) -> dict[str, File]:
    """The outputs that were stored while the job ran."""
    names = await run_log.live_files_of_job(tx, tenant_id, job_id)
    ids = {each.output: each.file_id for each in names if each.output and each.file_id}
    found = await media.find_existing(tx, tenant_id, [*ids.values()]) if ids else {}
    return {output: found[file_id] for output, file_id in ids.items() if file_id in found}


async def report_live(
    context: JobContext,
    key: LeaseKey,
    events: Sequence[RunEvent],
    outputs: Sequence[DeliveredOutput] = (),
    *,
    report: int | None = None,
) -> None:
    """Logs messages of a run that continues, with the files that they name, if its job's client wants them.

    A repeated report, which has the same number, changes nothing.
    """
    pool, taken = await context.pool_of(key.tenant_id), TakenOutputs()
    if outputs:
        async with pool.read() as tx:
            job = await store.get(tx, key.tenant_id, key.job_id)
            run = logged_run(job, key.token, report)
            if run is None or job is None or await run_log.is_reported(tx, run):
                return
            known = await known_outputs(tx, key.tenant_id, key.job_id)
        if tells_results_live(job.asked):
            taken = await take_outputs(context, key, outputs, known)
    try:
        async with pool.transaction() as tx:
            logged, replaced = await _log(tx, context, key, events, taken, report)
    except (NotFound, *REFUSALS):
        await discard_outputs(context, taken.new)
        raise
    used = {each.file.id for each in logged.taken.new} if logged else set()
    await discard_outputs(context, [each for each in taken.new if each.file.id not in used])
    if logged is None:
        return
    run = logged.run
    delete_sources(context, taken.stored)
    context.deferred.delete_objects(context.store, [each.path for each in replaced])
    # The queue shows the prompt that has started.
    is_start = run.start_id == 0
    context.notifier.tell_user(run.user_id, ALL_CHANGED if is_start else ONLY_TOLD)


class LoggedReport(NamedTuple):
    run: LoggedRun
    taken: TakenOutputs


async def _log(
    tx: Tx,
    context: JobContext,
    key: LeaseKey,
    events: Sequence[RunEvent],
    taken: TakenOutputs,
    report: int | None,
) -> tuple[LoggedReport | None, list[File]]:
    """Returns the report, if its lease is held and it is new, and files that were replaced."""
    job = await store.get(tx, key.tenant_id, key.job_id)
    run = logged_run(job, key.token, report)
    if run is None or job is None:
        return None, []
    state = await lock_run(tx, run, key.token)
    if state is None or state.is_reported:
        return None, []
    if not tells_results_live(job.asked):
        events = without_results(events)
    taken = await _with_current_files(tx, key, taken)
    if asks_for_previews(job.asked) and any(kind == "execution_start" for kind, _ in events):
        events = [*events, (PREVIEWS, {})]
    await add_files(tx, job, taken)
    old_ids = await run_log.log_live(
        tx, run, events, taken.named(), state=state, now=context.clock()
    )
    logged = LoggedReport(run.in_attempt(state), taken)
    return logged, await remove_files(tx, key.tenant_id, old_ids)


async def _with_current_files(tx: Tx, key: LeaseKey, taken: TakenOutputs) -> TakenOutputs:
    """Returns the outputs with the files that are stored for them now, under the lock of the run.

    The same report may have been logged between the look without the lock and now. Its file stays: others may
    have been told of it already.
    """
    if not taken.outputs:
        return taken
    known = await known_outputs(tx, key.tenant_id, key.job_id)
    aliases: dict[str, str] = {}
    stored: list[StoredOutput] = []
    for output, one in zip(taken.outputs, taken.stored, strict=True):
        name = _find_same(output, known, aliases, maker=_maker_of(key, output))
        if name is not None:
            aliases[output.name] = name
            stored.append(StoredOutput(one.source, known[name], is_known=True))
        elif one.is_known:
            raise Unavailable(f"output {output.name!r} was replaced while it was taken")
        else:
            stored.append(one)
    return TakenOutputs(taken.outputs, stored, aliases, taken.may_be_known)


async def add_files(tx: Tx, job: Job, taken: TakenOutputs) -> None:
    for each in taken.new:
        await media.add_file(tx, replace(each.file, user_id=job.asked.user_id))


async def remove_files(tx: Tx, tenant_id: UUID, file_ids: Sequence[UUID]) -> list[File]:
    """Rows of files that others have replaced; the caller deletes the objects after the commit."""
    found = await media.find_existing(tx, tenant_id, file_ids) if file_ids else {}
    return [await media.delete_file(tx, tenant_id, each) for each in found]


async def settle(tx: Tx, job: Job, taken: TakenOutputs) -> list[File]:
    """The job is completed, and names its outputs by itself. Returns files of runs before that it did not make."""
    if not taken.may_be_known:
        return []
    names = {taken.aliases.get(each.name, each.name): each.name for each in taken.outputs}
    before = await run_log.settle_outputs(tx, job.tenant_id, job.id, names)
    kept = {each.id for each in taken.files}
    return await remove_files(tx, job.tenant_id, [each for each in before if each not in kept])


async def lock_run(tx: Tx, run: LoggedRun, token: UUID) -> LoggedState | None:
    """Locks the run for a report of this lease; None if the lease is no longer held.

    Two equal reports may arrive at once. Whichever comes second waits here, and then sees the first.
    """
    state = await run_log.lock_run(tx, run.tenant_id, run.user_id, run.job_id, report=run.report)
    return state if state is not None and state.holds(token) else None


def logged_run(job: Job | None, token: UUID, report: int | None = None) -> LoggedRun | None:
    """Returns the run to log; None if no client follows the job, or another lease holds it."""
    if job is None or job.asked.gateway is None or job.asked.user_id is None:
        return None
    if job.lease_token != token or not job.status.is_active:
        return None
    data: Mapping[str, Any] = job.asked.gateway
    return LoggedRun(
        job.tenant_id,
        job.asked.user_id,
        job.id,
        job.lease_number,
        data.get("client_id"),
        data["prompt_id"],
        report,
        0 if sees_in_order(data) else None,
    )

"""Confirms uploaded input files, and stores the outputs that workers deliver.

Both are moved to keys for which no upload URL exists, so that they can't be changed afterwards.
Embedded prompts and workflows are removed from outputs unless the effect keeps them.

For a gateway prompt without a price, the files of finished nodes are stored and reported to the
client during the run. When the job completes, they become its result. The files of a failed or
cancelled run are kept under the names that were reported to the client.
"""

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
from comfyfleet.server.jobs.progress import ALL_CHANGED, ONLY_MESSAGES
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
# Key in an output's metadata that names the lease that delivered it.
MADE_BY = "made_by"
_RESUMED = re.compile(r"(?:\d+-)?([0-9a-f]{8})-(.+)")
# Errors that mean that a file can't be used.
REFUSALS = (Conflict, InvalidInput, LimitExceeded, Refused)


async def confirm_upload(context: JobContext, pool: Database, file: File) -> File:
    """Checks an upload and moves it to its final key. Returns a confirmed file unchanged. No
    transaction is open while the file is checked and copied.
    """
    if not file.is_announced:
        return file
    try:
        return await _take_upload(context, pool, file)
    except (NotFound, Refused):
        # Another request may have moved the file at the same moment.
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
        # The copy is inspected, because the upload at the old key may have been replaced.
        inspected = await _inspect_upload(context, replace(file, path=key))
        async with pool.transaction() as tx:
            confirmed = await media.confirm_file(
                tx,
                file.tenant_id,
                file.id,
                size=inspected.size or 0,
                mime_type=inspected.mime_type,
                content_hash=inspected.content_hash,
                path=key,
            )
    except (NotFound, *REFUSALS):
        # After any other error, it is unknown whether the row was committed. In that case, the
        # sweep of leftover files deletes the copy if no row refers to it.
        await context.store.delete(key)
        raise
    # Delete the upload, or this copy if a concurrent request has already confirmed the file with
    # its own copy.
    await context.store.delete(file.path if confirmed.path == key else key)
    return confirmed


def suffix_of(filename: str, media_type: str) -> str:
    """Returns the suffix for the media type, or the filename's suffix if the file isn't media."""
    stem, dot, ending = safe_name(filename).rpartition(".")
    return extension_of(media_type) or (f"{dot}{ending}" if stem else "")


# Browsers and desktops execute files of these types, with access to everything that the user can
# read.
_RUN_TYPES = frozenset(
    {"application/hta", "application/xhtml+xml", "message/rfc822", "multipart/related", "text/html"}
)
_RUN_ENDINGS = (".hta", ".htm", ".html", ".mht", ".mhtml", ".shtml", ".xhtml", ".xht")
TEXT_ENDING, TEXT_TYPE = ".txt", "text/plain"


def harmless(filename: str, media_type: str) -> tuple[str, str]:
    """Returns the name and media type under which a file is delivered. A file that a browser or
    desktop would execute is delivered as text.
    """
    kind = media_type.partition(";")[0].strip().lower()
    if kind in _RUN_TYPES or "javascript" in kind or filename.lower().endswith(_RUN_ENDINGS):
        return f"{filename}{TEXT_ENDING}", TEXT_TYPE
    return filename, media_type


def detect_media_type(claimed: str, first: bytes, *, pixels_max: int, is_operators: bool) -> str:
    """Returns the media type, which must match the first bytes of the file. Operators may also
    upload files that aren't media.
    """
    start = first[:SNIFF_BYTES]
    if is_operators and kind_of(claimed) is None:
        media_type = sniff_type(start) or claimed
    else:
        media_type = check_claim(claimed, start)
    require_pixels(picture_size(media_type, first), pixels_max)
    return media_type


async def _inspect_upload(context: JobContext, file: File) -> File:
    """Reads the size, the type and the content hash of an upload. Very large files aren't
    hashed.
    """
    facts = await context.store.head(file.path)
    if facts is None:
        raise _not_uploaded()
    announced = file.metadata.get(ANNOUNCED_SIZE, facts.size)
    if facts.size != announced:
        raise Refused(
            f"the file has {facts.size:,} bytes, but {announced:,} were announced", field="file_id"
        )
    return replace(
        file,
        size=facts.size,
        mime_type=await _media_type(context, file),
        content_hash=await _object_hash(context, file.path, facts.size),
    )


async def _media_type(context: JobContext, file: File) -> str:
    first = await _read_header(context, file.path, HEADER_BYTES)
    sniffed = sniff_type(first[:SNIFF_BYTES]) or ""
    if (
        kind_of(sniffed) == "image"
        and len(first) == HEADER_BYTES
        and not picture_size(sniffed, first)
    ):
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
    """A job and the lease under which it runs."""

    tenant_id: UUID
    job_id: UUID
    token: UUID


@dataclass(frozen=True, slots=True)
class StoredOutput:
    """A stored output. `source` is the key of the worker's upload, or None if the report contained
    the file. `is_known` means that the output had already been stored.
    """

    source: str | None
    file: File
    is_known: bool = False
    lost_manifest: bool = False  # whether the C2PA manifest was removed with the embedded prompt


async def store_outputs(
    context: JobContext, key: LeaseKey, outputs: Sequence[DeliveredOutput]
) -> list[StoredOutput]:
    """Stores the outputs of a job. Each output must have the announced size, and must have been
    uploaded to its URL unless the report contains it.
    """
    names = [output.name for output in outputs]
    if len(set(names)) < len(names):
        raise InvalidInput("two outputs have the same name", field="outputs")
    rules = await _rules_of(context, key, outputs)
    stored: list[StoredOutput] = []
    try:
        for output in outputs:
            output_rules = None if output.is_stripped else rules
            stored.append(await _store_output(context, key, output, output_rules))
    except BaseException:
        await discard_outputs(context, stored)
        raise
    return stored


async def discard_outputs(context: JobContext, outputs: Sequence[StoredOutput]) -> None:
    """Deletes stored outputs that no row refers to, because the job had already completed or
    ended.
    """
    if outputs:
        await context.store.delete(*(output.file.path for output in outputs))


def delete_sources(context: JobContext, outputs: Sequence[StoredOutput]) -> None:
    """Deletes the worker's uploads. Must be called after rows refer to the stored copies."""
    keys = [output.source for output in outputs if output.source is not None]
    context.deferred.delete_objects(context.store, keys)


async def _rules_of(
    context: JobContext, key: LeaseKey, outputs: Sequence[DeliveredOutput]
) -> DeliveryRules | None:
    """Returns the delivery rules for outputs, or None if no output needs to be changed. Outputs
    that the worker has already stripped need no rules.
    """
    if all(output.is_stripped for output in outputs):
        return None
    async with context.tenant(key.tenant_id) as tx:
        job = await store.get(tx, key.tenant_id, key.job_id)
    if job is None or job.spec.gateway is not None:
        return None
    async with context.central.read() as tx:
        terms = await catalog.run_terms(tx, job.spec.workflow_id, job.spec.effect_id)
    return delivery_rules(job.spec, terms)


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
    prepared = PreparedObject(output.size, output.content_hash, output.lost_manifest)
    if source is None:
        prepared = await _put_content(context, key, output, rules, prepared)
    elif rules is not None:
        await _require_size(context, source, output)
        prepared = await _copy_prepared(context, source, key, output, rules)
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
        size=prepared.size,
        content_hash=prepared.content_hash,
        metadata={MADE_BY: _maker_of(lease, output)},
        created_at=context.clock(),
    )
    return StoredOutput(source, file, lost_manifest=prepared.lost_manifest)


async def _put_content(
    context: JobContext,
    key: str,
    output: DeliveredOutput,
    rules: DeliveryRules | None,
    prepared: "PreparedObject",
) -> "PreparedObject":
    """Stores a file that was sent inside the report."""
    data = _content_of(output)
    if rules is not None:
        data, prepared = await asyncio.to_thread(_prepare_bytes, data, rules, name_of(output))
    await context.store.put(key, data, output.content_type)
    return prepared


def _content_of(output: DeliveredOutput) -> bytes:
    try:
        data = b64decode(output.content or "", validate=True)
    except ValueError:
        raise InvalidInput(
            f"the content of output {output.name!r} is not valid base64", field="outputs"
        ) from None
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
    raise Unavailable(f"output {output.name!r} was replaced while it was being stored")


async def _require_size(context: JobContext, source: str, output: DeliveredOutput) -> None:
    facts = await context.store.head(source)
    if facts is None:
        raise _output_missing(output)
    if facts.size != output.size:
        raise _wrong_size(output, facts.size)


def _output_missing(output: DeliveredOutput) -> InvalidInput:
    return InvalidInput(
        f"output {output.name!r} was not uploaded. PUT the file to that output's URL first.",
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
        data, prepared = await asyncio.to_thread(_prepare_bytes, data, rules, name_of(output))
        await context.store.put(key, data, output.content_type)
        return prepared
    with system_scratch().opened() as folder:
        path = folder / "output"
        with await open_file(path, "wb") as file:
            async for chunk in context.store.chunks(source):
                await asyncio.to_thread(file.write, chunk)
        prepared = await asyncio.to_thread(_prepare_path, path, rules, name_of(output))
        await context.store.put_file(key, path, output.content_type)
    return prepared


def _prepare_bytes(data: bytes, rules: DeliveryRules, name: str) -> tuple[bytes, PreparedObject]:
    with system_scratch().opened() as folder:
        path = folder / "output"
        path.write_bytes(data)
        prepared = _prepare_path(path, rules, name)
        return path.read_bytes(), prepared


def _prepare_path(path: Path, rules: DeliveryRules, name: str) -> PreparedObject:
    prepared = prepare_file(path, mark=rules.mark, strips=rules.strips, name=name)
    return PreparedObject(prepared.size, _path_hash(path), prepared.lost_manifest)


def _path_hash(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


@dataclass(frozen=True, slots=True)
class TakenOutputs:
    """Delivered outputs and their files. `aliases` maps an output's name to the name under which
    the same file was stored earlier.
    """

    outputs: Sequence[DeliveredOutput] = ()
    stored: Sequence[StoredOutput] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    may_be_known: bool = False  # whether some outputs may have been stored during the run

    @property
    def new(self) -> list[StoredOutput]:
        return [output for output in self.stored if not output.is_known]

    @property
    def files(self) -> list[File]:
        return [output.file for output in self.stored]

    def named(self, *, is_result: bool = False) -> RunFiles:
        """Returns the outputs in the form that the run log needs. With `is_result`, the file ids
        are left out, because the job's result contains them.
        """
        pairs = zip(self.outputs, self.stored, strict=bool(self.stored))
        file_ids = (
            {}
            if is_result
            else {output.name: stored_output.file.id for output, stored_output in pairs}
        )
        return RunFiles(self.outputs, self.aliases, file_ids)


async def take_outputs(
    context: JobContext,
    key: LeaseKey,
    outputs: Sequence[DeliveredOutput],
    known: Mapping[str, File] | None = None,
) -> TakenOutputs:
    """Stores the outputs, except for those in `known`, which were already stored during the run. If
    `known` is None, nothing was stored during the run.
    """
    aliases: dict[str, str] = {}
    before = known or {}
    for output in outputs:
        if (name := _find_same(output, before, aliases, maker=_maker_of(key, output))) is not None:
            aliases[output.name] = name
    missing = [output for output in outputs if output.name not in aliases]
    new = iter(await store_outputs(context, key, missing))
    stored = [
        StoredOutput(source_key(key, output), before[aliases[output.name]], is_known=True)
        if output.name in aliases
        else next(new)
        for output in outputs
    ]
    named = [output.model_copy(update={"content": None}) for output in outputs]
    return TakenOutputs(named, stored, aliases, may_be_known=known is not None)


def _maker_of(key: LeaseKey, output: DeliveredOutput) -> str:
    """Returns an id for the lease. If the worker was restarted during the lease, the id also
    identifies the process that delivers the output.

    A restarted worker adds the same eight hexadecimal digits to the start of all its output names.
    """
    folder = str(output_folder_of(key.token, key.job_id))
    match = _RESUMED.fullmatch(output.name)
    is_restarted = match is not None and match[2] == safe_name(output.filename or "")
    return f"{folder}/{match[1]}" if match and is_restarted else folder


def _find_same(
    output: DeliveredOutput, known: Mapping[str, File], aliases: Mapping[str, str], *, maker: str
) -> str | None:
    """Returns the name under which the same file was stored earlier, or None if it wasn't stored.

    A restarted worker delivers the same file again under another name. However, files that one
    worker process delivers under several names are separate files, even if they have the same
    content.
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
    """Returns the outputs that were stored during the job's run, by name."""
    names = await run_log.live_files_of_job(tx, tenant_id, job_id)
    ids = {name.output: name.file_id for name in names if name.output and name.file_id}
    files_by_id = await media.find_existing(tx, tenant_id, [*ids.values()]) if ids else {}
    return {
        output: files_by_id[file_id] for output, file_id in ids.items() if file_id in files_by_id
    }


async def report_live(
    context: JobContext,
    key: LeaseKey,
    events: Sequence[RunEvent],
    outputs: Sequence[DeliveredOutput] = (),
    *,
    report: int | None = None,
) -> None:
    """Logs the messages of a run that is still in progress. If the job's client sees results during
    the run, also stores the files that the messages mention.

    A repeated report has the same number as the first one, and changes nothing.
    """
    pool, delivered = await context.pool_of(key.tenant_id), TakenOutputs()
    if outputs:
        async with pool.read() as tx:
            job = await store.get(tx, key.tenant_id, key.job_id)
            run = logged_run(job, key.token, report)
            if run is None or job is None or await run_log.is_reported(tx, run):
                return
            known = await known_outputs(tx, key.tenant_id, key.job_id)
        if tells_results_live(job.spec):
            delivered = await take_outputs(context, key, outputs, known)
    try:
        async with pool.transaction() as tx:
            logged, replaced = await _log(tx, context, key, events, delivered, report)
    except (NotFound, *REFUSALS):
        await discard_outputs(context, delivered.new)
        raise
    used = {output.file.id for output in logged.outputs.new} if logged else set()
    await discard_outputs(
        context, [output for output in delivered.new if output.file.id not in used]
    )
    if logged is None:
        return
    run = logged.run
    delete_sources(context, delivered.stored)
    context.deferred.delete_objects(context.store, [output.path for output in replaced])
    # The first report of a run also changes the queue that clients see: the prompt is now running.
    is_start = run.start_id == 0
    context.notifier.tell_user(run.user_id, ALL_CHANGED if is_start else ONLY_MESSAGES)


class LoggedReport(NamedTuple):
    run: LoggedRun
    outputs: TakenOutputs


async def _log(
    tx: Tx,
    context: JobContext,
    key: LeaseKey,
    events: Sequence[RunEvent],
    delivered: TakenOutputs,
    report: int | None,
) -> tuple[LoggedReport | None, list[File]]:
    """Logs the report if its lease is still held and the report is new. Returns the logged report,
    or None, and the files that it replaced.
    """
    job = await store.get(tx, key.tenant_id, key.job_id)
    run = logged_run(job, key.token, report)
    if run is None or job is None:
        return None, []
    state = await lock_run(tx, run, key.token)
    if state is None or state.is_reported:
        return None, []
    if not tells_results_live(job.spec):
        events = without_results(events)
    delivered = await _with_current_files(tx, key, delivered)
    if asks_for_previews(job.spec) and any(kind == "execution_start" for kind, _ in events):
        events = [*events, (PREVIEWS, {})]
    await add_files(tx, job, delivered)
    old_ids = await run_log.log_live(
        tx, run, events, delivered.named(), state=state, now=context.clock()
    )
    logged = LoggedReport(run.in_attempt(state), delivered)
    return logged, await remove_files(tx, key.tenant_id, old_ids)


async def _with_current_files(tx: Tx, key: LeaseKey, delivered: TakenOutputs) -> TakenOutputs:
    """Returns the outputs with their stored files, which are read again while the run is locked.

    The same report may have been logged since the earlier check, which didn't lock the run. Its
    files are used, because clients may already know them.
    """
    if not delivered.outputs:
        return delivered
    known = await known_outputs(tx, key.tenant_id, key.job_id)
    aliases: dict[str, str] = {}
    stored: list[StoredOutput] = []
    for output, stored_output in zip(delivered.outputs, delivered.stored, strict=True):
        name = _find_same(output, known, aliases, maker=_maker_of(key, output))
        if name is not None:
            aliases[output.name] = name
            stored.append(StoredOutput(stored_output.source, known[name], is_known=True))
        elif stored_output.is_known:
            raise Unavailable(f"output {output.name!r} was replaced while it was being stored")
        else:
            stored.append(stored_output)
    return TakenOutputs(delivered.outputs, stored, aliases, delivered.may_be_known)


async def add_files(tx: Tx, job: Job, delivered: TakenOutputs) -> None:
    for output in delivered.new:
        await media.add_file(tx, replace(output.file, user_id=job.spec.user_id))


async def remove_files(tx: Tx, tenant_id: UUID, file_ids: Sequence[UUID]) -> list[File]:
    """Deletes the rows of replaced files and returns the files. The caller deletes the objects
    after the commit.
    """
    files_by_id = await media.find_existing(tx, tenant_id, file_ids) if file_ids else {}
    return [await media.delete_file(tx, tenant_id, file_id) for file_id in files_by_id]


async def settle(tx: Tx, job: Job, delivered: TakenOutputs) -> list[File]:
    """Makes the delivered outputs the result of the completed job. Deletes and returns files that
    were stored during its runs and are not part of the result.
    """
    if not delivered.may_be_known:
        return []
    names = {
        delivered.aliases.get(output.name, output.name): output.name for output in delivered.outputs
    }
    before = await run_log.settle_outputs(tx, job.tenant_id, job.id, names)
    result_ids = {file.id for file in delivered.files}
    return await remove_files(
        tx, job.tenant_id, [file_id for file_id in before if file_id not in result_ids]
    )


async def lock_run(tx: Tx, run: LoggedRun, token: UUID) -> LoggedState | None:
    """Locks the run for a report and returns its state. Returns None if the report's lease is no
    longer held.

    If the same report arrives twice at the same time, the second one waits here and then finds that
    the first one is already logged.
    """
    state = await run_log.lock_run(tx, run.tenant_id, run.user_id, run.job_id, report=run.report)
    return state if state is not None and state.holds(token) else None


def logged_run(job: Job | None, token: UUID, report: int | None = None) -> LoggedRun | None:
    """Returns the run to log, or None if no client follows the job or another lease holds it."""
    if job is None or job.spec.gateway is None or job.spec.user_id is None:
        return None
    if job.lease_token != token or not job.status.is_active:
        return None
    data: Mapping[str, Any] = job.spec.gateway
    return LoggedRun(
        job.tenant_id,
        job.spec.user_id,
        job.id,
        job.lease_number,
        data.get("client_id"),
        data["prompt_id"],
        report,
        0 if sees_in_order(data) else None,
    )

"""File transfers between a worker and the object store: assets are downloaded and cached by content; outputs
are moved from the backend to URLs that the lease can renew, when their node has ended, else when the run has.

A content hash is BLAKE3, written as 64 hexadecimal digits without any prefix. One worker owns the
cache folder; a second worker in it would delete files that the first one uses.
"""

import asyncio
import contextlib
import errno
import json
import logging
import mmap
import os
import re
import shutil
import tempfile
import time
import uuid
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import httpx
from blake3 import blake3

from comfyfleet.api.values import (
    NAME_CHARACTERS_MAX,
    WANTED_MAX,
    Asset,
    DeliveredOutput,
    OutputSlot,
    WantedOutput,
)
from comfyfleet.api.worker import Job
from comfyfleet.comfy import Backend, OutputFile, Outputs
from comfyfleet.comfy.backend import Fetched
from comfyfleet.comfy.events import NodeDone
from comfyfleet.comfy.server import find_outputs
from comfyfleet.delivery import prepare_file
from comfyfleet.errors import FleetError, InvalidInput, LimitExceeded, Unavailable, is_full_disk
from comfyfleet.media import measure_picture, replace_prompt
from comfyfleet.transport.files import read_chunks, save_body
from comfyfleet.transport.http import open_client
from comfyfleet.transport.retry import RetryPolicy
from comfyfleet.worker.heartbeat import HeartbeatLoop
from comfyfleet.worker.job_files import (
    all_outputs,
    choose_outputs,
    content_type_of,
    find_slot,
    has_values,
    own_subfolder,
    require_own_folder,
)
from comfyfleet.worker.platform import RenewAsset
from comfyfleet.worker.run_record import RunRecord
from comfyfleet.worker.settings import safe_name
from comfyfleet.workflow.embedded import replace_prompt_in_place

ATTEMPTS_MAX = 6
GONE = frozenset({404, 410})


class AssetDownloads:
    """Downloads assets without a cache; see AssetProvider."""

    def __init__(
        self, store: httpx.AsyncClient, folder: Path, retry: RetryPolicy | None = None
    ) -> None:
        self._store = store
        self._folder = folder
        self._retry = retry or RetryPolicy()

    @contextlib.asynccontextmanager
    async def hold(self, asset: Asset, renew: RenewAsset) -> AsyncIterator[Path]:
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self._folder))
        try:
            yield await self._download(asset, renew, folder / "asset")
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _download(self, asset: Asset, renew: RenewAsset, to: Path) -> Path:
        for attempt in range(1, ATTEMPTS_MAX + 1):
            trouble = await self._attempt(asset, to)
            if trouble is None:
                return to
            if attempt > 1:
                await self._retry.back_off(attempt - 1)
            asset = await renew(asset)
        raise Unavailable(f"the input {asset.name!r} can't be fetched: {trouble}")

    async def _attempt(self, asset: Asset, to: Path) -> str | None:
        try:
            async with self._store.stream("GET", asset.url) as response:
                if response.status_code in GONE:
                    raise InvalidInput(f"the input {asset.name!r} is gone from the store")
                if not response.is_success:
                    return f"answered {response.status_code}"
                size = await save_body(response, to)
        except httpx.TransportError as error:
            return type(error).__name__
        if asset.size is not None and size != asset.size:
            return f"{size} bytes instead of {asset.size}"
        return None


_HASH = re.compile(r"[0-9a-f]{64}")
# Asks for a new URL of the same asset.
RenewUrl: TypeAlias = Callable[[Asset], Awaitable[Asset]]


class AssetSource(Protocol):
    def hold(self, asset: Asset, renew: RenewUrl) -> AbstractAsyncContextManager[Path]:
        """Yields the asset as a file that the caller may move away."""
        ...


@dataclass(slots=True)
class _Held:
    """An asset in use, which must not be removed.

    Others that want it while it is fetched wait for the lock.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class AssetCache:
    """Provides assets like its source, but asks the source only for what is not cached.

    Keyed by backend and content: a file that was given to one backend says nothing about another.
    """

    def __init__(
        self, folder: Path, max_bytes: int, *, source: AssetSource, endpoint: str = ""
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._source = source
        self._mine = folder / blake3(endpoint.encode()).hexdigest()[:16]
        self._incoming = folder / "incoming"
        # What is there, the least recently used first.
        self._sizes: dict[Path, int] = {}
        self._held: dict[Path, _Held] = {}
        # Files of an earlier process are verified again: it may have died in mid-write.
        self._verified: set[Path] = set()
        self._scan_folder()

    @contextlib.asynccontextmanager
    async def hold(self, asset: Asset, renew: RenewUrl) -> AsyncIterator[Path]:
        """Yields the asset as a file that stays unchanged inside the `with` block.

        Raises what the source raises; InvalidInput when the bytes don't match the hash; OSError
        with ENOSPC when the disk is full although everything unused was removed.
        """
        if asset.content_hash is None:
            async with self._source.hold(asset, renew) as path:
                yield path
            return
        path = self._mine / _checked(asset)
        held = self._held.setdefault(path, _Held())
        held.users += 1
        try:
            async with held.lock:
                await self._provide(path, asset, renew)
            yield path
        finally:
            held.users -= 1
            if not held.users:
                del self._held[path]
            self._shrink(self._max_bytes)

    async def _provide(self, path: Path, asset: Asset, renew: RenewUrl) -> None:
        size = await asyncio.to_thread(_size_if_good, path, path in self._verified)
        if size is None:
            size = await self._fetch(path, asset, renew)
        self._verified.add(path)
        self._sizes.pop(path, None)
        self._sizes[path] = size
        self._shrink(self._max_bytes)

    async def _fetch(self, path: Path, asset: Asset, renew: RenewUrl) -> int:
        """Fetches; tries once more after a damaged transfer, or when space could be freed on a full disk."""
        for last in (False, True):
            try:
                async with self._source.hold(asset, renew) as fetched:
                    found = await asyncio.to_thread(_hash_of, fetched)
                    if found == path.name:
                        return await asyncio.to_thread(self._move, fetched, path)
            except OSError as error:
                if last or not is_full_disk(error) or not self._shrink(0):
                    raise
        raise InvalidInput(
            f"the input {asset.name!r} is not what was stored: its hash is {found}, not {path.name}"
        )

    def _move(self, fetched: Path, path: Path) -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        size = fetched.stat().st_size
        try:
            os.replace(fetched, path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._copy(fetched, path)
        return size

    def _copy(self, fetched: Path, path: Path) -> None:
        """Copies from another file system; the file appears under its name only when complete."""
        draft = self._incoming / uuid.uuid4().hex
        try:
            shutil.copyfile(fetched, draft)
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    def _shrink(self, max_bytes: int) -> bool:
        """Removes the least recently used files; returns whether any was removed.

        Files in use stay, even above the limit.
        """
        # One that is larger than the whole cache must not drive all others out while it is here.
        fitting = sum(size for size in self._sizes.values() if size <= self._max_bytes)
        went = False
        for path, size in list(self._sizes.items()):
            too_large = size > self._max_bytes
            if path in self._held or (fitting <= max_bytes and not too_large):
                continue
            path.unlink(missing_ok=True)
            del self._sizes[path]
            self._verified.discard(path)
            fitting -= 0 if too_large else size
            went = True
        return went

    def _scan_folder(self) -> None:
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._incoming.mkdir(parents=True)
        found = [
            (path.stat(), path) for path in self._folder.glob("*/*") if _HASH.fullmatch(path.name)
        ]
        for stat, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
            self._sizes[path] = stat.st_size
        self._shrink(self._max_bytes)


def _checked(asset: Asset) -> str:
    content_hash = asset.content_hash or ""
    if not _HASH.fullmatch(content_hash):
        raise InvalidInput(
            f"the input {asset.name!r} has the content hash {content_hash!r}, "
            "which is not BLAKE3 as 64 hexadecimal digits"
        )
    return content_hash


def _size_if_good(path: Path, is_verified: bool) -> int | None:
    """The size of a valid file. Also updates its time of use, which survives a restart."""
    try:
        if not is_verified and _hash_of(path) != path.name:
            return None
        os.utime(path)
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _hash_of(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


logger = logging.getLogger(__name__)

# Files up to this size are sent from memory, and are not worth a change of threads to be removed before
# their lease ends.
SMALL_BYTES = 1024 * 1024
TINY_BYTES = 32 * 1024
# URLs are valid for 900 s by default; if one expires in mid-upload, the upload is lost.
URL_RENEWAL_SECONDS_MAX = 600.0
STORE_OUTAGE_SECONDS_MAX = 900.0
REFUSALS_MAX = 4
# A store that has taken a whole file and says nothing is hung; a repeated PUT changes nothing.
ANSWER_SECONDS = 30.0


def store_client() -> httpx.AsyncClient:
    """The HTTP client for the object store.

    No headers of its own: the store must not see the worker's key.
    """
    return open_client("", answer_seconds=ANSWER_SECONDS)


@dataclass(frozen=True, slots=True)
class ReadyFile:
    """A file as it is delivered. `content`: the bytes, if it is small."""

    path: Path
    size: int
    content_hash: str
    width: int | None = None
    height: int | None = None
    content: bytes | None = None
    lost_manifest: bool = False


class OutputUploads:
    """Uploads the outputs of one lease."""

    def __init__(
        self,
        store: httpx.AsyncClient,
        heartbeat_loop: HeartbeatLoop,
        job: Job,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._store = store
        self._heartbeat_loop = heartbeat_loop
        self._retry = retry or RetryPolicy()
        self._slots = {slot.name: (slot, time.monotonic()) for slot in job.outputs}

    async def put(self, file: ReadyFile, *, name: str, content_type: str) -> None:
        """Raises Unavailable when the store accepts nothing for long, LimitExceeded if the file is
        too large."""
        wanted = WantedOutput(name=name, content_type=content_type)
        refusals = failures = 0
        deadline = time.monotonic() + STORE_OUTAGE_SECONDS_MAX
        while True:
            slot = await self._slot(wanted)
            trouble, is_refusal = await self._attempt(slot, file, content_type)
            if trouble is None:
                return
            failures += 1
            refusals += is_refusal
            if is_refusal:
                # The next attempt uses another URL: this one may have expired on the way.
                self._slots.pop(name, None)
            if failures & (failures - 1) == 0:
                # The 1st, 2nd, 4th, 8th …: an outage of any length is a few lines.
                extra = {"output": name, "reason": trouble, "attempt": failures}
                logger.warning("an output was not taken", extra=extra)
            if refusals >= REFUSALS_MAX or time.monotonic() > deadline:
                raise Unavailable(f"the store does not take {name}: {trouble}")
            if not (is_refusal and refusals == 1):
                await self._retry.back_off(failures + 1)

    async def _slot(self, wanted: WantedOutput) -> OutputSlot:
        known = self._slots.get(wanted.name)
        if known is None or time.monotonic() - known[1] > URL_RENEWAL_SECONDS_MAX:
            asked = time.monotonic()
            fresh = await self._heartbeat_loop.renew_outputs([wanted])
            known = self._slots[wanted.name] = (fresh[wanted.name], asked)
        return known[0]

    async def _attempt(
        self, slot: OutputSlot, file: ReadyFile, content_type: str
    ) -> tuple[str | None, bool]:
        """Returns the problem, if any, without the URL, which is secret; and whether the store
        refused the file."""
        headers = {"Content-Type": content_type, **_lower_case_keys(slot.headers)}
        headers = {**_lower_case_keys(headers), "content-length": str(file.size)}
        content = file.content if file.content is not None else read_chunks(file.path)
        try:
            answer = await self._store.put(slot.url, content=content, headers=headers)
        except httpx.TransportError as error:
            return type(error).__name__, False
        if answer.status_code == 413:
            raise LimitExceeded(f"the output {slot.name!r} is larger than the store takes")
        if answer.is_success:
            return None, False
        return f"answered {answer.status_code}", answer.status_code < 500


def _lower_case_keys(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


# A run that failed is reported after so long, whatever of its files is still on its way.
DRAIN_SECONDS_MAX = 20.0


YIELD_SECONDS_MAX = 0.25


class UploadGate:
    """Lets uploads of the next prompt go before downloads of results, because only a missing prompt leaves a
    GPU idle.

    Results wait for a moment only: a large input may take minutes.
    """

    def __init__(self) -> None:
        self._preparing = 0
        self._clear = asyncio.Event()
        self._clear.set()

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        self._preparing += 1
        self._clear.clear()
        try:
            yield
        finally:
            self._preparing -= 1
            if not self._preparing:
                self._clear.set()

    async def wait_for_prompts(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(YIELD_SECONDS_MAX):
                await self._clear.wait()


class TellOutput(NamedTuple):
    """Where a file that was delivered before the end of its run is noted."""

    record: RunRecord
    heartbeat_loop: HeartbeatLoop

    def tell(self, output: DeliveredOutput) -> None:
        self.record.add_output(output)
        self.heartbeat_loop.show_record(self.record)


class OutputDelivery:
    """The outputs of one lease. Each file is delivered once.

    `resumes`: a worker that was killed may have delivered some under names that nobody remembers.
    """

    def __init__(
        self,
        job: Job,
        backend: Backend,
        uploads: OutputUploads,
        upload_gate: UploadGate,
        scratch: Path,
        *,
        record: TellOutput | None = None,
        resumes: bool = False,
    ) -> None:
        self._job = job
        self._backend = backend
        self._uploads = uploads
        self._upload_gate = upload_gate
        self._scratch = scratch
        self._record = record
        self._prefix = f"{uuid.uuid4().hex[:8]}-" if resumes else ""
        self._names: set[str] = set()
        self._inline_bytes_left = 0 if record is not None else job.inline_bytes_max
        self._delivered: dict[tuple[str, str, str], DeliveredOutput] = {}
        self._waiting: list[OutputFile] = []
        self._work: asyncio.Task[None] | None = None

    def begin(self, done: NodeDone) -> None:
        """Delivers the files of a node in the background, before the run has ended: those that are reported at
        once, and those of the output node."""
        self._waiting += self._early_files(done)
        if self._waiting and (self._work is None or self._work.done()):
            self._work = asyncio.create_task(self._deliver_waiting())

    def _early_files(self, done: NodeDone) -> Sequence[OutputFile]:
        if not done.output:
            return ()
        outputs = find_outputs({done.node_id: done.output})
        if self._record is not None:
            return all_outputs(outputs) if self._job.live_outputs else ()
        chosen = choose_outputs(outputs, self._job.output_node_id)
        return [file for file in chosen if file.folder == "output"]

    async def _deliver_waiting(self) -> None:
        """What can't be delivered now is delivered with the rest, when the run has ended."""
        while self._waiting:
            file = self._waiting.pop(0)
            try:
                output = await self._deliver(file)
                if self._record is not None:
                    self._record.tell(output)
            except (FleetError, OSError) as error:
                extra = {"file": file.filename, "reason": str(error)}
                logger.warning("an output is not delivered before its run has ended", extra=extra)

    async def drain(self) -> None:
        """Waits for the files of nodes that have ended: of a run that failed they are kept, too."""
        if self._work is not None:
            await asyncio.wait({self._work}, timeout=DRAIN_SECONDS_MAX)

    async def close(self) -> None:
        self._waiting.clear()
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def deliver_all(self, outputs: Outputs) -> tuple[DeliveredOutput, ...]:
        """The files of the whole run; those that were delivered before are not delivered again."""
        job = self._job
        if job.records_run:
            files = all_outputs(outputs)
        else:
            files = choose_outputs(outputs, job.output_node_id)
        made_values = job.output_node_id and has_values(outputs, job.output_node_id)
        if job.output_node_id is not None and not files and not made_values:
            raise InvalidInput(f"The output node {job.output_node_id} made nothing.")
        if len(files) > WANTED_MAX:
            raise LimitExceeded(f"The run made {len(files)} files; at most {WANTED_MAX} are taken.")
        self._waiting.clear()
        if self._work is not None:
            await asyncio.wait({self._work})
        return tuple([await self._deliver(file) for file in files])

    def _name(self, filename: str) -> str:
        """The first gets the upload slot that came with the lease, if it fits."""
        number = len(self._names) + 1
        slot = (
            find_slot(self._job.outputs, [filename]) if number == 1 and not self._prefix else None
        )
        name = slot or f"{self._prefix}{safe_name(filename)}"
        name = f"{number}-{name}"[:NAME_CHARACTERS_MAX] if name in self._names else name
        self._names.add(name)
        return name

    async def _fetch(self, file: OutputFile, most: int) -> Fetched:
        try:
            return await self._backend.fetch(file, self._scratch / "output", bytes_max=most)
        except LimitExceeded as error:
            raise LimitExceeded(
                f"The output {file.filename} has too many bytes; at most {most:,} are taken."
            ) from error

    async def _deliver(self, file: OutputFile) -> DeliveredOutput:
        """Moves one file from the backend to the store.

        It is on our disk only meanwhile; a small one until its lease ends.
        """
        key = file.folder, file.subfolder, file.filename
        if key in self._delivered:
            return self._delivered[key]
        if len(self._delivered) >= WANTED_MAX:
            raise LimitExceeded(f"At most {WANTED_MAX} files of a run are taken.")
        job = self._job
        require_own_folder(file, job)
        await self._upload_gate.wait_for_prompts()
        fetched = await self._fetch(file, job.max_output_bytes)
        try:
            content_type = content_type_of(file.filename, fetched.content_type)
            ready = await _prepared(fetched, job, file.filename)
            await self._upload_gate.wait_for_prompts()
            name = self._name(file.filename)
            content = self._inline_content(ready)
            if content is None:
                await self._uploads.put(ready, name=name, content_type=content_type)
        finally:
            if fetched.size_bytes > SMALL_BYTES:
                await asyncio.to_thread(fetched.path.unlink, missing_ok=True)
        output = _delivered(file, name, content_type, ready, job)
        if content is not None:
            output = output.model_copy(update={"content": content})
        self._delivered[key] = output
        return output

    def _inline_content(self, ready: ReadyFile) -> str | None:
        """Returns a small file in base64, for the final report; None if it has to be uploaded."""
        if ready.content is None or ready.size > self._inline_bytes_left:
            return None
        self._inline_bytes_left -= ready.size
        return b64encode(ready.content).decode()


def _delivered(
    file: OutputFile, name: str, content_type: str, ready: ReadyFile, job: Job
) -> DeliveredOutput:
    return DeliveredOutput(
        name=name,
        size=ready.size,
        content_type=content_type,
        content_hash=ready.content_hash,
        filename=file.filename,
        node_id=file.node_id,
        kind=file.key,
        width=ready.width,
        height=ready.height,
        is_stripped=is_prepared(job),
        lost_manifest=ready.lost_manifest,
        folder=file.folder if job.records_run else None,
        subfolder=own_subfolder(file, job) if job.records_run else None,
    )


async def _prepared(fetched: Fetched, job: Job, name: str) -> ReadyFile:
    """Prepares an output in a thread, unless the change of threads would take longer than the work."""
    if fetched.size_bytes <= TINY_BYTES:
        return prepare_output(fetched, job, name)
    return await asyncio.to_thread(prepare_output, fetched, job, name)


def prepare_output(fetched: Fetched, job: Job, name: str) -> ReadyFile:
    """Strips or corrects metadata, hashes, measures and reads a small file.

    All in one call, because each hop to a thread takes time. Raises InvalidInput, with the file's name, if its prompt
    can't be removed.
    """
    path = fetched.path
    size, lost_manifest = fetched.size_bytes, False
    if is_prepared(job):
        size, lost_manifest = prepare_file(
            path, mark=job.ai_mark, strips=job.strip_metadata, name=name
        )
    elif job.records_run:
        # ComfyUI writes its prompt into pictures; that of the client has no folders of ours.
        size = correct_prompt(path, json.dumps(job.prompt))
    width, height = measure_picture(path) or (None, None)
    return ReadyFile(
        path,
        size,
        blake3().update_mmap(path).hexdigest(),
        width,
        height,
        path.read_bytes() if size <= SMALL_BYTES else None,
        lost_manifest,
    )


def correct_prompt(path: Path, prompt: str) -> int:
    """Writes the prompt of the client into a file in place of that of the backend. Returns the size of the file."""
    size = replace_prompt(path, prompt)
    if size:
        with (
            path.open("r+b") as file,
            mmap.mmap(file.fileno(), 0) as mapped,
            memoryview(mapped) as data,
        ):
            replace_prompt_in_place(data, prompt)
    return size


def is_prepared(job: Job) -> bool:
    """Whether files are changed for the customer: prompts removed, a mark added."""
    return job.strip_metadata or job.ai_mark is not None

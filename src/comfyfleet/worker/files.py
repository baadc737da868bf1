"""Transfers files between a worker and the object store. Assets are downloaded and cached by
content. Outputs are moved from the backend to renewable upload URLs, some as soon as their node has
finished and the rest after the run.

A content hash is BLAKE3, written as 64 hexadecimal digits without a prefix. Only one worker may use
a cache folder. A second one would delete files that the first one uses.
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
    """Downloads assets without a cache. See AssetProvider."""

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
            problem = await self._attempt(asset, to)
            if problem is None:
                return to
            if attempt > 1:
                await self._retry.back_off(attempt - 1)
            asset = await renew(asset)
        raise Unavailable(f"the input {asset.name!r} could not be downloaded: {problem}")

    async def _attempt(self, asset: Asset, to: Path) -> str | None:
        try:
            async with self._store.stream("GET", asset.url) as response:
                if response.status_code in GONE:
                    raise InvalidInput(f"the input {asset.name!r} no longer exists in the store")
                if not response.is_success:
                    return f"the store responded with status {response.status_code}"
                size = await save_body(response, to)
        except httpx.TransportError as error:
            return type(error).__name__
        if asset.size is not None and size != asset.size:
            return f"received {size} bytes instead of {asset.size}"
        return None


_HASH = re.compile(r"[0-9a-f]{64}")
# Requests a new URL for the same asset.
RenewUrl: TypeAlias = Callable[[Asset], Awaitable[Asset]]


class AssetSource(Protocol):
    def hold(self, asset: Asset, renew: RenewUrl) -> AbstractAsyncContextManager[Path]:
        """Yields the asset as a file that the caller may move away."""
        ...


@dataclass(slots=True)
class _Held:
    """An asset that is in use and must not be removed.

    While it is being fetched, other users wait for the lock.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class AssetCache:
    """Provides assets from a cache, and downloads an asset only if the cache doesn't contain it.

    Files are cached per backend and content, so that one backend can't find out what another one
    has received.
    """

    def __init__(
        self, folder: Path, max_bytes: int, *, source: AssetSource, endpoint: str = ""
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._source = source
        self._mine = folder / blake3(endpoint.encode()).hexdigest()[:16]
        self._incoming = folder / "incoming"
        # Sizes of the cached files, least recently used first.
        self._sizes: dict[Path, int] = {}
        self._held: dict[Path, _Held] = {}
        # Files of an earlier process are verified again, because it may have died while writing.
        self._verified: set[Path] = set()
        self._scan_folder()

    @contextlib.asynccontextmanager
    async def hold(self, asset: Asset, renew: RenewUrl) -> AsyncIterator[Path]:
        """Yields the asset as a file that stays unchanged inside the `with` block.

        Raises the source's exceptions, InvalidInput if the bytes don't match the hash, and OSError
        with ENOSPC if the disk is full even after all unused files were removed.
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
        """Fetches the asset. Retries once if the transfer was damaged, or if the disk was full and
        unused files could be removed."""
        for last in (False, True):
            try:
                async with self._source.hold(asset, renew) as fetched:
                    content_hash = await asyncio.to_thread(_hash_of, fetched)
                    if content_hash == path.name:
                        return await asyncio.to_thread(self._move, fetched, path)
            except OSError as error:
                if last or not is_full_disk(error) or not self._shrink(0):
                    raise
        raise InvalidInput(
            f"the input {asset.name!r} differs from the stored file: "
            f"its hash is {content_hash}, not {path.name}"
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
        """Copies the file from another file system. The copy gets its final name only when it is
        complete."""
        draft = self._incoming / uuid.uuid4().hex
        try:
            shutil.copyfile(fetched, draft)
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    def _shrink(self, max_bytes: int) -> bool:
        """Removes the least recently used files. Returns whether any were removed.

        Files in use are kept, even above the limit.
        """
        # A file larger than the whole cache must not evict all others while it is in use.
        fitting = sum(size for size in self._sizes.values() if size <= self._max_bytes)
        has_removed = False
        for path, size in list(self._sizes.items()):
            too_large = size > self._max_bytes
            if path in self._held or (fitting <= max_bytes and not too_large):
                continue
            path.unlink(missing_ok=True)
            del self._sizes[path]
            self._verified.discard(path)
            fitting -= 0 if too_large else size
            has_removed = True
        return has_removed

    def _scan_folder(self) -> None:
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._incoming.mkdir(parents=True)
        files = [
            (path.stat(), path) for path in self._folder.glob("*/*") if _HASH.fullmatch(path.name)
        ]
        for stat, path in sorted(files, key=lambda file: file[0].st_mtime_ns):
            self._sizes[path] = stat.st_size
        self._shrink(self._max_bytes)


def _checked(asset: Asset) -> str:
    content_hash = asset.content_hash or ""
    if not _HASH.fullmatch(content_hash):
        raise InvalidInput(
            f"the input {asset.name!r} has the content hash {content_hash!r}, "
            "which isn't a BLAKE3 hash of 64 hexadecimal digits"
        )
    return content_hash


def _size_if_good(path: Path, is_verified: bool) -> int | None:
    """Returns the size of the file, or None if it doesn't exist or is damaged. Also updates the
    file's modification time, which records its last use across restarts."""
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

# Files up to this size in bytes are sent from memory. They are removed from the disk only when the
# lease ends, because removing them earlier isn't worth a thread switch.
SMALL_BYTES = 1024 * 1024
TINY_BYTES = 32 * 1024
# Maximum age of an upload URL in seconds. URLs are valid for 900 s by default, and an upload is
# lost if its URL expires.
URL_RENEWAL_SECONDS_MAX = 600.0
STORE_OUTAGE_SECONDS_MAX = 900.0
REFUSALS_MAX = 4
# Seconds to wait for the store's response after the whole file was sent. After this time, the store
# counts as hung and the upload is repeated, which is safe because it is a PUT.
ANSWER_SECONDS = 30.0


def store_client() -> httpx.AsyncClient:
    """Returns the HTTP client for the object store.

    It sends no default headers, because the store must not receive the worker's key.
    """
    return open_client("", answer_seconds=ANSWER_SECONDS)


@dataclass(frozen=True, slots=True)
class ReadyFile:
    """A file that is ready for delivery. `content` contains the bytes if the file is small."""

    path: Path
    size: int
    content_hash: str
    width: int | None = None
    height: int | None = None
    content: bytes | None = None
    lost_manifest: bool = False


class OutputUploads:
    """Uploads a lease's outputs."""

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
        """Uploads a file, with retries. Raises Unavailable if the store doesn't accept it in time,
        and LimitExceeded if the file is too large."""
        request = WantedOutput(name=name, content_type=content_type)
        refusals = failures = 0
        deadline = time.monotonic() + STORE_OUTAGE_SECONDS_MAX
        while True:
            slot = await self._slot(request)
            problem, is_refusal = await self._attempt(slot, file, content_type)
            if problem is None:
                return
            failures += 1
            refusals += is_refusal
            if is_refusal:
                # The next attempt uses a new URL, because this one may have expired in the
                # meantime.
                self._slots.pop(name, None)
            if failures & (failures - 1) == 0:
                # Only attempts 1, 2, 4, 8 and so on are logged, so that a long outage doesn't flood
                # the log.
                extra = {"output": name, "reason": problem, "attempt": failures}
                logger.warning("an output was not accepted by the store", extra=extra)
            if refusals >= REFUSALS_MAX or time.monotonic() > deadline:
                raise Unavailable(f"the store didn't accept the output {name}: {problem}")
            if not (is_refusal and refusals == 1):
                await self._retry.back_off(failures + 1)

    async def _slot(self, request: WantedOutput) -> OutputSlot:
        entry = self._slots.get(request.name)
        if entry is None or time.monotonic() - entry[1] > URL_RENEWAL_SECONDS_MAX:
            requested_at = time.monotonic()
            slots = await self._heartbeat_loop.renew_outputs([request])
            entry = self._slots[request.name] = (slots[request.name], requested_at)
        return entry[0]

    async def _attempt(
        self, slot: OutputSlot, file: ReadyFile, content_type: str
    ) -> tuple[str | None, bool]:
        """Tries an upload once. Returns the problem, if any, and whether the store refused the
        file. The problem doesn't contain the URL, which is secret."""
        headers = {"Content-Type": content_type, **_lower_case_keys(slot.headers)}
        headers = {**_lower_case_keys(headers), "content-length": str(file.size)}
        content = file.content if file.content is not None else read_chunks(file.path)
        try:
            answer = await self._store.put(slot.url, content=content, headers=headers)
        except httpx.TransportError as error:
            return type(error).__name__, False
        if answer.status_code == 413:
            raise LimitExceeded(f"the output {slot.name!r} is too large for the store")
        if answer.is_success:
            return None, False
        problem = f"the store responded with status {answer.status_code}"
        return problem, answer.status_code < 500


def _lower_case_keys(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


# Maximum seconds that the report of a failed run waits for its files.
DRAIN_SECONDS_MAX = 20.0


YIELD_SECONDS_MAX = 0.25


class UploadGate:
    """Gives uploads for the next prompt priority over downloads of results, because a GPU without a
    next prompt is idle.

    Results wait only briefly, because uploading a large input may take minutes.
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


class LiveOutputs(NamedTuple):
    """Records and reports files that are delivered before their run ends."""

    record: RunRecord
    heartbeat_loop: HeartbeatLoop

    def report(self, output: DeliveredOutput) -> None:
        self.record.add_output(output)
        self.heartbeat_loop.show_record(self.record)


class OutputDelivery:
    """Delivers a lease's outputs, each file once.

    `resumes` means that a killed worker may have delivered some outputs under unknown names.
    """

    def __init__(
        self,
        job: Job,
        backend: Backend,
        uploads: OutputUploads,
        upload_gate: UploadGate,
        scratch: Path,
        *,
        record: LiveOutputs | None = None,
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
        """Delivers a node's files in the background before the run ends, if they are reported live
        or belong to the output node."""
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
        """Delivers the waiting files. A file that can't be delivered now is delivered with the rest
        after the run."""
        while self._waiting:
            file = self._waiting.pop(0)
            try:
                output = await self._deliver(file)
                if self._record is not None:
                    self._record.report(output)
            except (FleetError, OSError) as error:
                extra = {"file": file.filename, "reason": str(error)}
                logger.warning(
                    "an output can't be delivered now; retrying after the run", extra=extra
                )

    async def drain(self) -> None:
        """Waits until the files of finished nodes are delivered. They are kept even if the run
        failed."""
        if self._work is not None:
            await asyncio.wait({self._work}, timeout=DRAIN_SECONDS_MAX)

    async def close(self) -> None:
        self._waiting.clear()
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def deliver_all(self, outputs: Outputs) -> tuple[DeliveredOutput, ...]:
        """Delivers and returns the files of the whole run. Files delivered earlier are not sent
        again."""
        job = self._job
        if job.records_run:
            files = all_outputs(outputs)
        else:
            files = choose_outputs(outputs, job.output_node_id)
        made_values = job.output_node_id and has_values(outputs, job.output_node_id)
        if job.output_node_id is not None and not files and not made_values:
            raise InvalidInput(f"The output node {job.output_node_id} produced no output.")
        if len(files) > WANTED_MAX:
            raise LimitExceeded(f"The run created {len(files)} files. The limit is {WANTED_MAX}.")
        self._waiting.clear()
        if self._work is not None:
            await asyncio.wait({self._work})
        return tuple([await self._deliver(file) for file in files])

    def _name(self, filename: str) -> str:
        """Returns a unique name for an output. The first output uses the lease's upload slot if it
        fits."""
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
                f"The output {file.filename} is too large. The limit is {most:,} bytes."
            ) from error

    async def _deliver(self, file: OutputFile) -> DeliveredOutput:
        """Moves one file from the backend to the store.

        A large file stays on the worker's disk only during the transfer, and a small one until its
        lease ends.
        """
        key = file.folder, file.subfolder, file.filename
        if key in self._delivered:
            return self._delivered[key]
        if len(self._delivered) >= WANTED_MAX:
            raise LimitExceeded(f"The run created more than {WANTED_MAX} files (the limit).")
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
        """Returns a small file in base64 for the final report, or None if it must be uploaded."""
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
    """Prepares an output in a thread, unless the thread switch would take longer than the work."""
    if fetched.size_bytes <= TINY_BYTES:
        return prepare_output(fetched, job, name)
    return await asyncio.to_thread(prepare_output, fetched, job, name)


def prepare_output(fetched: Fetched, job: Job, name: str) -> ReadyFile:
    """Strips or corrects metadata, and hashes, measures and reads a file. Only small files are read
    into memory.

    One call does everything, because each thread switch takes time. Raises InvalidInput with the
    file's name if its prompt can't be removed.
    """
    path = fetched.path
    size, lost_manifest = fetched.size_bytes, False
    if is_prepared(job):
        size, lost_manifest = prepare_file(
            path, mark=job.ai_mark, strips=job.strip_metadata, name=name
        )
    elif job.records_run:
        # ComfyUI embeds the prompt that it ran in images. The client's prompt replaces it, because
        # it doesn't contain the job's private folder.
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
    """Replaces the backend's prompt in a file with the client's. Returns the file's size."""
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
    """Checks whether the worker removes prompts from the job's files or marks them."""
    return job.strip_metadata or job.ai_mark is not None

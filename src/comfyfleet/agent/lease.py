"""One lease, from its assets to its result."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
from blake3 import blake3

from comfyfleet.agent.backendfiles import BackendFiles
from comfyfleet.agent.beating import Heart
from comfyfleet.agent.choosing import chosen, content_type_of, fitting_slot, shown_of, shows
from comfyfleet.agent.deliveries import SMALL_BYTES, Deliveries, ReadyFile
from comfyfleet.agent.filling import differences, filled
from comfyfleet.agent.jobfiles import flat_name, folder_of, input_name, is_unlisted, placed
from comfyfleet.agent.journal import Entry, Journal
from comfyfleet.agent.models import LoadedModels
from comfyfleet.agent.naming import output_names, prompt_id_of
from comfyfleet.agent.pictures import size_of
from comfyfleet.agent.ports import Assets
from comfyfleet.agent.precedence import Precedence
from comfyfleet.agent.progress import advance, begin
from comfyfleet.comfy import Backend, OutputFile, Outputs
from comfyfleet.comfy.backend import Fetched
from comfyfleet.comfy.events import Cancelled, End, Failed, Preview, Started
from comfyfleet.comfy.surroundings import Surroundings
from comfyfleet.kernel.errors import (
    InvalidInput,
    LimitExceeded,
    OutcomeUnknown,
    PromptRefused,
    Refused,
    RunFailed,
    RunTimedOut,
    Unauthenticated,
    Unavailable,
    UnexpectedAnswer,
)
from comfyfleet.kernel.filetypes import SNIFF_BYTES
from comfyfleet.wire.files import WANTED_MAX, DeliveredOutput
from comfyfleet.wire.messages import Complete, Job, ModelChange
from comfyfleet.wire.metadata import strip_metadata

UNKNOWN_LOOKS_MAX = 4
LOOK_SECONDS = 1.0


class Phase(StrEnum):
    PREPARING = "preparing"  # its inputs are fetched and uploaded
    QUEUED = "queued"  # its prompt waits in the backend
    RUNNING = "running"
    DELIVERING = "delivering"  # its outputs go up


@dataclass(frozen=True, slots=True)
class Workshop:
    """What all leases of a worker share."""

    backend: Backend
    assets: Assets
    store: httpx.AsyncClient
    journal: Journal
    files: BackendFiles | None = None  # a cloud has no folders
    precedence: Precedence = field(default_factory=Precedence)
    models: LoadedModels = field(default_factory=LoadedModels)
    surroundings: Surroundings = field(default_factory=Surroundings)


class Lease:
    """Where one lease stands. `moved` is told of each new phase."""

    def __init__(self, entry: Entry, moved: Callable[[], None] = lambda: None) -> None:
        self.entry = entry
        self.phase = Phase.PREPARING
        self.resumes = False  # left over from a worker that was killed
        self.model_change: ModelChange | None = None  # known once it runs
        self.delivers_since = -math.inf  # by the monotonic clock
        self._moved = moved

    @property
    def job(self) -> Job:
        return self.entry.job

    @property
    def prompt_id(self) -> str:
        return prompt_id_of(self.job.job_id, self.job.lease_number)

    @property
    def folder(self) -> str:
        """Of its files on the backend."""
        return folder_of(self.job.lease_token)

    @property
    def in_backend(self) -> bool:
        """Or may be: of one that was left over nobody knows yet."""
        left_over = self.resumes and self.phase is Phase.PREPARING
        return left_over or self.phase in (Phase.QUEUED, Phase.RUNNING)

    def enter(self, phase: Phase) -> None:
        if phase != self.phase:
            self.phase = phase
            if phase is Phase.DELIVERING:
                self.delivers_since = time.monotonic()
            self._moved()


async def run_lease(lease: Lease, heart: Heart, workshop: Workshop, scratch: Path) -> Complete:
    """Assets → upload → submit → follow → fetch outputs → PUT; what is then to be said."""
    run_id = await adopted(lease, heart, workshop) if lease.resumes else None
    if run_id is None:
        with workshop.precedence.preparing():
            run_id = await handed_in(lease, heart, workshop)
    seconds = await followed(lease, run_id, heart, workshop)
    outputs = await workshop.backend.outputs(run_id)
    return Complete(
        dispatch_id=lease.job.dispatch_id,
        lease_token=lease.job.lease_token,
        provider_job_id=run_id,
        outputs=await delivered(lease.job, outputs, heart, workshop, scratch),
        execution_seconds=seconds,
        model_change=lease.model_change,
        values=shown_of(outputs, lease.job.output_node_id),
    )


async def adopted(lease: Lease, heart: Heart, workshop: Workshop) -> str | None:
    """The run of a worker that was killed, if the lease is still held and the backend has it."""
    with contextlib.suppress(Unavailable, Unauthenticated, Refused):
        await heart.say_now()
    found = await workshop.backend.adopt(lease.entry.run_id or lease.prompt_id)
    if found is None and lease.entry.run_id not in (None, lease.prompt_id):
        found = await workshop.backend.adopt(lease.prompt_id)
    if found is None:
        return None
    lease.entry = replace(lease.entry, run_id=found.run_id)
    lease.enter(Phase.QUEUED)
    return found.run_id


async def handed_in(lease: Lease, heart: Heart, workshop: Workshop) -> str:
    """Its prompt is with the backend, and so are the files that it names."""
    job = lease.job
    async with AsyncExitStack() as held:
        paths = {
            asset.name: await held.enter_async_context(workshop.assets.hold(asset, heart.renew))
            for asset in job.assets
        }
        nested = workshop.files is not None
        names = await uploaded(paths, lease, workshop, nested=nested)
        try:
            run_id = await submitted(
                lease, await prepared(job, names, lease, workshop), heart, workshop
            )
        except PromptRefused as error:
            if not nested or not is_unlisted(error, names.values()):
                raise
            # A loader that takes nothing but what it lists, and lists no subfolders.
            names = await uploaded(paths, lease, workshop, nested=False)
            run_id = await submitted(
                lease, await prepared(job, names, lease, workshop), heart, workshop
            )
    lease.entry = replace(lease.entry, run_id=run_id)
    if run_id != lease.prompt_id:
        # The other id follows from the job, and is looked for.
        await asyncio.to_thread(workshop.journal.write, lease.entry)
    return run_id


async def uploaded(
    paths: Mapping[str, Path], lease: Lease, workshop: Workshop, *, nested: bool
) -> dict[str, str]:
    """What loaders take, by asset: in the job's own folder, or under as good a name."""
    names = {}
    for asset, path in paths.items():
        name = input_name(asset, await asyncio.to_thread(_first_bytes, path))
        given = name if nested else flat_name(lease.folder, name)
        subfolder = lease.folder if nested else ""
        names[asset] = (await workshop.backend.upload(path, name=given, subfolder=subfolder)).value
    return names


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(SNIFF_BYTES)


async def prepared(
    job: Job, names: Mapping[str, str], lease: Lease, workshop: Workshop
) -> dict[str, Any]:
    """Raises InvalidInput if it names a file that is not the job's."""
    prompt: dict[str, Any] = filled(job.prompt, names, job.assets)
    if workshop.files is None:
        return prompt
    await workshop.files.check(prompt, frozenset(names.values()))
    return placed(prompt, lease.folder, workshop.files.known)


async def submitted(lease: Lease, prompt: dict[str, Any], heart: Heart, workshop: Workshop) -> str:
    """Sent once. If nobody can tell what came of it, it is looked for, never sent again."""
    backend, prompt_id = workshop.backend, lease.prompt_id
    heart.sent(differences(lease.job.prompt, prompt))
    lease.enter(Phase.QUEUED)
    try:
        sent = await backend.submit(prompt, prompt_id=prompt_id, extra_data=lease.job.extra_data)
    except OutcomeUnknown:
        for look in range(UNKNOWN_LOOKS_MAX):
            if found := await backend.adopt(prompt_id):
                return found.run_id
            await workshop.surroundings.sleep(LOOK_SECONDS * 2**look)
        raise
    return sent.run_id


async def followed(lease: Lease, run_id: str, heart: Heart, workshop: Workshop) -> float | None:
    """To its success; how many seconds it ran. Raises RunFailed, RunTimedOut and all of follow."""
    standing, end, began = begin(lease.job.prompt), None, None
    try:
        async with asyncio.timeout(None) as limit:
            async for event in workshop.backend.follow(run_id):
                if isinstance(event, Started) and began is None:
                    began = started(lease, heart, workshop)
                    limit.reschedule(_deadline(began, lease.job.run_limit_seconds))
                    await asyncio.to_thread(workshop.journal.write, lease.entry)
                if isinstance(event, Preview):
                    heart.preview(event)
                standing = advance(standing, event)
                if began is not None:
                    heart.show(standing.report())
                end = event if isinstance(event, End) else end
    except TimeoutError:
        seconds = lease.job.run_limit_seconds
        raise RunTimedOut(f"The run took longer than its limit of {seconds} s.") from None
    lease.enter(Phase.DELIVERING)
    check_end(end, run_id)
    return None if began is None else max(0.0, time.time() - began)


def started(lease: Lease, heart: Heart, workshop: Workshop) -> float:
    """When it began: of an adopted run, as noted by the worker before."""
    change = workshop.models.began(lease.job)
    # What an adopted run found loaded nobody knows, and whose turn it is in a cloud neither.
    is_known = not lease.resumes and workshop.files is not None
    lease.model_change = change if is_known else None
    began = time.time() if lease.entry.started_at is None else lease.entry.started_at
    lease.entry = replace(lease.entry, started_at=began)
    lease.enter(Phase.RUNNING)
    heart.start()
    return began


def _deadline(began: float, limit_seconds: float) -> float:
    """By the loop's clock, of a start told by the wall's."""
    return asyncio.get_running_loop().time() + limit_seconds - (time.time() - began)


def check_end(end: End | None, run_id: str) -> None:
    match end:
        case Failed(message=message):
            raise RunFailed(message, run_id=run_id, failed=end)
        case Cancelled():
            raise RunFailed("The run was interrupted on its server.", run_id=run_id)
        case None:
            raise UnexpectedAnswer(f"run {run_id} has no end")


async def delivered(
    job: Job, outputs: Outputs, heart: Heart, workshop: Workshop, scratch: Path
) -> tuple[DeliveredOutput, ...]:
    files = chosen(outputs, job.output_node_id)
    if job.output_node_id is not None and not files and not shows(outputs, job.output_node_id):
        raise InvalidInput(f"The output node {job.output_node_id} made nothing.")
    if len(files) > WANTED_MAX:
        raise LimitExceeded(f"The run made {len(files)} files; at most {WANTED_MAX} are taken.")
    deliveries = Deliveries(workshop.store, heart, job, workshop.surroundings)
    filenames = [file.filename for file in files]
    names = output_names(filenames, fitting_slot(job.outputs, filenames))
    return tuple(
        [
            await deliver(file, name, job, deliveries, workshop, scratch)
            for file, name in zip(files, names, strict=True)
        ]
    )


async def deliver(
    file: OutputFile,
    name: str,
    job: Job,
    deliveries: Deliveries,
    workshop: Workshop,
    scratch: Path,
) -> DeliveredOutput:
    """One file from the backend to the store; on our disk only meanwhile, a small one until its lease
    ends."""
    await workshop.precedence.give_way()
    fetched = await workshop.backend.fetch(file, scratch / "output")
    try:
        size = fetched.size_bytes
        if size > job.max_output_bytes:
            raise LimitExceeded(
                f"The output {file.filename} has {size:,} bytes; at most "
                f"{job.max_output_bytes:,} are taken."
            )
        content_type = content_type_of(file.filename, fetched.content_type)
        ready = await asyncio.to_thread(made_ready, fetched, strip=job.strip_metadata)
        await workshop.precedence.give_way()
        await deliveries.put(ready, name=name, content_type=content_type)
    finally:
        if fetched.size_bytes > SMALL_BYTES:
            await asyncio.to_thread(fetched.path.unlink, missing_ok=True)
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
        is_stripped=job.strip_metadata,
    )


def made_ready(fetched: Fetched, *, strip: bool) -> ReadyFile:
    """Without metadata, hashed, measured, and read if it is small: all at once, as each change of
    threads takes time."""
    path = fetched.path
    size = strip_metadata(path) if strip else fetched.size_bytes
    width, height = size_of(path) or (None, None)
    return ReadyFile(
        path,
        size,
        blake3().update_mmap(path).hexdigest(),
        width,
        height,
        path.read_bytes() if size <= SMALL_BYTES else None,
    )

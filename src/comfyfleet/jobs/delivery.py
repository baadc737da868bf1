"""A worker's output becomes a file: under a key that no URL to write to was made for.

Without the prompt and workflow that it carries, unless its effect says so. Our own workers take them
out before they deliver; what another worker delivers goes through here once.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from blake3 import blake3

from comfyfleet.dispatch.model import Dispatch
from comfyfleet.effects.catalogue import service as catalogue
from comfyfleet.effects.catalogue.model import RunTerms
from comfyfleet.files.model import File, kept_output_key, output_key, safe_name
from comfyfleet.jobs import store
from comfyfleet.jobs.arrival import suffix_of
from comfyfleet.jobs.model import Submission, delivery_of
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import InvalidInput, NotFound, Unavailable
from comfyfleet.opened_files import opened
from comfyfleet.storage.model import CHUNK_BYTES
from comfyfleet.wire.files import DeliveredOutput
from comfyfleet.wire.messages import Complete
from comfyfleet.wire.metadata import strip_metadata


@dataclass(frozen=True, slots=True)
class Delivered:
    """`source`: where the worker has put it."""

    source: str
    file: File


def is_to_strip(asked: Submission, terms: RunTerms) -> bool:
    """An operator's own jobs keep what their files carry."""
    return asked.user_id is not None and not terms.keeps_metadata


async def take(sides: Sides, row: Dispatch, said: Complete) -> list[Delivered]:
    """Each output must lie where its URL led, in the size that was announced."""
    names = [output.name for output in said.outputs]
    if len(set(names)) < len(names):
        raise InvalidInput("two outputs have the same name", field="outputs")
    is_stripping = await _is_stripping(sides, row, said.outputs)
    taken: list[Delivered] = []
    try:
        for output in said.outputs:
            strips = is_stripping and not output.is_stripped
            taken.append(await _taken(sides, row, said.lease_token, output, strips=strips))
    except BaseException:
        await drop(sides, taken)
        raise
    return taken


async def drop(sides: Sides, taken: Sequence[Delivered]) -> None:
    """They are not wanted: the job has ended otherwise, or was told of before."""
    if taken:
        await sides.store.delete(*(each.file.path for each in taken))


def settle(sides: Sides, taken: Sequence[Delivered]) -> None:
    """They are named by rows now; what the worker has put is needed no more."""
    sides.deferred.delete_objects(sides.store, [each.source for each in taken])


async def _is_stripping(sides: Sides, row: Dispatch, outputs: Sequence[DeliveredOutput]) -> bool:
    if all(each.is_stripped for each in outputs):
        return False
    pool = await sides.pool_of(row.tenant_id)
    async with pool.look() as tx:
        job = await store.get(tx, row.tenant_id, row.job_id)
    if job is None:
        return False
    async with sides.central.look() as tx:
        terms = await catalogue.run_terms(tx, job.asked.workflow_id, job.asked.effect_id)
    return is_to_strip(job.asked, terms)


async def _taken(
    sides: Sides, row: Dispatch, token: UUID, output: DeliveredOutput, *, strips: bool
) -> Delivered:
    source = output_key(row.tenant_id, row.job_id, delivery_of(token, row.job_id), output.name)
    if output.size > sides.settings.max_output_bytes:
        raise InvalidInput(f"output {output.name!r} is too large", field="outputs")
    file_id, filename = sides.new_id(), safe_name(output.filename or output.name)
    suffix = suffix_of(filename, output.content_type)
    key = kept_output_key(row.tenant_id, row.job_id, file_id, suffix)
    size, content_hash = output.size, output.content_hash
    if strips:
        await _require_size(sides, source, output)
        size, content_hash = await _stripped(sides, source, key, output)
    else:
        await _copy(sides, source, key, output)
    file = File(
        id=file_id,
        tenant_id=row.tenant_id,
        user_id=None,
        disk=sides.store.disk,
        path=key,
        filename=filename,
        mime_type=output.content_type,
        size=size,
        content_hash=content_hash,
        metadata={},
        created_at=sides.clock(),
    )
    return Delivered(source, file)


async def _copy(sides: Sides, source: str, key: str, output: DeliveredOutput) -> None:
    try:
        if await sides.store.copy(source, key, output.content_type, size=output.size):
            return
    except NotFound:
        raise _never_uploaded(output) from None
    await _require_size(sides, source, output)
    raise Unavailable(f"output {output.name!r} was replaced while it was taken")


async def _require_size(sides: Sides, source: str, output: DeliveredOutput) -> None:
    facts = await sides.store.head(source)
    if facts is None:
        raise _never_uploaded(output)
    if facts.size != output.size:
        raise InvalidInput(
            f"output {output.name!r} has {facts.size} bytes, not {output.size}", field="outputs"
        )


def _never_uploaded(output: DeliveredOutput) -> InvalidInput:
    return InvalidInput(
        f"output {output.name!r} was never uploaded: PUT it first, to the URL that came with that name",
        field="outputs",
    )


async def _stripped(
    sides: Sides, source: str, key: str, output: DeliveredOutput
) -> tuple[int, str]:
    if output.size <= CHUNK_BYTES:
        data = await sides.store.get(source)
        data, content_hash = await asyncio.to_thread(_stripped_bytes, data)
        await sides.store.put(key, data, output.content_type)
        return len(data), content_hash
    with tempfile.TemporaryDirectory(prefix="comfyfleet-") as folder:
        path = Path(folder) / "output"
        with await opened(path, "wb") as file:
            async for chunk in sides.store.chunks(source):
                await asyncio.to_thread(file.write, chunk)
        size = await asyncio.to_thread(strip_metadata, path)
        content_hash = await asyncio.to_thread(_hash_of, path)
        await sides.store.put_file(key, path, output.content_type)
    return size, content_hash


def _stripped_bytes(data: bytes) -> tuple[bytes, str]:
    with tempfile.NamedTemporaryFile(prefix="comfyfleet-") as file:
        file.write(data)
        file.flush()
        strip_metadata(Path(file.name))
        kept = Path(file.name).read_bytes()
    return kept, blake3(kept).hexdigest()


def _hash_of(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()

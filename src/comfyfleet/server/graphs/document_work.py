"""Work on graph documents of any size: reading, checking, planning, quoting. Large ones don't stop the event loop."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from uuid import UUID

from comfyfleet.api.documents import read_document
from comfyfleet.server.graphs.run import ValueSize, size_of
from comfyfleet.server.turns import FairThreads

T = TypeVar("T")


async def read_body(text: str | Mapping[str, Any]) -> Any:
    """Parses JSON or YAML text in a thread; a body that is parsed already is returned as it is."""
    return await asyncio.to_thread(read_document, text) if isinstance(text, str) else text


# Work on larger documents is done in threads, by tenant.
IN_LOOP_SIZE_MAX = ValueSize(values=400, characters=4_000)
AT_ONCE_MAX, WAITING_PER_TENANT_MAX = 2, 100
documents = FairThreads("documents", AT_ONCE_MAX, waiting_each_max=WAITING_PER_TENANT_MAX)


async def compute(tenant_id: UUID, document: Any, work: Callable[[], T]) -> T:
    """Does work on a document: in the event loop if the document is small, or else in a thread."""
    if size_of(document, IN_LOOP_SIZE_MAX).fits(IN_LOOP_SIZE_MAX):
        return work()
    return await documents.run(tenant_id, work)

"""Processes graph documents of any size: reads, checks, plans and quotes them. Large documents
don't block the event loop."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from comfyfleet.api.documents import read_document
from comfyfleet.errors import LimitExceeded
from comfyfleet.server.graphs.run import SCALAR_CHARACTERS, ValueSize, size_of
from comfyfleet.server.turns import FairThreads

T = TypeVar("T")


# Work on larger documents is done in threads. The limits apply per tenant.
IN_LOOP_SIZE_MAX = ValueSize(values=400, characters=4_000)
AT_ONCE_MAX, WAITING_PER_TENANT_MAX = 2, 100
documents = FairThreads("documents", AT_ONCE_MAX, waiting_each_max=WAITING_PER_TENANT_MAX)


async def read_body(tenant_id: UUID, text: str | Mapping[str, Any]) -> Any:
    """Parses JSON or YAML text in a thread. Returns a body unchanged if it is already parsed."""
    if not isinstance(text, str):
        return text
    return await documents.run(tenant_id, partial(read_document, text))


async def compute(tenant_id: UUID, document: Any, work: Callable[[], T]) -> T:
    """Runs `work` on a document: in the event loop if the document is small, otherwise in a
    thread."""
    if size_of(document, IN_LOOP_SIZE_MAX).fits(IN_LOOP_SIZE_MAX):
        return work()
    return await documents.run(tenant_id, work)


# Limit for all inputs, or all variables, of a run together. A trigger's inputs are built from one
# request body, and each of them may contain the whole body.
INPUT_CHARACTERS_MAX = 256 * 1024
# A value that exceeds this certainly has a longer JSON text. Each value takes at least one
# character, and is followed by a comma and a space or enclosed in brackets.
_MEASURED_MAX = ValueSize(
    values=INPUT_CHARACTERS_MAX // 3 + 1,
    characters=(INPUT_CHARACTERS_MAX // 2 + 1) * max(2, SCALAR_CHARACTERS),
)


def check_size(values: Mapping[str, Any], what: str = "inputs") -> None:
    """Refuses the inputs or the variables of a run if they are too large together."""
    is_measured = size_of(values, _MEASURED_MAX).fits(_MEASURED_MAX)
    if not is_measured or len(json.dumps(values)) > INPUT_CHARACTERS_MAX:
        raise LimitExceeded(
            f"the {what} have more than {INPUT_CHARACTERS_MAX:,} characters in total", field=what
        )

"""Reads, validates, plans and quotes graph documents of any size. Large documents are processed in
threads, so that they don't block the event loop."""

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


# Documents above this size are processed in threads. The limit of waiting calls is per tenant.
IN_LOOP_SIZE_MAX = ValueSize(values=400, characters=4_000)
AT_ONCE_MAX, WAITING_PER_TENANT_MAX = 2, 100
documents = FairThreads("documents", AT_ONCE_MAX, waiting_each_max=WAITING_PER_TENANT_MAX)


async def read_body(tenant_id: UUID, text: str | Mapping[str, Any]) -> Any:
    """Parses JSON or YAML text in a thread. Returns a body that is already parsed unchanged."""
    if not isinstance(text, str):
        return text
    return await documents.run(tenant_id, partial(read_document, text))


async def compute(tenant_id: UUID, document: Any, work: Callable[[], T]) -> T:
    """Runs `work`, which processes a document. If the document is large, it runs in a thread."""
    if size_of(document, IN_LOOP_SIZE_MAX).fits(IN_LOOP_SIZE_MAX):
        return work()
    return await documents.run(tenant_id, work)


# Maximum characters of all inputs, or of all variables, of a run together. A limit for each input
# isn't enough, because each input of a trigger may contain the whole request body.
INPUT_CHARACTERS_MAX = 256 * 1024
# The JSON text of a value above this size always exceeds the limit. In JSON, each inner value takes
# at least one character, plus a comma and a space or brackets.
_MEASURED_MAX = ValueSize(
    values=INPUT_CHARACTERS_MAX // 3 + 1,
    characters=(INPUT_CHARACTERS_MAX // 2 + 1) * max(2, SCALAR_CHARACTERS),
)


def check_size(values: Mapping[str, Any], what: str = "inputs") -> None:
    """Raises LimitExceeded if the inputs or variables of a run are too large together."""
    is_measured = size_of(values, _MEASURED_MAX).fits(_MEASURED_MAX)
    if not is_measured or len(json.dumps(values)) > INPUT_CHARACTERS_MAX:
        raise LimitExceeded(
            f"the {what} have more than {INPUT_CHARACTERS_MAX:,} characters in total", field=what
        )

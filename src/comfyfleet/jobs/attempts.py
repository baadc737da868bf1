"""What was sent to a backend in each attempt: the job's prompt, and what its worker put into it."""

import json
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from comfyfleet.dispatch.model import Dispatch, Extended
from comfyfleet.jobs.ending import held
from comfyfleet.jobs.model import Attempt, Job
from comfyfleet.jobs.sides import Sides
from comfyfleet.wire.messages import Complete, Fail, FilledIn, Heartbeat

VALUE_CHARACTERS_MAX = 2000
TOLD_CHARACTERS_MAX = 64_000
LEFT_OUT = "(left out)"


async def note(sides: Sides, said: Heartbeat | Complete | Fail, lease: Dispatch | Extended) -> None:
    """The first word that tells it counts. Written a moment later: nobody waits for it."""
    if said.filled_in is None:
        return
    attempt = Attempt(
        job_id=lease.job_id,
        lease_number=lease.lease_number,
        tenant_id=lease.tenant_id,
        attempt=lease.attempts,
        worker_id=lease.worker_id or "",
        started_at=sides.clock(),
        filled_in=storable(said.filled_in),
    )
    sides.deferred.note_attempt(await sides.pool_of(lease.tenant_id), attempt)


async def note_last(sides: Sides, said: Complete | Fail, *, worker_id: str) -> None:
    """Told with a last word, if the job ended before a heartbeat."""
    if said.filled_in is not None:
        await note(sides, said, await held(sides, said.dispatch_id, said.lease_token, worker_id))


def storable(filled_in: FilledIn) -> dict[str, dict[str, Any]]:
    """Without what would let a reader in elsewhere, and not without limits."""
    told = {
        node_id: {name: _storable(value) for name, value in inputs.items()}
        for node_id, inputs in filled_in.items()
    }
    return told if len(json.dumps(told)) <= TOLD_CHARACTERS_MAX else {}


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        plain = value.encode(errors="backslashreplace").decode().replace("\0", "")
        return without_rights(plain)[:VALUE_CHARACTERS_MAX]
    return value if len(json.dumps(value)) <= VALUE_CHARACTERS_MAX else LEFT_OUT


def without_rights(text: str) -> str:
    """A URL may carry the right to what it names: in its query, or as user and password."""
    if "://" not in text:
        return text
    try:
        parts = urlsplit(text.strip())
    except ValueError:
        return LEFT_OUT
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def sent_prompt(job: Job, attempt: Attempt) -> dict[str, Any] | None:
    """None: it was removed, as the job ended long ago."""
    if not job.asked.prompt or attempt.filled_in is None:
        return None
    prompt = dict(job.asked.prompt)
    for node_id, inputs in attempt.filled_in.items():
        node = prompt.get(node_id, {})
        prompt[node_id] = {**node, "inputs": {**node.get("inputs", {}), **inputs}}
    return prompt

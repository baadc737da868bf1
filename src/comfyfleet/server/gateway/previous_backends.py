"""Finds the workers whose backends ran a user's last prompts or accepted the user's last upload.

A backend has the node cache and the temporary files of the prompts that it ran. Calls to routes of
custom nodes contain neither a prompt id nor a client id, so they are routed by user.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.fleets import route_calls
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet
from comfyfleet.server.gateway.placement import PromptMatch
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.model import EndedPrompt
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.tenants.model import Caller

# Number of a user's latest prompts that are searched for the client's previous prompt.
PROMPTS_READ_MAX = 8


class PastRun(NamedTuple):
    """An ended prompt, and the worker that ran it."""

    prompt: EndedPrompt
    worker_id: str


class PreferredWorker(NamedTuple):
    worker_id: str
    fleet_id: int


async def _ended_prompts(plane: ControlPlane, caller: Caller, *, limit: int) -> list[EndedPrompt]:
    async with plane.context.tenant(caller.tenant.id) as tx:
        return await jobs.last_ended_prompts(tx, caller.tenant.id, caller.user_id, limit=limit)


# For prompts


async def find_preferred_worker(
    plane: ControlPlane,
    caller: Caller,
    match: PromptMatch,
    *,
    client_id: str | None,
    model_key: str | None,
) -> PreferredWorker | None:
    """Returns the free worker that should run a prompt, or None if there is no preference.

    Workers that accepted the user's last upload come first. Otherwise, the worker that ran the
    client's previous prompt is preferred, provided that the prompt uses the same model.
    """
    online = [backend for backend in match.backends if backend.is_online]
    if sum(backend.workers for backend in online) < 2:
        return None
    prompts = await _ended_prompts(plane, caller, limit=PROMPTS_READ_MAX)
    ended = {prompt.job_id for prompt in prompts}
    async with plane.central.read() as tx:
        previous = await _previous_run(tx, caller, by_client(prompts, client_id))
        accepted = await route_calls.accepted_upload(
            tx, caller.tenant.id, caller.user_id, now=plane.clock()
        )
        for worker_id in preferred_ids(previous, accepted, model_key):
            worker = await _free_worker(tx, worker_id, match, ended)
            if worker is not None:
                return worker
    return None


def by_client(prompts: Sequence[EndedPrompt], client_id: str | None) -> list[EndedPrompt]:
    """Sorts the prompts of this client before the user's other prompts. Both groups keep their
    order.
    """
    return sorted(prompts, key=lambda prompt: prompt.client_id != client_id)


async def _previous_run(tx: Tx, caller: Caller, prompts: Iterable[EndedPrompt]) -> PastRun | None:
    """Returns the first of these prompts whose worker is known, with that worker."""
    for prompt in prompts:
        worker_id = await dispatch.worker_of(tx, caller.tenant.id, prompt.job_id)
        if worker_id is not None:
            return PastRun(prompt, worker_id)
    return None


def preferred_ids(
    previous: PastRun | None, accepted: Sequence[str], model_key: str | None
) -> Sequence[str]:
    """Returns the ids of the preferred workers, best first.

    An upload outweighs a loaded model, because other backends may lack the prompt's files.
    """
    if previous is None:
        return accepted
    if accepted:
        return sorted(accepted, key=lambda worker_id: worker_id != previous.worker_id)
    return [previous.worker_id] if previous.prompt.model_key == model_key else []


async def _free_worker(
    tx: Tx, worker_id: str, match: PromptMatch, ended: Collection[UUID]
) -> PreferredWorker | None:
    """Returns the worker if its fleet can run the prompt and it has a free slot, or None otherwise.

    Leases of ended jobs don't count, because they will be released in a moment.
    """
    load = await dispatch.load_of(tx, worker_id)
    if load is None or len(load.job_ids.difference(ended)) >= load.max_concurrency:
        return None
    is_able = any(fleet.id == load.fleet_id for fleet in match.fleets)
    return PreferredWorker(worker_id, load.fleet_id) if is_able else None


# The following functions select backends for calls to custom nodes' routes.

# Maximum number of backends that receive a call. A read-only call is sent to one backend after
# another. A call that may change something is sent to all backends, or to only one if there are
# more than this number.
TARGETS_MAX = 8
# A worker counts as a previous worker for this long after its prompt has ended.
RUNS_COUNT_FOR = timedelta(hours=1)
RUNS_READ_MAX = 200
WORKERS_READ_MAX = 100


@dataclass(frozen=True)
class RouteTargets:
    """The ids of the online workers for a call to a custom node's route.

    `previous` contains the worker of the user's last ended prompt, then the workers of the running
    prompts, and then the other workers of the last hour, newest first.
    """

    previous: Sequence[str]
    others: Sequence[str]

    @property
    def to_read(self) -> Sequence[str]:
        """The workers that are tried one after another until one doesn't respond with 404."""
        return self.previous[:TARGETS_MAX]

    @property
    def to_change(self) -> Sequence[str]:
        """The workers whose backends all receive the call. The response of the first one that
        accepts it is returned.

        If more than `TARGETS_MAX` workers are online, only the first previous one is used. If this
        is empty, the call is sent to any one worker.
        """
        every = [*self.previous, *self.others]
        return every if len(every) <= TARGETS_MAX else self.previous[:1]


async def find_route_targets(
    plane: ControlPlane, caller: Caller, usable: Sequence[Fleet]
) -> RouteTargets:
    now = plane.clock()
    seen_since = now - timedelta(seconds=plane.settings.offline_after_seconds)
    async with plane.context.tenant(caller.tenant.id) as tx:
        active = await jobs.active_prompt_ids(tx, caller.tenant.id, caller.user_id)
    running_ids = [job_id for job_id, is_running in active if is_running][-RUNS_READ_MAX:]
    prompts = await _ended_prompts(plane, caller, limit=RUNS_READ_MAX)
    recent = [prompt for prompt in prompts if prompt.ended_at >= now - RUNS_COUNT_FOR]
    online: set[str] = set()
    async with plane.central.read() as tx:
        ended = await _workers_of(tx, caller, [prompt.job_id for prompt in recent])
        running = await _workers_of(tx, caller, running_ids[::-1])
        for fleet in usable:
            workers = await fleets.workers_of(
                tx, fleet, seen_since=seen_since, limit=WORKERS_READ_MAX
            )
            online |= {worker.worker_id for worker in workers if worker.takes_jobs}
    # A client may fetch a node's files before the run ends, so running prompts count as well.
    known = dict.fromkeys([*ended[:1], *running, *ended])
    previous = [worker_id for worker_id in known if worker_id in online]
    return RouteTargets(previous, sorted(online.difference(previous)))


async def _workers_of(tx: Tx, caller: Caller, job_ids: Sequence[UUID]) -> list[str]:
    """Returns the ids of the jobs' workers. Jobs without a worker are left out."""
    rows = await dispatch.of_jobs(tx, caller.tenant.id, job_ids) if job_ids else {}
    worker_ids = (rows[job_id].worker_id for job_id in job_ids if job_id in rows)
    return [worker_id for worker_id in worker_ids if worker_id is not None]

"""The workers whose backends ran a user's last prompts, or accepted the user's last upload.

A backend has the node cache and the temporary files of the prompts that it ran. Calls of custom nodes' routes
carry neither a prompt id nor a client_id, so they are routed by user."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.fleets import route_calls
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet, FleetWorker
from comfyfleet.server.gateway.placement import PromptMatch
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.model import EndedPrompt
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.tenants.model import Caller

# A client's previous prompt is looked for among so many prompts of its user.
PROMPTS_READ_MAX = 8


class PastRun(NamedTuple):
    """An ended prompt, and the worker that ran it."""

    prompt: EndedPrompt
    worker_id: str


async def _ended_prompts(
    plane: ControlPlane, caller: Caller, *, limit: int, reads_client: bool = False
) -> list[EndedPrompt]:
    async with plane.context.tenant(caller.tenant.id) as tx:
        return await jobs.last_ended_prompts(
            tx, caller.tenant.id, caller.user_id, limit=limit, reads_client=reads_client
        )


async def _runs_of(tx: Tx, caller: Caller, prompts: Iterable[EndedPrompt]) -> list[PastRun]:
    ended = list(prompts)
    rows = await dispatch.of_jobs(tx, caller.tenant.id, [each.job_id for each in ended])
    return [
        PastRun(prompt, row.worker_id)
        for prompt in ended
        if (row := rows.get(prompt.job_id)) is not None and row.worker_id is not None
    ]


# For prompts


async def find_preferred_worker(
    plane: ControlPlane,
    caller: Caller,
    match: PromptMatch,
    *,
    client_id: str | None,
    model_key: str | None,
) -> FleetWorker | None:
    """Returns the free worker that should run a prompt: one that accepted the user's last upload, or
    else that of the client's previous prompt if it needn't load another model."""
    online = [backend for backend in match.backends if backend.is_online]
    if sum(backend.workers for backend in online) < 2:
        return None
    prompts = await _ended_prompts(plane, caller, limit=PROMPTS_READ_MAX, reads_client=True)
    ended = {prompt.job_id for prompt in prompts}
    async with plane.central.read() as tx:
        previous = previous_run(await _runs_of(tx, caller, prompts), client_id)
        accepted = await route_calls.accepted_upload(
            tx, caller.tenant.id, caller.user_id, now=plane.clock()
        )
        for worker_id in preferred_ids(previous, accepted, model_key):
            worker = await _free_worker(tx, worker_id, match, ended)
            if worker is not None:
                return worker
    return None


def previous_run(runs: Sequence[PastRun], client_id: str | None) -> PastRun | None:
    """Returns the client's last run, or its user's if the client has none; `runs`: the last first."""
    mine = (run for run in runs if run.prompt.client_id == client_id)
    return next(mine, runs[0] if runs else None)


def preferred_ids(
    previous: PastRun | None, accepted: Sequence[str], model_key: str | None
) -> Sequence[str]:
    """Returns the ids of preferred workers, the best first. An upload outweighs a loaded model: other
    backends may lack what the prompt needs."""
    if previous is None:
        return accepted
    if accepted:
        return sorted(accepted, key=lambda worker_id: worker_id != previous.worker_id)
    return [previous.worker_id] if previous.prompt.model_key == model_key else []


async def _free_worker(
    tx: Tx, worker_id: str, match: PromptMatch, ended: Collection[UUID]
) -> FleetWorker | None:
    """Returns the worker if it is in a fleet that can run the prompt, and has room for one more job.

    A lease of an ended job is over in a moment, so it doesn't count.
    """
    worker = await fleets.find_worker(tx, worker_id)
    if worker is None or not worker.takes_jobs:
        return None
    held = await dispatch.held_by(tx, worker_id)
    is_able = worker.fleet_id in {fleet.id for fleet in match.fleets}
    load = sum(row.job_id not in ended for row in held)
    return worker if is_able and load < worker.max_concurrency else None


# For calls of custom nodes' routes

# A call that may change something is sent to so many backends at most.
TARGETS_MAX = 8
RUNS_COUNT_FOR = timedelta(hours=1)
RUNS_READ_MAX = 200
WORKERS_READ_MAX = 100


@dataclass(frozen=True)
class RouteTargets:
    """Online workers by id. `previous`: the one that ran the user's last ended prompt, those that run
    prompts of the user now, and the others of the last hour, the last first."""

    previous: Sequence[str]
    others: Sequence[str]

    @property
    def to_read(self) -> Sequence[str]:
        """The workers that are asked one after the other, as long as the answer is 404."""
        return self.previous[:TARGETS_MAX]

    @property
    def to_change(self) -> Sequence[str]:
        """The workers that all get a call; the response is that of the first. Empty: any single one."""
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
        runs = await _runs_of(tx, caller, recent)
        running = await _running_workers(tx, caller, running_ids)
        for fleet in usable:
            workers = await fleets.workers_of(
                tx, fleet, seen_since=seen_since, limit=WORKERS_READ_MAX
            )
            online |= {worker.worker_id for worker in workers if worker.takes_jobs}
    ended = [run.worker_id for run in runs]
    # A client may fetch what a node has made before its run ends.
    known = dict.fromkeys([*ended[:1], *running, *ended])
    previous = [worker_id for worker_id in known if worker_id in online]
    return RouteTargets(previous, sorted(online.difference(previous)))


async def _running_workers(tx: Tx, caller: Caller, job_ids: Sequence[UUID]) -> list[str]:
    """The workers that run these prompts, the last first."""
    rows = await dispatch.of_jobs(tx, caller.tenant.id, job_ids) if job_ids else {}
    found = (rows[job_id].worker_id for job_id in reversed(job_ids) if job_id in rows)
    return [worker_id for worker_id in found if worker_id is not None]

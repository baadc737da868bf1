"""Submits the jobs that runs need next.

Each decision is made twice: before the payload is built, and again under the run's lock. In
between, the run may have been paused, or another control plane may have submitted the same job."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from random import SystemRandom
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from comfyfleet.errors import (
    FleetError,
    InvalidInput,
    QueueFull,
    Refused,
    Unavailable,
    said_to_customers,
)
from comfyfleet.server.catalog.model import SEED_MAX, Property, seed_within
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.outages import log_failure
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.graphs.apply import decisions
from comfyfleet.server.graphs.catalogue import WorkflowFacts
from comfyfleet.server.graphs.document_work import IN_LOOP_SIZE_MAX
from comfyfleet.server.graphs.environment import read_backends
from comfyfleet.server.graphs.run import (
    alternatives,
    is_self_hosted,
    no_backend_message,
    size_of,
)
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs import submit
from comfyfleet.server.jobs.caches import ActiveJobLimits
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.model import Job, JobSpec
from comfyfleet.server.jobs.outbox import flush
from comfyfleet.server.jobs.submit import JobRequest, resolve
from comfyfleet.server.pipelines import run_state, store, store_candidates
from comfyfleet.server.pipelines import store_candidates as job_rows
from comfyfleet.server.pipelines.decide import (
    Generation,
    JudgeGeneration,
    NoWork,
    NoWorkReason,
    next_jobs,
    take_turns,
)
from comfyfleet.server.pipelines.model import (
    JobState,
    PipelineCandidate,
    PipelineJob,
    Step,
    StoredRun,
    WorkKey,
)
from comfyfleet.server.pipelines.parse import names_in, render, whole_name
from comfyfleet.server.pipelines.run_state import (
    PIPELINE_RUN_KIND,
    PipelineRunState,
    facts_by_work,
    read_state,
)

log = logging.getLogger(__name__)
RUNS_PER_PASS_MAX = 200
JOBS_PER_PASS_MAX = 200
WORKS_MAX = 100  # maximum number of job kinds in a run: 50 steps and their judges
# Seconds until a retry after an error that a user or operator must fix, such as a price, a workflow
# or a variable.
RETRY_SECONDS = 60
# If one of these is the reason, the run is checked again after an interval, or when one of its jobs
# ends.
_UNTIL_A_JOB_ENDS = (NoWorkReason.BUSY, NoWorkReason.IN_FLIGHT)
_random = SystemRandom()


class PreparedJob(NamedTuple):
    """A job that is ready to be submitted."""

    generation: Generation
    spec: JobSpec
    seed: int
    timeout_seconds: int


def job_id_of(run_id: UUID, work: WorkKey, parent: UUID | None, number: int) -> UUID:
    """Returns the id of a job. It is the same for the same place in the tree, so submitting a job
    again has no effect."""
    kind = "judge" if work.is_judge else str(work.step)
    return uuid5(run_id, f"{kind}/{parent or 'base'}/{number}")


async def submit_due(context: JobContext, pool: Database) -> bool:
    """Submits the jobs of all due runs of a pool. Returns whether there is more to do
    immediately."""
    async with pool.read() as tx:
        due = await store.due_runs(tx, now=context.clock(), limit=RUNS_PER_PASS_MAX)
    by_tenant: defaultdict[UUID, list[StoredRun]] = defaultdict(list)
    for stored in due:
        by_tenant[stored.tenant_id].append(stored)
    has_more = len(due) == RUNS_PER_PASS_MAX
    for tenant_id, theirs in by_tenant.items():
        has_more |= await _submit_for_tenant(context, pool, tenant_id, theirs)
    return has_more


async def _submit_for_tenant(
    context: JobContext, pool: Database, tenant_id: UUID, due: Sequence[StoredRun]
) -> bool:
    """Submits jobs for a tenant's runs, one job of each run in turn."""
    work: dict[UUID, list[Generation]] = {}
    seen = {stored.id: stored for stored in due}
    for stored in due:
        generations = await _generations_of(context, pool, stored)
        if generations:
            work[stored.id] = generations
    async with pool.read() as tx:
        after = await store.last_served(tx, tenant_id)
    stuck: defaultdict[UUID, dict[WorkKey, FleetError]] = defaultdict(dict)
    for run_id, generation in take_turns(work, after=after, limit=JOBS_PER_PASS_MAX):
        await _submit_safely(context, pool, seen[run_id], generation, stuck[run_id])
    for run_id, troubles in stuck.items():
        if troubles:
            await _submit_other_steps(context, pool, seen[run_id], troubles)
    return sum(map(len, work.values())) > JOBS_PER_PASS_MAX


async def _submit_other_steps(
    context: JobContext, pool: Database, stored: StoredRun, troubles: dict[WorkKey, FleetError]
) -> None:
    """Submits jobs of the steps and judges that have no error, and then records the first error."""
    for _ in range(WORKS_MAX):
        known = len(troubles)
        async with pool.read() as tx:
            state = await read_state(tx, stored.tenant_id, stored.id)
        for generation in await _next_jobs(context, state, frozenset(troubles)):
            if not isinstance(generation, NoWork):
                await _submit_safely(context, pool, stored, generation, troubles)
        if len(troubles) == known:
            break
    await _record_trouble(context, pool, stored, next(iter(troubles.values())))


async def _submit_safely(
    context: JobContext,
    pool: Database,
    stored: StoredRun,
    generation: Generation,
    troubles: dict[WorkKey, FleetError],
) -> None:
    """Submits a job. If that fails, remembers the error, so that jobs of the same kind are skipped
    in this pass."""
    if generation.work in troubles:
        return
    without = frozenset(troubles)
    try:
        await submit_generation(
            context, pool, stored.tenant_id, stored.id, generation, without=without
        )
    except FleetError as error:
        troubles[generation.work] = error
    except Exception as error:  # noqa: BLE001 — one kind of job must not block the others
        troubles[generation.work] = Unavailable("the job can't be submitted now")
        log_failure(log, error, "pipeline run %s: a job could not be submitted", stored.id)


async def _generations_of(
    context: JobContext, pool: Database, stored: StoredRun
) -> list[Generation]:
    async with pool.read() as tx:
        state = await read_state(tx, stored.tenant_id, stored.id)
    next_work = await _next_jobs(context, state)
    generations = [generation for generation in next_work if not isinstance(generation, NoWork)]
    if not generations:
        await _record_no_work(context, pool, state, next_work)
    return generations


async def _next_jobs(
    context: JobContext, state: PipelineRunState, without: frozenset[WorkKey] = frozenset()
) -> list[Generation | NoWork]:
    return next_jobs(
        state.pipeline,
        state.run,
        state.tree,
        state.in_flight,
        now=context.clock(),
        prices=await _prices(context, state),
        without=without,
    )


async def _prices(context: JobContext, state: PipelineRunState) -> dict[WorkKey, int]:
    async with context.central.read() as tx:
        facts = await facts_by_work(tx, state.pipeline)
    return {key: workflow.price_tokens for key, workflow in facts.items()}


async def _record_no_work(
    context: JobContext,
    pool: Database,
    state: PipelineRunState,
    next_work: Sequence[Generation | NoWork],
) -> None:
    seen = state.stored
    reason = next(entry.reason for entry in next_work if isinstance(entry, NoWork))
    again: datetime | None = None
    trouble, seconds = None, None
    if reason in _UNTIL_A_JOB_ENDS:
        again = context.clock() + timedelta(seconds=context.settings.comfyui_submit_interval)
        trouble, seconds = await _unservable_step(context, state)
    async with pool.transaction() as tx:
        await store.record_sweep_result(
            tx,
            seen,
            {"reason": reason, "trouble": trouble, "trouble_seconds": seconds, "look_at": again},
        )
        if seen.reason != reason and reason not in _UNTIL_A_JOB_ENDS:
            await run_state.record_event(
                tx, seen, "no_work", {"reason": reason}, now=context.clock()
            )
    context.notifier.tell(seen.id)


async def _unservable_step(
    context: JobContext, state: PipelineRunState
) -> tuple[str | None, int | None]:
    """Returns a message about the first step or judge with a job in flight that no backend can run
    now. Also returns how many seconds it may wait for a backend."""
    async with context.central.read() as tx:
        facts = await facts_by_work(tx, state.pipeline)
        backends = await read_backends(tx, context)
        starts_within = await fleets.starts_within(tx)
    usual = context.settings.no_backend_seconds
    flying = {WorkKey(job.step, job.is_judge) for job in state.in_flight}
    works = state.pipeline.works
    for key in sorted(flying & facts.keys()):
        workflow, step = facts[key], works[key]
        # Leave templates empty, because their results aren't known yet.
        literals = {
            name: "" if "{{" in str(text) else text for name, text in step.properties.items()
        }
        if is_self_hosted(workflow) and not alternatives(workflow.need_for(literals), backends):
            message = f"step {step.name!r}: {no_backend_message(workflow)}"
            return message, starts_within.get(workflow.slug, usual)
    return None, None


async def _record_trouble(
    context: JobContext, pool: Database, seen: StoredRun, error: FleetError
) -> None:
    """Records the error and delays the next check. Any action of the user makes the run due
    immediately."""
    is_passing = isinstance(error, Unavailable | QueueFull)
    seconds = context.settings.comfyui_submit_interval if is_passing else RETRY_SECONDS
    log.warning("pipeline run %s can't submit jobs and will be retried: %s", seen.id, error.message)
    later = context.clock() + timedelta(seconds=seconds)
    async with pool.transaction() as tx:
        now = await store.get_run(tx, seen.tenant_id, seen.id, is_locked=True)
        if now is not None and now.look_at == seen.look_at:
            changes = {
                "look_at": later,
                "reason": None,  # clear the reason from an earlier check
                "trouble": said_to_customers(error),
                "trouble_seconds": None if is_passing else 0,
            }
            await store.change_run(tx, seen.id, changes)


async def submit_generation(
    context: JobContext,
    pool: Database,
    tenant_id: UUID,
    run_id: UUID,
    generation: Generation,
    *,
    without: frozenset[WorkKey] = frozenset(),
) -> Job | None:
    """Submits a job. Returns None if the job is no longer needed or already exists. `without`
    contains the kinds of jobs that have errors."""
    async with pool.read() as tx:
        state = await read_state(tx, tenant_id, run_id)
        ancestors = await _ancestors(tx, run_id, generation)
    prepared = await _prepare(context, state, generation, ancestors)
    admitted = await submit.check_admission(context, tenant_id, {context.new_id(): prepared.spec})
    prepared = prepared._replace(spec=next(iter(admitted.values())))
    prices = await _prices(context, state)
    async with pool.transaction() as tx:
        state = await read_state(tx, tenant_id, run_id, is_locked=True)
        now = context.clock()
        still = next_jobs(
            state.pipeline,
            state.run,
            state.tree,
            state.in_flight,
            now=now,
            prices=prices,
            without=without,
        )
        if generation not in still:
            return None
        added, outbox_ids = await _submit(tx, state, prepared, now, context.active_max)
    await flush(context, pool, added, outbox_ids)
    context.notifier.tell(run_id)
    return added[0] if added else None


class JobAncestors(NamedTuple):
    """The candidates that a job starts from. For a judge's job, they are the candidate to judge and
    that candidate's parent."""

    judged: PipelineCandidate | None
    parent: PipelineCandidate | None


async def _ancestors(tx: Tx, run_id: UUID, generation: Generation) -> JobAncestors:
    if generation.parent is None:
        return JobAncestors(None, None)
    candidate = await store_candidates.get_candidate(tx, run_id, generation.parent)
    if not isinstance(generation, JudgeGeneration) or candidate is None:
        return JobAncestors(None, candidate)
    parent = (
        await store_candidates.get_candidate(tx, run_id, candidate.parent)
        if candidate.parent
        else None
    )
    return JobAncestors(candidate, parent)


async def _prepare(
    context: JobContext, state: PipelineRunState, generation: Generation, ancestors: JobAncestors
) -> PreparedJob:
    step, parent = state.pipeline.works[generation.work], ancestors.parent
    async with context.central.read() as tx:
        facts = (await facts_by_work(tx, state.pipeline)).get(generation.work)
    if facts is None:
        what = f"the {step.work_field} {step.effect or step.workflow}"
        raise Refused(f"step {step.name!r}: {what} isn't currently offered")
    seed = step.seed if step.seed is not None else _random.randint(0, SEED_MAX)
    fill = partial(_filled_in, step, facts, state.run.variables, parent, seed)
    if size_of(step.properties, IN_LOOP_SIZE_MAX).fits(IN_LOOP_SIZE_MAX):
        values, seeds = fill()
    else:
        values, seeds = await decisions.run(state.stored.tenant_id, fill)
    values |= _picture_to_judge(state, ancestors.judged)
    order = JobRequest(
        slug=facts.slug,
        version=facts.version,
        values={**_files_as_ids(values), **seeds},
        **(facts.effect.request_fields if facts.effect else {}),
        user_id=state.stored.user_id,
    )
    try:
        spec = await resolve(context, state.stored.tenant_id, order)
    except InvalidInput as error:
        error.message = f"step {step.name!r}: {error.message}"
        raise
    spec = replace(
        spec, price_tokens=facts.price_tokens, run_kind=PIPELINE_RUN_KIND, run_id=state.stored.id
    )
    timeout_seconds = step.timeout_seconds or math.ceil(context.settings.comfyui_timeout)
    return PreparedJob(generation, spec, seed, timeout_seconds)


def _filled_in(
    step: Step,
    facts: WorkflowFacts,
    variables: Mapping[str, Any],
    parent: PipelineCandidate | None,
    seed: int,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Returns the values of a job's properties, and the values of its seeds."""
    if parent is not None and not (parent.file or {}).get("file_id") and _needs_file(step):
        raise Refused(f"step {step.name!r}: the file of the parent {parent.id} was removed")
    values = render(step, variables=variables, parent=parent, seed=seed)
    return values, _seeds(step, facts, seed)


def _picture_to_judge(
    state: PipelineRunState, judged: PipelineCandidate | None
) -> dict[str, Mapping[str, Any]]:
    judge = state.pipeline.steps[judged.step].judge if judged else None
    if judged is None or judge is None:
        return {}
    file = judged.file or {}
    if not file.get("file_id"):
        raise Refused(
            f"step {judge.work.name!r}: the file of the candidate {judged.id} was deleted"
        )
    return {judge.picture_property: file}


def _needs_file(step: Step) -> bool:
    """Checks whether a step uses the parent's file. If it doesn't, the parent may consist of text,
    or its file may have been deleted."""
    used = (name for template in step.properties.values() for name in names_in(template))
    return any(name.split(".")[:2] == ["parent", "file"] for name in used)


def _seeds(step: Step, facts: WorkflowFacts, seed: int) -> dict[str, int]:
    """Returns the values of seed properties that the step doesn't set, or sets to `{{ seed }}`."""
    return {
        prop.name: seed_within(prop, seed)
        for prop in facts.properties
        if _takes_seed(step, prop) and prop.type in ("seed", "integer")
    }


def _takes_seed(step: Step, prop: Property) -> bool:
    if prop.name not in step.properties:
        return prop.type == "seed"
    return step.seed is None and whole_name(step.properties[prop.name]) == "seed"


def _files_as_ids(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces files with their ids, so that nothing is copied."""
    return {
        name: value["file_id"] if isinstance(value, Mapping) and "file_id" in value else value
        for name, value in values.items()
    }


async def _submit(
    tx: Tx,
    state: PipelineRunState,
    prepared: PreparedJob,
    now: datetime,
    active_max: ActiveJobLimits,
) -> tuple[list[Job], list[int]]:
    run_id, tenant_id = state.stored.id, state.stored.tenant_id
    work, parent = prepared.generation.work, prepared.generation.parent
    number = await job_rows.next_number(tx, run_id, work.step, parent)
    job_id = job_id_of(run_id, work, parent, number)
    specs = {job_id: prepared.spec}
    added, outbox_ids = await jobs.submit(tx, tenant_id, specs, now=now, active_max=active_max)
    if not added:
        return [], []
    row = PipelineJob(
        id=job_id,
        run_id=run_id,
        step=work.step,
        parent=parent,
        number=number,
        seed=prepared.seed,
        state=JobState.IN_FLIGHT,
        tokens=prepared.spec.price_tokens,
        timeout_seconds=prepared.timeout_seconds,
        error=None,
        created_at=now,
        ended_at=None,
        is_judge=work.is_judge,
    )
    await job_rows.add_job(tx, tenant_id, row)
    await store.change_run(
        tx,
        run_id,
        {
            "served_at": now,
            "changed_at": now,
            "trouble": None,
            "trouble_seconds": None,
            "reason": None,
        },
    )
    payload = {
        "job_id": str(job_id),
        "step": work.step,
        "parent": str(parent) if parent else None,
        "is_judge": work.is_judge,
    }
    await run_state.record_event(tx, state.stored, "submitted", payload, now=now)
    return added, outbox_ids

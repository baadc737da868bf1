"""Pipelines and their runs: made, started, paused, changed, cancelled, retried.

Every act names the user: what belongs to others is not there.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.graphs.model import Problem
from comfyfleet.graphs.offers import offered, with_names
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import Conflict, InvalidInput, NotFound
from comfyfleet.pipelines import journal
from comfyfleet.pipelines.acting import RUN_KIND, Act, acting, own_run
from comfyfleet.pipelines.model import (
    Limits,
    Pipeline,
    PipelineRun,
    RunStatus,
    StoredPipeline,
    StoredRun,
)
from comfyfleet.pipelines.naming import clean_folder
from comfyfleet.pipelines.parsing import parse_pipeline
from comfyfleet.pipelines.store import jobs, runs
from comfyfleet.pipelines.validation import validate, variable_problems
from comfyfleet.pipelines.workflows import facts_by_step

PAGE_MAX = 200
SAME_NAME_MAX = 50  # pipelines of one name that a new one is compared with
BASE_CANDIDATES_MAX = 100_000
CONCURRENT_JOBS_MAX = 100
PROBLEMS_TOLD_MAX = 50


@dataclass(frozen=True, slots=True)
class NewRun:
    """What a run is started with. Limits that are None are those of the settings."""

    base_candidates: int
    variables: Mapping[str, Any] = field(default_factory=dict)
    target_folder: str | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    idempotency_key: str | None = None

    @property
    def request_hash(self) -> str:
        said = [self.base_candidates, dict(self.variables), self.target_folder, dict(self.limits)]
        text = json.dumps(said, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def refuse(problems: Sequence[Problem]) -> None:
    """All of them at once, each with its step and field."""
    if not problems:
        return
    told = [
        {"code": each.code, "message": each.message, "step": each.node, "field": each.port}
        for each in problems[:PROBLEMS_TOLD_MAX]
    ]
    first = problems[0]
    where = f"{first.node}: " if first.node else ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    raise InvalidInput(f"{where}{first.message}{more}", problems=told)


async def create(
    sides: Sides, tenant_id: UUID, user_id: UUID, document: Mapping[str, Any]
) -> StoredPipeline:
    """Never changed afterwards: what runs use must stay what it was.

    What the user has stored under that name already, and with that content, is not stored again.
    """
    parsed = parse_pipeline(document)
    async with sides.central.look() as tx:
        catalogue = await with_names(tx, await offered(tx, parsed.pipeline.steps))
    refuse([*parsed.problems, *validate(parsed.pipeline, catalogue)])
    stored = StoredPipeline(
        sides.new_id(), tenant_id, user_id, parsed.pipeline, document, sides.clock()
    )
    pool = await sides.pool_of(tenant_id)
    async with pool.begin() as tx:
        name = parsed.pipeline.name
        alike = await runs.pipelines_named(tx, tenant_id, user_id, name, limit=SAME_NAME_MAX)
        same = next((each for each in alike if each.document == document), None)
        if same is None:
            await runs.add_pipeline(tx, stored)
    return same or stored


async def pipeline_named(sides: Sides, tenant_id: UUID, user_id: UUID, text: str) -> UUID:
    """A pipeline by its id, or by its name: the user's newest."""
    try:
        return UUID(text)
    except ValueError:
        pass
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        found = await runs.pipelines_named(tx, tenant_id, user_id, text, limit=1)
    if not found:
        raise NotFound(
            f"there is no pipeline {text!r:.100}",
            hint="`comfyfleet pipeline list` shows those that there are.",
        )
    return found[0].id


async def get_pipeline(
    sides: Sides, tenant_id: UUID, user_id: UUID, pipeline_id: UUID
) -> StoredPipeline:
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        return await _own_pipeline(tx, tenant_id, user_id, pipeline_id)


async def _own_pipeline(
    tx: Tx, tenant_id: UUID, user_id: UUID, pipeline_id: UUID
) -> StoredPipeline:
    found = await runs.pipeline(tx, tenant_id, pipeline_id)
    if found is None or found.user_id != user_id or found.deleted_at is not None:
        raise NotFound(f"there is no pipeline {pipeline_id}")
    return found


async def delete_pipeline(sides: Sides, tenant_id: UUID, user_id: UUID, pipeline_id: UUID) -> None:
    """Its runs stay, and go on."""
    await get_pipeline(sides, tenant_id, user_id, pipeline_id)
    pool = await sides.pool_of(tenant_id)
    async with pool.begin() as tx:
        await runs.delete_pipeline(tx, pipeline_id, now=sides.clock())


async def names_of(
    sides: Sides, tenant_id: UUID, listed: Sequence[StoredRun]
) -> Mapping[UUID, str]:
    """Of the pipelines that runs were made with, deleted ones too."""
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        return await runs.names_of(tx, {each.pipeline_id for each in listed})


async def pipelines_of(
    sides: Sides, tenant_id: UUID, user_id: UUID, *, before: UUID | None = None, limit: int
) -> list[StoredPipeline]:
    """The newest first; go on with `before` = the last one's id."""
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        last = await _own_pipeline(tx, tenant_id, user_id, before) if before else None
        return await runs.pipelines_of(
            tx, tenant_id, user_id, before=last, limit=min(limit, PAGE_MAX)
        )


async def start_run(
    sides: Sides, tenant_id: UUID, user_id: UUID, pipeline_id: UUID, new: NewRun
) -> tuple[StoredRun, bool]:
    """The run, and whether it is new: the same idempotency key gives the same run."""
    pool = await sides.pool_of(tenant_id)
    made_with = await get_pipeline(sides, tenant_id, user_id, pipeline_id)
    await _check_variables(sides, made_with.pipeline, new.variables)
    run_id, now = sides.new_id(), sides.clock()
    stored = StoredRun(
        run=_run(sides, run_id, new),
        tenant_id=tenant_id,
        user_id=user_id,
        pipeline_id=pipeline_id,
        request_hash=new.request_hash,
        idempotency_key=new.idempotency_key,
        look_at=now,
        created_at=now,
        changed_at=now,
    )
    async with pool.begin() as tx:
        if not await runs.add_run(tx, stored):
            return await _same_run(tx, stored), False
        act = Act(sides, tx, stored, now)
        await act.record("started", pipeline_id=str(pipeline_id), **_told(stored.run))
    sides.news.tell_run(RUN_KIND)
    await journal.tell_audit(sides, pool)
    return stored, True


async def _check_variables(sides: Sides, pipeline: Pipeline, variables: Mapping[str, Any]) -> None:
    async with sides.central.look() as tx:
        facts = await facts_by_step(tx, pipeline)
    refuse(variable_problems(pipeline, variables, facts))


async def _same_run(tx: Tx, wanted: StoredRun) -> StoredRun:
    found = await runs.run_by_key(tx, wanted.tenant_id, wanted.idempotency_key or "")
    is_same = (
        found is not None
        and found.user_id == wanted.user_id
        and found.pipeline_id == wanted.pipeline_id
        and found.request_hash == wanted.request_hash
    )
    if found is None or not is_same:
        raise Conflict("idempotency_key was used for another request", field="idempotency_key")
    return found


def _run(sides: Sides, run_id: UUID, new: NewRun) -> PipelineRun:
    _check_number("base_candidates", new.base_candidates, BASE_CANDIDATES_MAX)
    usual = Limits(
        concurrent_jobs=sides.settings.pipeline_concurrent_jobs,
        bytes=sides.settings.pipeline_max_bytes,
    )
    return PipelineRun(
        id=run_id,
        base_candidates=new.base_candidates,
        target_folder=clean_folder(new.target_folder or f"runs/{run_id}"),
        variables=new.variables,
        limits=checked_limits(replace(usual, **new.limits)),
    )


def _check_number(name: str, number: int, most: int) -> None:
    if not 1 <= number <= most:
        raise InvalidInput(f"{name} must be from 1 to {most:,}, not {number}", field=name)


def checked_limits(limits: Limits) -> Limits:
    _check_number("concurrent_jobs", limits.concurrent_jobs, CONCURRENT_JOBS_MAX)
    for name in ("candidates", "tokens", "bytes"):
        value = getattr(limits, name)
        if value is not None and value < 0:
            raise InvalidInput(f"the limit of {name} can't be below zero", field=f"limits.{name}")
    return limits


def _told(run: PipelineRun) -> dict[str, Any]:
    return {
        "base_candidates": run.base_candidates,
        "target_folder": run.target_folder,
        "limits": told_limits(run.limits),
    }


def told_limits(limits: Limits) -> dict[str, Any]:
    return {
        "candidates": limits.candidates,
        "tokens": limits.tokens,
        "concurrent_jobs": limits.concurrent_jobs,
        "until": limits.until.isoformat() if limits.until else None,
        "bytes": limits.bytes,
    }


async def get_run(sides: Sides, tenant_id: UUID, user_id: UUID, run_id: UUID) -> StoredRun:
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        return await own_run(tx, tenant_id, user_id, run_id)


async def runs_of(
    sides: Sides,
    tenant_id: UUID,
    user_id: UUID,
    *,
    pipeline_id: UUID | None = None,
    before: UUID | None = None,
    limit: int,
) -> list[StoredRun]:
    """The newest first; go on with `before` = the last one's id."""
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        last = await own_run(tx, tenant_id, user_id, before) if before else None
        return await runs.runs_of(
            tx,
            tenant_id,
            user_id,
            pipeline_id=pipeline_id,
            before=last,
            limit=min(limit, PAGE_MAX),
        )


async def pause(sides: Sides, tenant_id: UUID, user_id: UUID, run_id: UUID) -> StoredRun:
    """What was submitted goes on; nothing more is."""
    return await _move(sides, tenant_id, user_id, run_id, RunStatus.PAUSED)


async def resume(sides: Sides, tenant_id: UUID, user_id: UUID, run_id: UUID) -> StoredRun:
    return await _move(sides, tenant_id, user_id, run_id, RunStatus.ACTIVE)


async def _move(
    sides: Sides, tenant_id: UUID, user_id: UUID, run_id: UUID, status: RunStatus
) -> StoredRun:
    async with acting(sides, tenant_id, user_id, run_id) as act:
        _refuse_cancelled(act)
        if act.stored.run.status != status:
            is_pause = status == RunStatus.PAUSED
            act.changes |= {"status": status, "pause_reason": "asked" if is_pause else None}
            await act.record("paused" if is_pause else "resumed")
    return await get_run(sides, tenant_id, user_id, run_id)


def _refuse_cancelled(act: Act) -> None:
    if act.stored.run.status == RunStatus.CANCELLED:
        raise Conflict("the run was cancelled, and stays so")


async def change(
    sides: Sides,
    tenant_id: UUID,
    user_id: UUID,
    run_id: UUID,
    *,
    variables: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    base_candidates: int | None = None,
) -> StoredRun:
    """Applies to what is submitted next. Variables replace those of the same name."""
    if variables is not None:
        run = (await get_run(sides, tenant_id, user_id, run_id)).run
        pipeline = await _pipeline_of(sides, tenant_id, user_id, run_id)
        await _check_variables(sides, pipeline, {**run.variables, **variables})
    async with acting(sides, tenant_id, user_id, run_id) as act:
        _refuse_cancelled(act)
        run = act.stored.run
        if variables is not None:
            act.changes["variables"] = {**run.variables, **variables}
        if limits:
            changed = checked_limits(replace(run.limits, **limits))
            act.changes |= runs.limit_columns(changed)
        if base_candidates is not None:
            _check_number("base_candidates", base_candidates, BASE_CANDIDATES_MAX)
            act.changes["base_candidates"] = base_candidates
        await act.record(
            "changed",
            variables=sorted(variables or ()),
            limits=_plain(limits or {}),
            base_candidates=base_candidates,
        )
    return await get_run(sides, tenant_id, user_id, run_id)


async def _pipeline_of(sides: Sides, tenant_id: UUID, user_id: UUID, run_id: UUID) -> Pipeline:
    """Of a run, also if it was deleted since."""
    pool = await sides.pool_of(tenant_id)
    async with pool.look() as tx:
        stored = await own_run(tx, tenant_id, user_id, run_id)
        made_with = await runs.pipeline(tx, tenant_id, stored.pipeline_id)
    if made_with is None:
        raise NotFound(f"there is no pipeline {stored.pipeline_id}")
    return made_with.pipeline


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in values.items()
    }


async def cancel(sides: Sides, tenant_id: UUID, user_id: UUID, run_id: UUID) -> StoredRun:
    """With what is queued; what runs is let end, and its candidates are kept."""
    async with acting(sides, tenant_id, user_id, run_id) as act:
        if act.stored.run.status != RunStatus.CANCELLED:
            queued = await jobs.queued_of(act.tx, run_id)
            for job_id in queued:
                await act.cancel_job(job_id)
            act.changes |= {"status": RunStatus.CANCELLED, "pause_reason": None}
            await act.record("cancelled", jobs_cancelled=len(queued))
    return await get_run(sides, tenant_id, user_id, run_id)


async def retry(
    sides: Sides, tenant_id: UUID, user_id: UUID, run_id: UUID, job_id: UUID | None = None
) -> list[UUID]:
    """One failed job, or all: their places are free, and the loop makes them anew."""
    async with acting(sides, tenant_id, user_id, run_id) as act:
        _refuse_cancelled(act)
        freed = await jobs.free_failed(act.tx, run_id, job_id)
        if job_id and not freed:
            raise NotFound(f"the run has no failed job {job_id}")
        if freed:
            await act.record("retried", jobs=[str(each) for each in freed])
    return freed

"""User actions: create pipelines; start, pause, change, cancel and retry runs; judge and compare
candidates.

Every action is done for a user. It raises NotFound for pipelines and runs of other users."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.api.graph_model import DocumentProblem
from comfyfleet.errors import Conflict, InvalidInput, LimitExceeded, NotFound, Refused
from comfyfleet.server.db import Tx
from comfyfleet.server.graphs.document_work import check_size, compute
from comfyfleet.server.graphs.environment import read_catalogue, with_offered_names
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.idempotency import hash_request, require_same_request
from comfyfleet.server.media import service as media
from comfyfleet.server.pipelines import decide, run_state, store, store_candidates
from comfyfleet.server.pipelines.decide import PairVote, next_pair
from comfyfleet.server.pipelines.judgements import VERDICT_EVENTS, set_status, set_verdict
from comfyfleet.server.pipelines.model import (
    START_SCORE,
    CandidateStatus,
    JudgedBy,
    PipelineCandidate,
    PipelineDefinition,
    PipelineRunStatus,
    RunLimits,
    StoredPipeline,
    StoredPipelineRun,
    StoredRun,
    WorkKey,
    clean_folder,
)
from comfyfleet.server.pipelines.parse import (
    media_variables,
    parse_pipeline,
    repeated_results,
    validate,
    variable_problems,
    with_our_spelling,
    with_parent_files,
)
from comfyfleet.server.pipelines.run_state import (
    PIPELINE_RUN_KIND,
    RunTransaction,
    facts_by_work,
    get_own_run,
    run_transaction,
)

PAGE_MAX = 200
SAME_NAME_MAX = 50  # maximum number of pipelines of the same name to compare with a new one
BASE_CANDIDATES_MAX = 100_000
CONCURRENT_JOBS_MAX = 100
# Limit for one run, because choosing a pair reads all votes of the run. A person gives a few
# hundred votes an hour.
VOTES_MAX = 50_000
PROBLEMS_SHOWN_MAX = 50


@dataclass(frozen=True, slots=True)
class NewPipelineRun:
    """The parameters of a new run. Missing limits are taken from the settings."""

    base_candidates: int
    variables: Mapping[str, Any] = field(default_factory=dict)
    target_folder: str | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    idempotency_key: str | None = None

    @property
    def request_hash(self) -> str:
        return hash_request(
            self.base_candidates, dict(self.variables), self.target_folder, dict(self.limits)
        )


def raise_problems(problems: Sequence[DocumentProblem]) -> None:
    """Raises a single error with all problems, each with its step and field."""
    if not problems:
        return
    details = [
        {
            "code": problem.code,
            "message": problem.message,
            "step": problem.node,
            "field": problem.port,
        }
        for problem in problems[:PROBLEMS_SHOWN_MAX]
    ]
    first = problems[0]
    where = f"{first.node}: " if first.node else ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    raise InvalidInput(f"{where}{first.message}{more}", problems=details)


async def create_pipeline(
    context: JobContext, tenant_id: UUID, user_id: UUID, document: Mapping[str, Any]
) -> StoredPipeline:
    """Stores a pipeline. It is never changed afterwards, because runs refer to it.

    If the user has a pipeline with the same name and document, returns that one."""
    document = with_our_spelling(document)
    parsed = await compute(tenant_id, document, partial(parse_pipeline, document))
    async with context.central.read() as tx:
        named = parsed.pipeline.works.values()
        catalogue = await with_offered_names(tx, await read_catalogue(tx, named))
    bound = with_parent_files(document, parsed.pipeline, catalogue)
    if bound is not document:
        document = bound
        parsed = await compute(tenant_id, document, partial(parse_pipeline, document))
    problems = await compute(tenant_id, document, partial(validate, parsed.pipeline, catalogue))
    raise_problems([*parsed.problems, *problems])
    stored = StoredPipeline(
        context.new_id(), tenant_id, user_id, parsed.pipeline, document, context.clock()
    )
    async with context.tenant_transaction(tenant_id) as tx:
        name = parsed.pipeline.name
        alike = await store.pipelines_named(tx, tenant_id, user_id, name, limit=SAME_NAME_MAX)
        same = next((candidate for candidate in alike if candidate.document == document), None)
        if same is None:
            await store.add_pipeline(tx, stored)
    return same or stored


async def pipeline_warnings(context: JobContext, stored: StoredPipeline) -> tuple[str, ...]:
    async with context.central.read() as tx:
        facts = await facts_by_work(tx, stored.pipeline)
    work = partial(repeated_results, stored.pipeline, facts)
    return await compute(stored.tenant_id, _templates(stored.pipeline), work)


def _templates(pipeline: PipelineDefinition) -> list[Mapping[str, Any]]:
    """Returns the properties of all steps and judges. Their total size determines how long it takes
    to fill in their templates."""
    return [work.properties for work in pipeline.works.values()]


async def least_cost(
    context: JobContext, owner: tuple[UUID, UUID], pipeline_id: UUID, base_candidates: int
) -> int:
    """Returns the minimum cost of a run: the price of the jobs that generate its base
    candidates."""
    stored = await get_pipeline(context, *owner, pipeline_id)
    async with context.central.read() as tx:
        facts = (await facts_by_work(tx, stored.pipeline)).get(WorkKey(0))
    jobs = math.ceil(base_candidates / stored.pipeline.steps[0].images_per_job)
    return jobs * facts.price_tokens if facts else 0


async def find_pipeline(context: JobContext, tenant_id: UUID, user_id: UUID, text: str) -> UUID:
    """Returns the id of a pipeline that is given by id or name. A name selects the user's newest
    pipeline with that name."""
    try:
        return UUID(text)
    except ValueError:
        pass
    async with context.tenant(tenant_id) as tx:
        matches = await store.pipelines_named(tx, tenant_id, user_id, text, limit=1)
    if not matches:
        raise NotFound(
            f"pipeline {text!r:.100} was not found",
            hint="List your pipelines with: comfyfleet pipeline list",
        )
    return matches[0].id


async def get_pipeline(
    context: JobContext, tenant_id: UUID, user_id: UUID, pipeline_id: UUID
) -> StoredPipeline:
    async with context.tenant(tenant_id) as tx:
        return await _own_pipeline(tx, tenant_id, user_id, pipeline_id)


async def _own_pipeline(
    tx: Tx, tenant_id: UUID, user_id: UUID, pipeline_id: UUID
) -> StoredPipeline:
    stored = await store.get_pipeline(tx, tenant_id, pipeline_id)
    if stored is None or stored.user_id != user_id or stored.deleted_at is not None:
        raise NotFound(f"pipeline {pipeline_id} was not found")
    return stored


async def delete_pipeline(
    context: JobContext, tenant_id: UUID, user_id: UUID, pipeline_id: UUID
) -> None:
    """Deletes a pipeline. Its runs continue."""
    await get_pipeline(context, tenant_id, user_id, pipeline_id)
    async with context.tenant_transaction(tenant_id) as tx:
        await store.delete_pipeline(tx, pipeline_id, now=context.clock())


async def pipeline_names(
    context: JobContext, tenant_id: UUID, listed: Sequence[StoredRun]
) -> Mapping[UUID, str]:
    """Returns the names of the runs' pipelines, including deleted ones."""
    async with context.tenant(tenant_id) as tx:
        return await store.names_of(tx, {run.pipeline_id for run in listed})


async def list_pipelines(
    context: JobContext, tenant_id: UUID, user_id: UUID, *, before: UUID | None = None, limit: int
) -> list[StoredPipeline]:
    """Returns a page of pipelines, newest first. `before` is the last id of the previous page."""
    async with context.tenant(tenant_id) as tx:
        last = await _own_pipeline(tx, tenant_id, user_id, before) if before else None
        return await store.list_pipelines(
            tx, tenant_id, user_id, before=last, limit=min(limit, PAGE_MAX)
        )


async def start_run(
    context: JobContext, tenant_id: UUID, user_id: UUID, pipeline_id: UUID, new: NewPipelineRun
) -> tuple[StoredRun, bool]:
    """Starts a run. Returns it and whether it is new: a repeated idempotency key returns the same
    run."""
    pool = await context.pool_of(tenant_id)
    made_with = await get_pipeline(context, tenant_id, user_id, pipeline_id)
    owner = tenant_id, user_id
    variables = await _checked_variables(context, owner, made_with.pipeline, new.variables)
    run_id, now = context.new_id(), context.clock()
    stored = StoredRun(
        run=_new_run(context, run_id, replace(new, variables=variables)),
        tenant_id=tenant_id,
        user_id=user_id,
        pipeline_id=pipeline_id,
        request_hash=new.request_hash,
        idempotency_key=new.idempotency_key,
        look_at=now,
        created_at=now,
        changed_at=now,
    )
    async with pool.transaction() as tx:
        if not await store.add_run(tx, stored):
            return await _existing_run(tx, stored), False
        act = RunTransaction(context, tx, stored, now)
        await act.record("started", pipeline_id=str(pipeline_id), **_run_data(stored.run))
    context.notifier.notify_run(PIPELINE_RUN_KIND)
    await run_state.flush_audit(context, pool)
    return stored, True


async def _checked_variables(
    context: JobContext,
    owner: tuple[UUID, UUID],
    pipeline: PipelineDefinition,
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the variables in the form that jobs accept, with the user's media replaced by file
    ids."""
    check_size(variables, "variables")
    async with context.central.read() as tx:
        facts = await facts_by_work(tx, pipeline)
    templates = _templates(pipeline)
    check = partial(variable_problems, pipeline, variables, facts)
    raise_problems(await compute(owner[0], templates, check))
    checked = dict(variables)
    media_names = await compute(owner[0], templates, partial(media_variables, pipeline, facts))
    if named := media_names & checked.keys():
        async with context.tenant(owner[0]) as tx:
            for name in sorted(named):
                checked[name] = await _as_file(tx, owner, name, checked[name])
    return checked


async def _as_file(tx: Tx, owner: tuple[UUID, UUID], name: str, value: Any) -> str:
    """Returns the id of the user's file for a variable that names a media item or an upload."""
    field = f"variables.{name}"
    try:
        named = UUID(str(value))
    except ValueError:
        raise InvalidInput(
            f"the variable {name!r} must be the id of a media item or an upload, not {value!r:.60}",
            field=field,
            hint=f"To upload a file, use --set {name}=@FILE.",
        ) from None
    try:
        item = await media.get_media(tx, *owner, named)
    except NotFound:
        return await _own_file(tx, owner, name, named)
    if item.original_file_id is None:
        raise Refused("the media item has expired", field=field)
    return str(item.original_file_id)


async def _own_file(tx: Tx, owner: tuple[UUID, UUID], name: str, file_id: UUID) -> str:
    tenant_id, user_id = owner
    try:
        file = await media.get_file(tx, tenant_id, file_id)
    except NotFound:
        file = None
    if file is None or file.user_id != user_id:
        raise InvalidInput(
            f"the variable {name!r}: file {file_id} was not found", field=f"variables.{name}"
        )
    return str(file.id)


async def _existing_run(tx: Tx, wanted: StoredRun) -> StoredRun:
    existing = await store.run_by_key(tx, wanted.tenant_id, wanted.idempotency_key or "")
    owner = wanted.user_id, wanted.pipeline_id
    is_own = existing is not None and (existing.user_id, existing.pipeline_id) == owner
    return require_same_request(existing if is_own else None, wanted.request_hash)


def _new_run(context: JobContext, run_id: UUID, new: NewPipelineRun) -> StoredPipelineRun:
    _check_number("base_candidates", new.base_candidates, BASE_CANDIDATES_MAX)
    usual = RunLimits(
        concurrent_jobs=context.settings.pipeline_concurrent_jobs,
        bytes=context.settings.pipeline_max_bytes,
    )
    return StoredPipelineRun(
        id=run_id,
        base_candidates=new.base_candidates,
        target_folder=clean_folder(new.target_folder or f"runs/{run_id}"),
        variables=new.variables,
        limits=checked_limits(replace(usual, **new.limits)),
    )


def _check_number(name: str, number: int, most: int) -> None:
    if not 1 <= number <= most:
        raise InvalidInput(f"{name} must be between 1 and {most:,}, not {number}", field=name)


def checked_limits(limits: RunLimits) -> RunLimits:
    _check_number("concurrent_jobs", limits.concurrent_jobs, CONCURRENT_JOBS_MAX)
    for name in ("candidates", "tokens", "bytes"):
        value = getattr(limits, name)
        if value is not None and value < 0:
            raise InvalidInput(f"the limit for {name} must be 0 or more", field=f"limits.{name}")
    return limits


def _run_data(run: StoredPipelineRun) -> dict[str, Any]:
    return {
        "base_candidates": run.base_candidates,
        "target_folder": run.target_folder,
        "limits": limits_data(run.limits),
    }


def limits_data(limits: RunLimits) -> dict[str, Any]:
    return {
        "candidates": limits.candidates,
        "tokens": limits.tokens,
        "concurrent_jobs": limits.concurrent_jobs,
        "until": limits.until.isoformat() if limits.until else None,
        "bytes": limits.bytes,
    }


async def get_run(context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID) -> StoredRun:
    async with context.tenant(tenant_id) as tx:
        return await get_own_run(tx, tenant_id, user_id, run_id)


async def list_runs(
    context: JobContext,
    tenant_id: UUID,
    user_id: UUID,
    *,
    pipeline_id: UUID | None = None,
    before: UUID | None = None,
    limit: int,
) -> list[StoredRun]:
    """Returns a page of runs, newest first. `before` is the last id of the previous page."""
    async with context.tenant(tenant_id) as tx:
        last = await get_own_run(tx, tenant_id, user_id, before) if before else None
        return await store.list_runs(
            tx,
            tenant_id,
            user_id,
            pipeline_id=pipeline_id,
            before=last,
            limit=min(limit, PAGE_MAX),
        )


async def pause_run(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID, *, actor: str | None = None
) -> StoredRun:
    """Pauses a run. Jobs already submitted continue. `actor` is the operator to record in the audit
    log, if one did it."""
    return await _set_run_status(
        context, tenant_id, user_id, run_id, PipelineRunStatus.PAUSED, actor=actor
    )


async def resume_run(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID
) -> StoredRun:
    return await _set_run_status(context, tenant_id, user_id, run_id, PipelineRunStatus.ACTIVE)


async def _set_run_status(
    context: JobContext,
    tenant_id: UUID,
    user_id: UUID,
    run_id: UUID,
    status: PipelineRunStatus,
    *,
    actor: str | None = None,
) -> StoredRun:
    async with run_transaction(context, tenant_id, user_id, run_id, actor=actor) as act:
        _refuse_cancelled(act)
        if act.stored.run.status != status:
            is_pause = status == PipelineRunStatus.PAUSED
            act.changes |= {"status": status, "pause_reason": "asked" if is_pause else None}
            await act.record("paused" if is_pause else "resumed")
    return await get_run(context, tenant_id, user_id, run_id)


def _refuse_cancelled(act: RunTransaction) -> None:
    if act.stored.run.status == PipelineRunStatus.CANCELLED:
        raise Conflict("the run was cancelled and can't be changed")


async def change_run(
    context: JobContext,
    tenant_id: UUID,
    user_id: UUID,
    run_id: UUID,
    *,
    variables: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    base_candidates: int | None = None,
) -> StoredRun:
    """Changes a run for jobs that are submitted later. Variables replace existing ones of the same
    name."""
    if variables is not None:
        run = (await get_run(context, tenant_id, user_id, run_id)).run
        pipeline = await _pipeline_of(context, tenant_id, user_id, run_id)
        together = {**run.variables, **variables}
        checked = await _checked_variables(context, (tenant_id, user_id), pipeline, together)
        variables = {name: checked[name] for name in variables}
    async with run_transaction(context, tenant_id, user_id, run_id) as act:
        _refuse_cancelled(act)
        run = act.stored.run
        if variables is not None:
            together = {**run.variables, **variables}
            check_size(together, "variables")  # another request may have added variables
            act.changes["variables"] = together
        if limits:
            changed = checked_limits(replace(run.limits, **limits))
            act.changes |= store.limit_columns(changed)
        if base_candidates is not None:
            _check_number("base_candidates", base_candidates, BASE_CANDIDATES_MAX)
            act.changes["base_candidates"] = base_candidates
        await act.record(
            "changed",
            variables=sorted(variables or ()),
            limits=_plain(limits or {}),
            base_candidates=base_candidates,
        )
    return await get_run(context, tenant_id, user_id, run_id)


async def _pipeline_of(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID
) -> PipelineDefinition:
    """Returns the pipeline of a run, even if it has been deleted."""
    async with context.tenant(tenant_id) as tx:
        stored = await get_own_run(tx, tenant_id, user_id, run_id)
        made_with = await store.get_pipeline(tx, tenant_id, stored.pipeline_id)
    if made_with is None:
        raise NotFound(f"pipeline {stored.pipeline_id} was not found")
    return made_with.pipeline


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in values.items()
    }


async def cancel_run(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID, *, actor: str | None = None
) -> StoredRun:
    """Cancels a run and its queued jobs. Running jobs finish, and their candidates are kept.

    `actor` is the operator to record in the audit log, if one did it."""
    async with run_transaction(context, tenant_id, user_id, run_id, actor=actor) as act:
        if act.stored.run.status != PipelineRunStatus.CANCELLED:
            queued = await store_candidates.queued_of(act.tx, run_id)
            for job_id in queued:
                await act.cancel_job(job_id)
            act.changes |= {"status": PipelineRunStatus.CANCELLED, "pause_reason": None}
            await act.record("cancelled", jobs_cancelled=len(queued))
    return await get_run(context, tenant_id, user_id, run_id)


async def retry_jobs(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID, job_id: UUID | None = None
) -> list[UUID]:
    """Marks one failed job or all of them for a retry, so that the generator submits new jobs in
    their place."""
    async with run_transaction(context, tenant_id, user_id, run_id) as act:
        _refuse_cancelled(act)
        freed = await store_candidates.release_failed(act.tx, run_id, job_id)
        if job_id and not freed:
            raise NotFound(f"the run has no failed job {job_id}")
        unjudged = [job.parent for job in freed if job.is_judge and job.parent]
        await store_candidates.set_judge_result(act.tx, unjudged, score=None, error=None)
        if freed:
            await act.record("retried", jobs=[str(job.job_id) for job in freed])
    return [job.job_id for job in freed]


class CandidateRef(NamedTuple):
    """A candidate, and the user who acts on it."""

    tenant_id: UUID
    user_id: UUID
    run_id: UUID
    candidate_id: UUID


async def judge_candidate(
    context: JobContext, ref: CandidateRef, verdict: CandidateStatus
) -> PipelineCandidate:
    """Records a person's judgment, which takes precedence over a judge's verdict. Repeating it has
    no effect. Rejecting a candidate cancels the queued jobs of its branch."""
    if verdict not in VERDICT_EVENTS:
        raise InvalidInput(
            f"a candidate can't be judged as {verdict}; undo its last judgment instead"
        )
    async with run_transaction(context, ref.tenant_id, ref.user_id, ref.run_id) as act:
        candidate = await _get_candidate(act, ref.candidate_id)
        if (candidate.status, candidate.judged_by) != (verdict, JudgedBy.PERSON):
            await set_verdict(act, candidate, verdict, JudgedBy.PERSON)
        return await _get_candidate(act, ref.candidate_id)


async def _get_candidate(act: RunTransaction, candidate_id: UUID) -> PipelineCandidate:
    candidate = await store_candidates.get_candidate(act.tx, act.stored.id, candidate_id)
    if candidate is None:
        raise NotFound(f"candidate {candidate_id} was not found")
    return candidate


async def undo_judgement(context: JobContext, ref: CandidateRef) -> PipelineCandidate:
    """Undoes the last judgment of a candidate."""
    async with run_transaction(context, ref.tenant_id, ref.user_id, ref.run_id) as act:
        candidate = await _get_candidate(act, ref.candidate_id)
        judgements = await store.last_judgements(act.tx, candidate.id, limit=2)
        if not judgements:
            raise Conflict("this candidate has no judgment to undo")
        last, judged_by = judgements[0], judgements[1].judged_by if len(judgements) > 1 else None
        await set_status(act, candidate, last.before, judged_by)
        await store.undo_judgement(act.tx, last.id, now=act.now)
        stopped = last.before == CandidateStatus.REJECTED and await act.cancel_unneeded()
        await act.record(
            "undone",
            candidate_id=str(candidate.id),
            before=candidate.status,
            after=last.before,
            judged_by=judged_by,
            jobs_cancelled=int(stopped),
        )
        return await _get_candidate(act, ref.candidate_id)


class ChosenPair(NamedTuple):
    first: PipelineCandidate
    second: PipelineCandidate
    votes: int  # votes in the step of the pair
    votes_enough: int

    @property
    def candidates(self) -> tuple[PipelineCandidate, PipelineCandidate]:
        return self.first, self.second


async def pick_pair(
    context: JobContext,
    tenant_id: UUID,
    user_id: UUID,
    run_id: UUID,
    *,
    step: int | None = None,
    skipped: Sequence[tuple[UUID, UUID]] = (),
) -> ChosenPair | None:
    """Picks two candidates to compare, from the given step, or from the deepest step that has two.

    Skipped pairs count as compared, so they come up last."""
    async with context.tenant(tenant_id) as tx:
        await get_own_run(tx, tenant_id, user_id, run_id)
        tree = await store_candidates.tree_of(tx, run_id)
        votes = await store.votes_of(tx, run_id)
        passed = [PairVote(run_id, one, other) for one, other in skipped]
        steps = sorted({candidate.step for candidate in tree.values()}, reverse=True)
        for number in steps if step is None else [step]:
            alike = [candidate for candidate in tree.values() if candidate.step == number]
            chosen = next_pair(alike, [*votes, *passed])
            if chosen:
                return await _whole_pair(tx, run_id, chosen, alike, votes)
    return None


async def _whole_pair(
    tx: Tx,
    run_id: UUID,
    chosen: tuple[PipelineCandidate, PipelineCandidate],
    alike: Sequence[PipelineCandidate],
    votes: Sequence[PairVote],
) -> ChosenPair | None:
    first, second = [
        await store_candidates.get_candidate(tx, run_id, candidate.id) for candidate in chosen
    ]
    if first is None or second is None:
        return None
    ids = {candidate.id for candidate in alike}
    votes_given = sum(vote.winner in ids for vote in votes)
    return ChosenPair(first, second, votes=votes_given, votes_enough=decide.votes_enough(alike))


async def add_vote(
    context: JobContext,
    tenant_id: UUID,
    user_id: UUID,
    run_id: UUID,
    *,
    vote_id: UUID,
    winner: UUID,
    loser: UUID,
    is_tie: bool = False,
) -> dict[UUID, float]:
    """Adds a vote and returns the new scores of both candidates. Repeating a vote has no effect."""
    if winner == loser:
        raise InvalidInput("a candidate can't be compared with itself", field="loser")
    async with run_transaction(context, tenant_id, user_id, run_id) as act:
        one, other = await _get_candidate(act, winner), await _get_candidate(act, loser)
        if one.step != other.step:
            raise InvalidInput("only candidates of the same step can be compared", field="loser")
        vote = PairVote(vote_id, winner, loser, is_tie)
        if await store.add_vote(act.tx, _vote_row(act, vote)):
            if await store.count_votes(act.tx, run_id) > VOTES_MAX:
                raise LimitExceeded(f"a run can have at most {VOTES_MAX:,} votes")
            scores = decide.apply_vote({winner: one.score, loser: other.score}, vote)
            await store_candidates.set_scores(act.tx, scores)
            await act.record(
                "voted",
                vote_id=str(vote_id),
                winner=str(winner),
                loser=str(loser),
                is_tie=is_tie,
                scores={str(candidate_id): score for candidate_id, score in scores.items()},
            )
            return scores
        before = await store.get_vote(act.tx, run_id, vote_id)
        if before is None or before[0] != vote:
            raise Conflict("this id was already used for another vote", field="id")
        return {winner: one.score, loser: other.score}


def _vote_row(act: RunTransaction, vote: PairVote) -> dict[str, object]:
    return {
        "id": vote.id,
        "tenant_id": act.stored.tenant_id,
        "run_id": act.stored.id,
        "winner_id": vote.winner,
        "loser_id": vote.loser,
        "is_tie": vote.is_tie,
        "created_at": act.now,
    }


async def undo_vote(
    context: JobContext, tenant_id: UUID, user_id: UUID, run_id: UUID, vote_id: UUID
) -> dict[UUID, float]:
    """Undoes a vote, and computes the scores again from the other votes. Repeating it has no
    effect."""
    async with run_transaction(context, tenant_id, user_id, run_id) as act:
        stored = await store.get_vote(act.tx, run_id, vote_id)
        if stored is None:
            raise NotFound(f"vote {vote_id} was not found")
        vote, counts = stored
        if counts:
            await store.undo_vote(act.tx, vote_id, now=act.now)
            scores = decide.replay_votes(await store.votes_of(act.tx, run_id))
            await store_candidates.reset_scores(act.tx, run_id, START_SCORE)
            await store_candidates.set_scores(act.tx, scores)
            await act.record("vote_undone", vote_id=str(vote_id))
        one, other = await _get_candidate(act, vote.winner), await _get_candidate(act, vote.loser)
        return {one.id: one.score, other.id: other.score}

"""Applies decisions about graph runs. Each decision is applied in a single transaction under the
run's lock.

A decision is based on the state of the run at the time of the read. If another process has changed
the run since then, a new decision is made. Prompts are built before the transaction, because
building them may require reads from object storage."""

import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID, uuid5

from comfyfleet.api.values import clean, text_of
from comfyfleet.errors import (
    Conflict,
    FleetError,
    NotFound,
    QueueFull,
    Unavailable,
    WorkflowWithdrawn,
)
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.errors import log_level_of
from comfyfleet.server.graphs import store, store_executions
from comfyfleet.server.graphs.decide import next_actions, too_dear_message
from comfyfleet.server.graphs.draft import DecisionTooLong, RunDecision
from comfyfleet.server.graphs.environment import PROVIDER, EnvironmentCache
from comfyfleet.server.graphs.plan import RunPlan
from comfyfleet.server.graphs.progress import RunProgress
from comfyfleet.server.graphs.run import (
    CancelJob,
    Environment,
    Event,
    ExecutionKey,
    FailureCause,
    GraphRunState,
    GraphRunStatus,
    JobDone,
    JobFailed,
    RunRow,
    StartJob,
    job_id,
)
from comfyfleet.server.graphs.snapshot import load_plan, load_run
from comfyfleet.server.jobs import reuse, submit
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.model import Job, JobOutput, JobSpec
from comfyfleet.server.jobs.outbox import flush
from comfyfleet.server.jobs.reuse import ReusableResult
from comfyfleet.server.jobs.submit import JobRequest, resolve
from comfyfleet.server.media.model import File
from comfyfleet.server.notifications import webhooks
from comfyfleet.server.notifications.model import EndOfJob, WebhookEvent
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.turns import FairThreads

# Number of threads for reports about large runs and for their reruns, and the maximum number of
# calls per user that wait for a thread.
AT_ONCE_MAX, WAITING_PER_USER_MAX = 2, 20
large_runs = FairThreads("graphs", AT_ONCE_MAX, waiting_each_max=WAITING_PER_USER_MAX)
# Maximum number of a tenant's decisions about large runs that wait for a thread. In practice, other
# limits on runs and requests are reached first.
WAITING_PER_TENANT_MAX = 10_000
decisions = FairThreads("decisions", AT_ONCE_MAX, waiting_each_max=WAITING_PER_TENANT_MAX)
SLICE_MAX = 250  # Maximum number of notified executions, and of started jobs, per decision.
IN_LOOP_EXECUTIONS_MAX = 500  # Decisions about larger runs are made in a thread.
IN_LOOP_STEPS_MAX = 20_000  # Decisions with more expression steps are made in a thread.
READS_MAX = 5  # Maximum attempts to read a run while other processes change it.
RUNS_KEPT_MAX = 500
ENDED_RUNS_KEPT_MAX = 50  # Clients may read a run a few more times after its end.
RECORDS_KEPT_MAX = 200_000


class LoadedRun(NamedTuple):
    head: RunRow
    plan: RunPlan
    run: GraphRunState
    revision: int

    @property
    def jobs(self) -> Mapping[UUID, tuple[ExecutionKey, int]]:
        """The execution and the attempt of each job in flight, by job id."""
        keys = self.run.in_flight or _stopping_keys(self.run)
        attempts = ((key, self.run.record(key).attempt) for key in keys)
        return {job_id(self.run.id, key, attempt): (key, attempt) for key, attempt in attempts}


def _stopping_keys(run: GraphRunState) -> frozenset[ExecutionKey]:
    """Returns the executions of an ended run whose jobs are still being stopped. They are no longer
    in flight."""
    if not run.status.is_over:
        return frozenset()
    return frozenset(key for key, record in run.records.items() if record.status == "stopping")


class RunCache:
    def __init__(self) -> None:
        self._loaded: OrderedDict[UUID, LoadedRun] = OrderedDict()
        self._ended: OrderedDict[UUID, None] = OrderedDict()
        self._records = 0
        self._shown_percents: OrderedDict[UUID, tuple[float, float]] = OrderedDict()

    def get_cached(self, tenant_id: UUID, run_id: UUID) -> LoadedRun | None:
        """Returns the cached run, which may be outdated. The revision must be checked before a
        write."""
        loaded = self._loaded.get(run_id)
        return loaded if loaded and loaded.head.tenant_id == tenant_id else None

    async def get(self, tx: Tx, tenant_id: UUID, run_id: UUID) -> LoadedRun:
        loaded = self._loaded.get(run_id)
        revision = await store.revision_of(tx, tenant_id, run_id)
        if revision is None:
            raise NotFound(f"graph run {run_id} was not found")
        if loaded is None or loaded.revision != revision:
            loaded = await self._read(tx, tenant_id, run_id, loaded)
        self.keep(loaded)
        return loaded

    async def _read(
        self, tx: Tx, tenant_id: UUID, run_id: UUID, loaded: LoadedRun | None
    ) -> LoadedRun:
        for _ in range(READS_MAX):
            head = await store.get_run(tx, tenant_id, run_id)
            if head is None:
                raise NotFound(f"graph run {run_id} was not found")
            records = await store_executions.read_records(tx, head)
            if len(records) < store_executions.ROWS_PER_PAGE:
                break  # A single statement has read all records, so they are consistent.
            if await store.revision_of(tx, tenant_id, run_id) == head.revision:
                break
        else:
            raise Unavailable(f"other requests are changing graph run {run_id}; try again")
        if loaded is not None and not head.is_expired:
            plan = loaded.plan
        else:
            plan = await decisions.run(tenant_id, partial(load_plan, head.snapshot))
        work = partial(load_run, plan, head.run, records, head.cut)
        is_large = len(records) > IN_LOOP_EXECUTIONS_MAX
        run = await decisions.run(tenant_id, work) if is_large else work()
        return LoadedRun(head, plan, run, head.revision)

    def keep(self, loaded: LoadedRun) -> None:
        self.drop(loaded.head.id)
        self._loaded[loaded.head.id] = loaded
        self._records += len(loaded.run.records)
        if loaded.run.status.is_over:
            self._ended[loaded.head.id] = None
        while len(self._ended) > ENDED_RUNS_KEPT_MAX:
            self.drop(next(iter(self._ended)))
        while len(self._loaded) > 1 and (
            len(self._loaded) > RUNS_KEPT_MAX or self._records > RECORDS_KEPT_MAX
        ):
            self.drop(next(iter(self._loaded)))

    def keep_monotonic(self, run: GraphRunState, progress: RunProgress) -> RunProgress:
        """Replaces the progress of an active run with the highest value so far. The calculated
        value can decrease when lists grow or jobs restart."""
        if run.status.is_over:
            self._shown_percents.pop(run.id, None)
            return progress
        before = self._shown_percents.pop(run.id, (0.0, 0.0))
        percents = (
            max(progress.overall_percent, before[0]),
            max(progress.weighted_percent, before[1]),
        )
        self._shown_percents[run.id] = percents
        while len(self._shown_percents) > RUNS_KEPT_MAX:
            self._shown_percents.popitem(last=False)
        return progress._replace(overall_percent=percents[0], weighted_percent=percents[1])

    def drop(self, run_id: UUID) -> None:
        self._ended.pop(run_id, None)
        old = self._loaded.pop(run_id, None)
        if old:
            self._records -= len(old.run.records)


log = logging.getLogger(__name__)
GRAPH_RUN_KIND = "graph"
TRIES_MAX = 20
STAGE = "production"
NO_TOKENS = "Insufficient token balance."

Decide: TypeAlias = Callable[[LoadedRun, Environment], Awaitable[RunDecision]]


class CutRuns:
    """The runs whose last decision in this process stopped at the slice limit, by tenant. Tenants
    take turns."""

    def __init__(self) -> None:
        self._runs: OrderedDict[UUID, OrderedDict[UUID, None]] = OrderedDict()
        self._wake: Callable[[], None] | None = None

    def subscribe(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def add(self, tenant_id: UUID, run_id: UUID) -> None:
        self._runs.setdefault(tenant_id, OrderedDict())[run_id] = None
        if self._wake is not None:
            self._wake()

    def __contains__(self, run_id: UUID) -> bool:
        return any(run_id in runs for runs in self._runs.values())

    def __bool__(self) -> bool:
        return bool(self._runs)

    def take_one_per_tenant(self) -> list[tuple[UUID, UUID]]:
        """Removes the longest-waiting run of each tenant, and returns the tenant and run ids."""
        next_runs = []
        for tenant_id, runs in list(self._runs.items()):
            run_id, _ = runs.popitem(last=False)
            next_runs.append((tenant_id, run_id))
            if not runs:
                del self._runs[tenant_id]
        return next_runs


@dataclass(frozen=True)
class GraphContext:
    """The dependencies of graph runs. Each process has one instance."""

    context: JobContext
    runs: RunCache = field(default_factory=RunCache)
    environment: EnvironmentCache = field(default_factory=EnvironmentCache)
    cut: CutRuns = field(default_factory=CutRuns)


async def decide_slice(
    loaded: LoadedRun, run: GraphRunState, events: Sequence[Event], environment: Environment
) -> RunDecision:
    """Computes one slice of a decision. A slice that takes too long for the event loop is computed
    in a thread."""
    decide = partial(next_actions, loaded.plan, run, events, environment, slice_max=SLICE_MAX)
    if run.open_count + len(run.records) <= IN_LOOP_EXECUTIONS_MAX:
        try:
            return decide(in_loop_max=IN_LOOP_STEPS_MAX)
        except DecisionTooLong:
            pass
    return await decisions.run(loaded.head.tenant_id, decide)


@dataclass
class _Outcome:
    loaded: LoadedRun
    jobs: list[Job] = field(default_factory=list)
    outbox_ids: list[int] = field(default_factory=list)


async def apply_decision(
    graphs: GraphContext,
    tenant_id: UUID,
    run_id: UUID,
    decide: Decide,
    *,
    handled_outbox: Sequence[int] = (),
    fresh: bool = False,
) -> LoadedRun:
    """Makes and applies a decision, and returns the changed run. The same transaction deletes the
    handled outbox rows."""
    context = graphs.context
    pool = await context.pool_of(tenant_id)
    # The cached run may be outdated. It is only used if outbox rows are deleted, because their
    # transaction then checks the run's revision.
    loaded = graphs.runs.get_cached(tenant_id, run_id) if handled_outbox else None
    for _ in range(TRIES_MAX):
        if loaded is None:
            async with pool.read() as tx:
                loaded = await graphs.runs.get(tx, tenant_id, run_id)
        environment = await graphs.environment.now(context, tenant_id, fresh=fresh)
        step = _DecisionApplier(
            graphs, pool, loaded, environment, await decide(loaded, environment), handled_outbox
        )
        outcome = await step.commit()
        if outcome is not None:
            count_end(graphs, loaded.run.status, outcome.loaded.run.status)
            await _follow_up(graphs, pool, outcome)
            return outcome.loaded
        graphs.runs.drop(run_id)
        loaded = None
    raise Conflict(f"other requests are changing graph run {run_id}; try again")


def count_end(graphs: GraphContext, before: GraphRunStatus, after: GraphRunStatus) -> None:
    if after.is_over and not before.is_over:
        graphs.context.run_metrics.graph_runs.labels(after).inc()


async def _follow_up(graphs: GraphContext, pool: Database, outcome: _Outcome) -> None:
    graphs.runs.keep(outcome.loaded)
    graphs.context.notifier.tell(outcome.loaded.head.id)
    if not outcome.jobs:
        return
    try:
        await flush(graphs.context, pool, outcome.jobs, outcome.outbox_ids)
    except Unavailable as error:
        log.log(
            log_level_of(error),
            "jobs of graph run %s could not be queued yet and will be retried: %s",
            outcome.loaded.head.id,
            error.message,
        )


@dataclass(frozen=True)
class _DecisionApplier:
    graphs: GraphContext
    pool: Database
    loaded: LoadedRun
    environment: Environment
    decision: RunDecision
    handled_outbox: Sequence[int]

    async def commit(self) -> _Outcome | None:
        """Applies the decision in one transaction. Returns None if the run has changed since the
        read."""
        is_paused = self.decision.run.paused_at is not None
        is_idle = (
            not self.decision.changed
            and not self.decision.actions
            and is_paused == (self.loaded.run.paused_at is not None)
        )
        if is_idle and not self.handled_outbox:
            return _Outcome(self.loaded)
        specs, refused = await self._resolve_jobs()
        head, kept_since = self.loaded.head, None
        if reuse.asks_for_reuse(specs):
            kept_since = await reuse.files_kept_since(self.graphs.context, head.tenant_id)
        async with self.pool.transaction() as tx:
            if await store.lock_revision(tx, head.tenant_id, head.id) != self.loaded.revision:
                return None
            outcome = _Outcome(self.loaded)
            if not is_idle:
                await self._apply(tx, specs, refused, outcome, kept_since)
            await jobs.delete_outbox(tx, self.handled_outbox)
        return outcome

    async def _resolve_jobs(self) -> tuple[dict[UUID, JobSpec], list[JobFailed]]:
        """Resolves the jobs to start. Returns the specs of these jobs, and events for the refused
        ones."""
        head, specs, refused = self.loaded.head, {}, []
        lookup = self.graphs.environment.lookup(self.graphs.context)
        for action in _start_actions(self.decision):
            try:
                request = job_request_of(action, self.environment, head.user_id)
                spec = await resolve(
                    self.graphs.context, head.tenant_id, request, known=await lookup.get(request)
                )
            except (Unavailable, QueueFull):
                raise
            except FleetError as error:
                is_withdrawn = isinstance(error, WorkflowWithdrawn)
                cause = FailureCause.WITHDRAWN if is_withdrawn else FailureCause.REFUSED
                refused.append(_refusal(action, error.message, cause))
                continue
            specs[action.job_id] = replace(
                spec, price_tokens=action.price_tokens, run_kind=GRAPH_RUN_KIND, run_id=head.id
            )
        if specs:
            specs = await submit.check_admission(self.graphs.context, head.tenant_id, specs)
        return specs, refused

    async def _apply(
        self,
        tx: Tx,
        specs: Mapping[UUID, JobSpec],
        refused: Sequence[JobFailed],
        outcome: _Outcome,
        kept_since: datetime | None,
    ) -> None:
        now, tenant_id = self.graphs.context.clock(), self.loaded.head.tenant_id
        if self.decision.actions:
            # Locks the jobs before the wallet. The end of a job uses the same order, which prevents
            # deadlocks.
            await jobs.lock(tx, tenant_id, list(self.loaded.jobs))
        results = await reuse.find_results(tx, tenant_id, specs, kept_since=kept_since, now=now)
        await self._cancel(tx, self.decision, outcome)
        unmatched = {job_id: spec for job_id, spec in specs.items() if job_id not in results}
        affordable, unpaid = await self._split_affordable(tx, unmatched)
        if affordable:
            most = self.graphs.context.active_max
            added, outbox_ids = await jobs.submit(
                tx, tenant_id, affordable, now=now, active_max=most
            )
            outcome.jobs += added
            outcome.outbox_ids += outbox_ids
        reused = self._reused(results)
        decision = await self._decide_further(tx, [*reused, *refused, *unpaid], outcome)
        outcome.loaded = await write_decision(self.graphs, tx, self.loaded, decision)

    async def _split_affordable(
        self, tx: Tx, specs: Mapping[UUID, JobSpec]
    ) -> tuple[dict[UUID, JobSpec], list[JobFailed]]:
        """Splits the jobs, in the order of the decision, into affordable ones, which the wallet
        covers, and refused ones."""
        if not any(spec.price_tokens for spec in specs.values()):
            return dict(specs), []
        head = self.loaded.head
        wallet = await ledger.lock_wallet(
            tx, head.tenant_id, head.user_id, now=self.graphs.context.clock()
        )
        balance, paid, unpaid = wallet.balance, {}, []
        room = self._tokens_left()
        for action in _start_actions(self.decision):
            spec = specs.get(action.job_id)
            if spec is None:
                continue
            if room is not None and spec.price_tokens > room:
                # The decision allowed this job only because it might have reused a free result.
                most = self.decision.run.max_tokens
                message = too_dear_message(most, (most or 0) - room, spec.price_tokens)
                unpaid.append(_refusal(action, message, FailureCause.REFUSED))
                continue
            room = None if room is None else room - spec.price_tokens
            if spec.price_tokens <= balance:
                balance -= spec.price_tokens
                paid[action.job_id] = spec
            else:
                unpaid.append(_refusal(action, NO_TOKENS, FailureCause.NO_TOKENS))
        return paid, unpaid

    def _tokens_left(self) -> int | None:
        """Returns the tokens that the run can spend on this decision's jobs, or None if it has no
        limit."""
        run = self.decision.run
        if run.max_tokens is None:
            return None
        prices = sum(action.price_tokens for action in _start_actions(self.decision))
        return run.max_tokens - (run.tokens - prices)

    def _reused(self, results: Mapping[UUID, ReusableResult]) -> list[JobDone]:
        return [
            JobDone(
                action.key,
                action.attempt,
                job_output(result.job, result.files),
                reused_from=result.source,
            )
            for action in _start_actions(self.decision)
            if (result := results.get(action.job_id))
        ]

    async def _decide_further(
        self, tx: Tx, events: Sequence[JobDone | JobFailed], outcome: _Outcome
    ) -> RunDecision:
        """Continues the decision with the events of reused results and refused jobs. This doesn't
        start more jobs."""
        if not events:
            return self.decision
        environment = replace(self.environment, in_queue_max=0)
        further = await decide_slice(self.loaded, self.decision.run, events, environment)
        await self._cancel(tx, further, outcome)
        changed = dict.fromkeys((*self.decision.changed, *further.changed))
        return RunDecision((*self.decision.actions, *further.actions), further.run, tuple(changed))

    async def _cancel(self, tx: Tx, decision: RunDecision, outcome: _Outcome) -> None:
        context, tenant_id = self.graphs.context, self.loaded.head.tenant_id
        for action in decision.actions:
            if not isinstance(action, CancelJob):
                continue
            try:
                job, outbox_ids = await jobs.cancel(
                    tx, tenant_id, action.job_id, new_id=context.new_id, now=context.clock()
                )
            except NotFound:
                continue  # The job was refused in this decision, so it doesn't exist.
            outcome.jobs = [other for other in outcome.jobs if other.id != job.id] + [job]
            outcome.outbox_ids += outbox_ids


async def write_decision(
    graphs: GraphContext, tx: Tx, loaded: LoadedRun, decision: RunDecision
) -> LoadedRun:
    """Writes the state of a run after a decision. Enqueues the webhooks for the run's end and for
    new questions exactly once, because no other transaction can create the same revision."""
    context, run, head = graphs.context, decision.run, loaded.head
    now, revision = context.clock(), loaded.revision + 1
    await store_executions.write_run(tx, head, run, decision.changed, revision=revision, now=now)
    head = replace(
        head,
        status=run.status,
        revision=revision,
        tokens=run.tokens,
        max_tokens=run.max_tokens,
        error=run.error,
        outputs=run.outputs,
        changed_at=now,
        ended_at=now if run.status.is_over else None,
        deadline_at=run.deadline_at,
        paused_at=run.paused_at,
    )
    after = LoadedRun(head, loaded.plan, run, revision)
    if events := run_events(loaded, after, decision.changed):
        await webhooks.enqueue_all(
            tx, head.tenant_id, head.user_id, events, new_id=context.new_id, now=now
        )
    return after


def run_events(
    before: LoadedRun, after: LoadedRun, changed: Sequence[ExecutionKey]
) -> list[EndOfJob]:
    """Returns the webhook events for a change of a run: its end, or one event per new question."""
    run, head = after.run, after.head
    common = {"run_id": str(run.id), "graph_id": str(head.graph_id), "version": head.graph_version}
    if run.status.is_over:
        return [] if before.run.status.is_over else [_end_event(after, common)]
    new_questions = [
        key
        for key in changed
        # As long as a question is open, it is the same object. A new question is a new object.
        if key in run.asking and run.record(key).question is not before.run.record(key).question
    ]
    return [_question_event(after, key, common) for key in sorted(new_questions)]


def _end_event(after: LoadedRun, common: Mapping[str, Any]) -> EndOfJob:
    run, head = after.run, after.head
    is_failed = run.status == GraphRunStatus.FAILED
    event = WebhookEvent.GRAPH_RUN_FAILED if is_failed else WebhookEvent.GRAPH_RUN_ENDED
    payload = {
        **common,
        "status": run.status,
        "tokens": run.tokens,
        "error": {"node": run.error.node, "message": run.error.message} if run.error else None,
        "ended_at": head.ended_at.isoformat() if head.ended_at else None,
    }
    return EndOfJob(_event_id(after, event), event, payload)


def _question_event(after: LoadedRun, key: ExecutionKey, common: Mapping[str, Any]) -> EndOfJob:
    question = after.run.record(key).question
    payload = {
        **common,
        "node": key.node,
        "index": list(key.at),
        "message": question.message if question else None,
        "choices": list(question.choices) if question else [],
    }
    event = WebhookEvent.GRAPH_RUN_ASKS
    return EndOfJob(_event_id(after, f"{event}/{key}"), event, payload)


def _event_id(after: LoadedRun, name: str) -> UUID:
    """Returns the id of an event. The id depends on the revision, because a run can end again after
    a retry."""
    return uuid5(after.head.id, f"{name}/{after.revision}")


_PICTURES = "image/"


def job_output(job: Job, files: Mapping[UUID, File]) -> dict[str, Any]:
    """Builds the result of a job: `{images, files, width, height, text, json, values, …}`. It
    contains references to the files."""
    outputs = [
        _output_reference(output, files[output.file_id])
        for output in job.outputs
        if output.file_id in files
    ]
    pictures = [output for output in outputs if output["mime_type"].startswith(_PICTURES)]
    first = pictures[0] if pictures else {}
    return {
        "images": pictures,
        "files": outputs,
        "width": first.get("width") or 0,
        "height": first.get("height") or 0,
        **shown_values(job),
        "prompt_id": job.provider_job_id or "",
        "execution_time": job.result.execution_seconds or 0.0,
    }


def shown_values(job: Job) -> dict[str, Any]:
    """Returns the values that the nodes of a job displayed, by name. If several nodes displayed
    values, the result also contains them by node id."""
    shown, text = job.values, text_of(job.values) or ""
    by_name: dict[str, Any] = {}
    for value in shown:
        by_name.setdefault(value.name, value.value)
    by_node: dict[str, Any] = {}
    if len({value.node_id for value in shown}) > 1:
        for value in shown:
            by_node.setdefault(value.node_id, {}).setdefault(value.name, value.value)
    return {"text": text, "json": _parse_shown(text), "values": {**by_node, **by_name}}


def _parse_shown(text: str) -> Any:
    """Parses displayed text as JSON. Returns None if the text isn't JSON."""
    try:
        return clean(json.loads(text)) if text else None
    except (ValueError, RecursionError):
        return None


def _output_reference(output: JobOutput, file: File) -> dict[str, Any]:
    sizes = {"width": output.width, "height": output.height}
    return {**file_reference(file), **{name: size for name, size in sizes.items() if size}}


def file_reference(file: File) -> dict[str, Any]:
    """Returns a file reference as it appears in the values of runs. Its path is only for display,
    and isn't the storage path."""
    return {
        "file_id": str(file.id),
        "filename": file.filename,
        "path": f"{file.id}/{file.filename}",
        "mime_type": file.mime_type,
        "size": file.size,
    }


def _start_actions(decision: RunDecision) -> list[StartJob]:
    return [action for action in decision.actions if isinstance(action, StartJob)]


def _refusal(action: StartJob, message: str, cause: FailureCause) -> JobFailed:
    return JobFailed(action.key, action.attempt, message, cause)


def job_request_of(action: StartJob, environment: Environment, user_id: UUID) -> JobRequest:
    usual = {"stage": STAGE, "provider": PROVIDER}
    terms = {**usual, **(action.effect.request_fields if action.effect else {})}
    stage = stage_of(action.backend_affinity, environment, terms["stage"])
    return JobRequest(
        slug=action.workflow,
        version=action.version,
        values=action.values,
        **{**terms, "stage": stage},
        priority=action.priority,
        backend_affinity=action.backend_affinity,
        user_id=user_id,
        reuse=action.reuse,
    )


def stage_of(affinity: str | None, environment: Environment, usual: str) -> str:
    """Returns the stage of the backend to which a job is bound, because no worker in another stage
    would accept the job. For an unbound job, returns `usual`."""
    for backend in environment.backends:
        if affinity and backend.is_target_of(affinity):
            return backend.fleet.partition("/")[2] or STAGE
    return usual

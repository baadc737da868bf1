"""Applies decisions: all of one in one transaction under the run's lock, or nothing.

A decision is made on the run as it was read; if another process changed the run meanwhile, it is made anew.
Prompts are built before the transaction, as that may read from the object store."""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias
from uuid import UUID

from comfyfleet.errors import Conflict, FleetError, NotFound, QueueFull, Unavailable
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.errors import log_level_of
from comfyfleet.server.graphs import store
from comfyfleet.server.graphs.decide import next_actions
from comfyfleet.server.graphs.draft import RunDecision
from comfyfleet.server.graphs.environment import PROVIDER, EnvironmentCache
from comfyfleet.server.graphs.plan import RunPlan
from comfyfleet.server.graphs.progress import RunProgress
from comfyfleet.server.graphs.run import (
    CancelJob,
    Environment,
    ExecutionKey,
    FailureCause,
    GraphRunState,
    GraphRunStatus,
    JobFailed,
    RunRow,
    StartJob,
    job_id,
)
from comfyfleet.server.graphs.snapshot import load_plan, load_run
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs import submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.model import Job, JobSpec
from comfyfleet.server.jobs.outbox import flush
from comfyfleet.server.jobs.submit import JobRequest, resolve
from comfyfleet.server.tenants import wallet as ledger

RUNS_KEPT_MAX = 500
RECORDS_KEPT_MAX = 200_000


class LoadedRun(NamedTuple):
    head: RunRow
    plan: RunPlan
    run: GraphRunState
    revision: int

    @property
    def jobs(self) -> Mapping[UUID, tuple[ExecutionKey, int]]:
        """The jobs that executions wait for: by job id, the execution and its attempt."""
        keys = self.run.in_flight or _stopping(self.run)
        found = ((key, self.run.record(key).attempt) for key in keys)
        return {job_id(self.run.id, key, attempt): (key, attempt) for key, attempt in found}


def _stopping(run: GraphRunState) -> frozenset[ExecutionKey]:
    """Once a run is over, none is in flight: those that were told to stop are looked for."""
    if not run.status.is_over:
        return frozenset()
    return frozenset(key for key, record in run.records.items() if record.status == "stopping")


class RunCache:
    def __init__(self) -> None:
        self._kept: OrderedDict[UUID, LoadedRun] = OrderedDict()
        self._records = 0
        self._told: OrderedDict[UUID, tuple[float, float]] = OrderedDict()

    def get_cached(self, tenant_id: UUID, run_id: UUID) -> LoadedRun | None:
        """As it was when last seen here, for who finds out before anything is written."""
        kept = self._kept.get(run_id)
        return kept if kept and kept.head.tenant_id == tenant_id else None

    async def get(self, tx: Tx, tenant_id: UUID, run_id: UUID) -> LoadedRun:
        kept = self._kept.get(run_id)
        revision = await store.revision_of(tx, tenant_id, run_id)
        if revision is None:
            raise NotFound(f"there is no graph run {run_id}")
        if kept is None or kept.revision != revision:
            kept = await self._read(tx, tenant_id, run_id, kept)
        self.keep(kept)
        return kept

    async def _read(
        self, tx: Tx, tenant_id: UUID, run_id: UUID, kept: LoadedRun | None
    ) -> LoadedRun:
        head = await store.get_run(tx, tenant_id, run_id)
        if head is None:
            raise NotFound(f"there is no graph run {run_id}")
        is_same = kept is not None and not head.is_expired
        plan = kept.plan if kept and is_same else load_plan(head.snapshot)
        run = load_run(plan, head.run, await store.read_records(tx, head))
        return LoadedRun(head, plan, run, head.revision)

    def keep(self, kept: LoadedRun) -> None:
        self.drop(kept.head.id)
        self._kept[kept.head.id] = kept
        self._records += len(kept.run.records)
        while len(self._kept) > 1 and (
            len(self._kept) > RUNS_KEPT_MAX or self._records > RECORDS_KEPT_MAX
        ):
            _, oldest = self._kept.popitem(last=False)
            self._records -= len(oldest.run.records)

    def keep_monotonic(self, run: GraphRunState, found: RunProgress) -> RunProgress:
        """Never less than was shown before, while the run is open: lists grow, and jobs restart."""
        if run.status.is_over:
            self._told.pop(run.id, None)
            return found
        before = self._told.pop(run.id, (0.0, 0.0))
        told = (
            max(found.overall_percent, before[0]),
            max(found.weighted_percent, before[1]),
        )
        self._told[run.id] = told
        while len(self._told) > RUNS_KEPT_MAX:
            self._told.popitem(last=False)
        return found._replace(overall_percent=told[0], weighted_percent=told[1])

    def drop(self, run_id: UUID) -> None:
        old = self._kept.pop(run_id, None)
        if old:
            self._records -= len(old.run.records)


log = logging.getLogger(__name__)
GRAPH_RUN_KIND = "graph"
TRIES_MAX = 20
STEPS_MAX = 50
STAGE = "production"
NO_TOKENS = "Insufficient token balance."

Decide: TypeAlias = Callable[[LoadedRun, Environment], Awaitable[RunDecision]]


@dataclass(frozen=True)
class GraphContext:
    """What running graphs takes; one for a process."""

    context: JobContext
    runs: RunCache = field(default_factory=RunCache)
    environment: EnvironmentCache = field(default_factory=EnvironmentCache)


@dataclass
class _Outcome:
    kept: LoadedRun
    jobs: list[Job] = field(default_factory=list)
    outbox_ids: list[int] = field(default_factory=list)


async def apply_decision(
    graphs: GraphContext,
    tenant_id: UUID,
    run_id: UUID,
    decide: Decide,
    *,
    heard: Sequence[int] = (),
    fresh: bool = False,
) -> LoadedRun:
    """Returns the run after the decision; the outbox rows it rests on are deleted in the same transaction."""
    context = graphs.context
    pool = await context.pool_of(tenant_id)
    # With outbox rows to delete there is a transaction in any case, and it finds out what is out of date.
    kept = graphs.runs.get_cached(tenant_id, run_id) if heard else None
    for _ in range(TRIES_MAX):
        if kept is None:
            async with pool.read() as tx:
                kept = await graphs.runs.get(tx, tenant_id, run_id)
        environment = await graphs.environment.now(context, tenant_id, fresh=fresh)
        step = _DecisionApplier(
            graphs, pool, kept, environment, await decide(kept, environment), heard
        )
        outcome = await step.commit()
        if outcome is not None:
            _count(graphs, kept.run.status, outcome.kept.run.status)
            await _follow_up(graphs, pool, outcome)
            return outcome.kept
        graphs.runs.drop(run_id)
        kept = None
    raise Conflict(f"the graph run {run_id} is being changed by others; try again")


def _count(graphs: GraphContext, before: GraphRunStatus, after: GraphRunStatus) -> None:
    if after.is_over and not before.is_over:
        graphs.context.run_metrics.graph_runs.labels(after).inc()


async def _follow_up(graphs: GraphContext, pool: Database, outcome: _Outcome) -> None:
    graphs.runs.keep(outcome.kept)
    graphs.context.notifier.tell(outcome.kept.head.id)
    if not outcome.jobs:
        return
    try:
        await flush(graphs.context, pool, outcome.jobs, outcome.outbox_ids)
    except Unavailable as error:
        log.log(
            log_level_of(error),
            "jobs of graph run %s wait: %s",
            outcome.kept.head.id,
            error.message,
        )


@dataclass(frozen=True)
class _DecisionApplier:
    graphs: GraphContext
    pool: Database
    kept: LoadedRun
    environment: Environment
    advance: RunDecision
    heard: Sequence[int]

    async def commit(self) -> _Outcome | None:
        """None: the run has moved on since it was read."""
        is_idle = not self.advance.changed and not self.advance.actions
        if is_idle and not self.heard:
            return _Outcome(self.kept)
        orders, refused = await self._ordered()
        async with self.pool.transaction() as tx:
            head = self.kept.head
            if await store.lock_revision(tx, head.tenant_id, head.id) != self.kept.revision:
                return None
            outcome = _Outcome(self.kept)
            if not is_idle:
                await self._apply(tx, orders, refused, outcome)
            await jobs.delete_outbox(tx, self.heard)
        return outcome

    async def _ordered(self) -> tuple[dict[UUID, JobSpec], list[JobFailed]]:
        """The jobs to be started, and those that can't be."""
        head, orders, refused = self.kept.head, {}, []
        lookup = self.graphs.environment.lookup(self.graphs.context)
        for action in _starts(self.advance):
            try:
                order = job_request_of(action, self.environment, head.user_id)
                asked = await resolve(
                    self.graphs.context, head.tenant_id, order, known=await lookup.get(order)
                )
            except (Unavailable, QueueFull):
                raise
            except FleetError as error:
                refused.append(_refusal(action, error.message, FailureCause.REFUSED))
                continue
            orders[action.job_id] = replace(
                asked, price_tokens=action.price_tokens, run_kind=GRAPH_RUN_KIND, run_id=head.id
            )
        if orders:
            orders = await submit.check_admission(self.graphs.context, head.tenant_id, orders)
        return orders, refused

    async def _apply(
        self,
        tx: Tx,
        orders: Mapping[UUID, JobSpec],
        refused: Sequence[JobFailed],
        outcome: _Outcome,
    ) -> None:
        if self.advance.actions:
            # Jobs before the wallet, as a job that ends does it: two that wait for each other never end.
            await jobs.lock(tx, self.kept.head.tenant_id, list(self.kept.jobs))
        await self._cancel(tx, self.advance, outcome)
        affordable, unpaid = await self._affordable(tx, orders)
        if affordable:
            now, tenant_id = self.graphs.context.clock(), self.kept.head.tenant_id
            most = self.graphs.context.active_max
            added, outbox_ids = await jobs.submit(
                tx, tenant_id, affordable, now=now, active_max=most
            )
            outcome.jobs += added
            outcome.outbox_ids += outbox_ids
        advance = await self._without(tx, [*refused, *unpaid], outcome)
        await self._write(tx, advance, outcome)

    async def _affordable(
        self, tx: Tx, orders: Mapping[UUID, JobSpec]
    ) -> tuple[dict[UUID, JobSpec], list[JobFailed]]:
        """As many as the wallet pays for, in the order in which they were decided."""
        if not any(each.price_tokens for each in orders.values()):
            return dict(orders), []
        head = self.kept.head
        wallet = await ledger.lock_wallet(
            tx, head.tenant_id, head.user_id, now=self.graphs.context.clock()
        )
        left, paid, unpaid = wallet.balance, {}, []
        for action in _starts(self.advance):
            order = orders.get(action.job_id)
            if order is None:
                continue
            if order.price_tokens <= left:
                left -= order.price_tokens
                paid[action.job_id] = order
            else:
                unpaid.append(_refusal(action, NO_TOKENS, FailureCause.NO_TOKENS))
        return paid, unpaid

    async def _without(
        self, tx: Tx, refused: Sequence[JobFailed], outcome: _Outcome
    ) -> RunDecision:
        """The way on from jobs that were not taken. Nothing else is started in this step."""
        if not refused:
            return self.advance
        environment = replace(self.environment, in_queue_max=0)
        further = next_actions(self.kept.plan, self.advance.run, refused, environment)
        await self._cancel(tx, further, outcome)
        changed = dict.fromkeys((*self.advance.changed, *further.changed))
        return RunDecision((*self.advance.actions, *further.actions), further.run, tuple(changed))

    async def _cancel(self, tx: Tx, advance: RunDecision, outcome: _Outcome) -> None:
        context, tenant_id = self.graphs.context, self.kept.head.tenant_id
        for action in advance.actions:
            if not isinstance(action, CancelJob):
                continue
            try:
                job, outbox_ids = await jobs.cancel(
                    tx, tenant_id, action.job_id, new_id=context.new_id, now=context.clock()
                )
            except NotFound:
                continue  # it was refused in this very step
            outcome.jobs = [each for each in outcome.jobs if each.id != job.id] + [job]
            outcome.outbox_ids += outbox_ids

    async def _write(self, tx: Tx, advance: RunDecision, outcome: _Outcome) -> None:
        now, revision = self.graphs.context.clock(), self.kept.revision + 1
        run, head = advance.run, self.kept.head
        await store.write_run(tx, head, run, advance.changed, revision=revision, now=now)
        outcome.kept = LoadedRun(
            replace(
                head,
                status=run.status,
                revision=revision,
                tokens=run.tokens,
                max_tokens=run.max_tokens,
                error=run.error,
                outputs=run.outputs,
                changed_at=now,
                ended_at=now if run.status.is_over else None,
            ),
            self.kept.plan,
            run,
            revision,
        )


def _starts(advance: RunDecision) -> list[StartJob]:
    return [each for each in advance.actions if isinstance(each, StartJob)]


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
    )


def stage_of(affinity: str | None, environment: Environment, usual: str) -> str:
    """A job that is bound to a backend must stand in its stage's lane, or nobody would take it."""
    for backend in environment.backends:
        if affinity and backend.is_target_of(affinity):
            return backend.fleet.partition("/")[2] or STAGE
    return usual

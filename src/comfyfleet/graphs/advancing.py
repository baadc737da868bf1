"""Carries out what `decide` says: all of it in one transaction under the run's lock, or nothing.

A decision is made on the run as it was read; if another changed the run meanwhile, it is made anew.
Prompts are put together before the transaction, as that may read from the object store.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias
from uuid import UUID

from comfyfleet.db import Database, Tx
from comfyfleet.db.outages import level_of
from comfyfleet.graphs import store
from comfyfleet.graphs.decide import next_actions
from comfyfleet.graphs.draft import Advance
from comfyfleet.graphs.events import CancelJob, Cause, JobFailed, StartJob, Surroundings
from comfyfleet.graphs.keeping import Kept, Runs
from comfyfleet.graphs.runs import RunStatus
from comfyfleet.graphs.world import PROVIDER, World
from comfyfleet.jobs import service as jobs
from comfyfleet.jobs import submitting
from comfyfleet.jobs.model import Job, Submission
from comfyfleet.jobs.ordering import Order, submission
from comfyfleet.jobs.settling import deliver
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import Conflict, FleetError, NotFound, QueueFull, Unavailable
from comfyfleet.ledger import service as ledger

log = logging.getLogger(__name__)
KIND = "graph"
TRIES_MAX = 20
STEPS_MAX = 50
STAGE = "production"
NO_TOKENS = "Insufficient token balance."

Decide: TypeAlias = Callable[[Kept, Surroundings], Awaitable[Advance]]


@dataclass(frozen=True)
class Graphs:
    """What running graphs takes; one for a process."""

    sides: Sides
    runs: Runs = field(default_factory=Runs)
    world: World = field(default_factory=World)


@dataclass
class _Outcome:
    kept: Kept
    jobs: list[Job] = field(default_factory=list)
    words: list[int] = field(default_factory=list)


async def change(
    graphs: Graphs,
    tenant_id: UUID,
    run_id: UUID,
    decide: Decide,
    *,
    heard: Sequence[int] = (),
    fresh: bool = False,
) -> Kept:
    """The run after the decision; the words that it rests on are forgotten with it."""
    sides = graphs.sides
    pool = await sides.pool_of(tenant_id)
    # With words to forget there is a transaction in any case, and it finds out what is out of date.
    kept = graphs.runs.at_hand(tenant_id, run_id) if heard else None
    for _ in range(TRIES_MAX):
        if kept is None:
            async with pool.look() as tx:
                kept = await graphs.runs.get(tx, tenant_id, run_id)
        world = await graphs.world.now(sides, tenant_id, fresh=fresh)
        step = _Step(graphs, pool, kept, world, await decide(kept, world), heard)
        outcome = await step.carried_out()
        if outcome is not None:
            _count(graphs, kept.run.status, outcome.kept.run.status)
            await _follow_up(graphs, pool, outcome)
            return outcome.kept
        graphs.runs.drop(run_id)
        kept = None
    raise Conflict(f"the graph run {run_id} is being changed by others; try again")


def _count(graphs: Graphs, before: RunStatus, after: RunStatus) -> None:
    if after.is_over and not before.is_over:
        graphs.sides.tallies.graph_runs.labels(after).inc()


async def _follow_up(graphs: Graphs, pool: Database, outcome: _Outcome) -> None:
    graphs.runs.keep(outcome.kept)
    graphs.sides.news.tell(outcome.kept.head.id)
    if not outcome.jobs:
        return
    try:
        await deliver(graphs.sides, pool, outcome.jobs, outcome.words)
    except Unavailable as error:
        log.log(
            level_of(error), "jobs of graph run %s wait: %s", outcome.kept.head.id, error.message
        )


@dataclass(frozen=True)
class _Step:
    graphs: Graphs
    pool: Database
    kept: Kept
    world: Surroundings
    advance: Advance
    heard: Sequence[int]

    async def carried_out(self) -> _Outcome | None:
        """None: the run has moved on since it was read."""
        is_idle = not self.advance.changed and not self.advance.actions
        if is_idle and not self.heard:
            return _Outcome(self.kept)
        orders, refused = await self._ordered()
        async with self.pool.begin() as tx:
            head = self.kept.head
            if await store.lock_revision(tx, head.tenant_id, head.id) != self.kept.revision:
                return None
            outcome = _Outcome(self.kept)
            if not is_idle:
                await self._apply(tx, orders, refused, outcome)
            await jobs.forget_words(tx, self.heard)
        return outcome

    async def _ordered(self) -> tuple[dict[UUID, Submission], list[JobFailed]]:
        """The jobs to be started, and those that can't be."""
        head, orders, refused = self.kept.head, {}, []
        lookup = self.graphs.world.lookup(self.graphs.sides)
        for action in _starts(self.advance):
            try:
                order = order_of(action, self.world, head.user_id)
                asked = await submission(
                    self.graphs.sides, head.tenant_id, order, known=await lookup.get(order)
                )
            except (Unavailable, QueueFull):
                raise
            except FleetError as error:
                refused.append(_refusal(action, error.message, Cause.REFUSED))
                continue
            orders[action.job_id] = replace(
                asked, price_tokens=action.price_tokens, run_kind=KIND, run_id=head.id
            )
        if orders:
            orders = await submitting.admissible(self.graphs.sides, head.tenant_id, orders)
        return orders, refused

    async def _apply(
        self,
        tx: Tx,
        orders: Mapping[UUID, Submission],
        refused: Sequence[JobFailed],
        outcome: _Outcome,
    ) -> None:
        if self.advance.actions:
            # Jobs before the wallet, as a job that ends does it: two that wait for each other never end.
            await jobs.lock(tx, self.kept.head.tenant_id, list(self.kept.jobs))
        await self._cancel(tx, self.advance, outcome)
        affordable, unpaid = await self._affordable(tx, orders)
        if affordable:
            now, tenant_id = self.graphs.sides.clock(), self.kept.head.tenant_id
            most = self.graphs.sides.active_max
            added, words = await jobs.submit(tx, tenant_id, affordable, now=now, active_max=most)
            outcome.jobs += added
            outcome.words += words
        advance = await self._without(tx, [*refused, *unpaid], outcome)
        await self._write(tx, advance, outcome)

    async def _affordable(
        self, tx: Tx, orders: Mapping[UUID, Submission]
    ) -> tuple[dict[UUID, Submission], list[JobFailed]]:
        """As many as the wallet pays for, in the order in which they were decided."""
        if not any(each.price_tokens for each in orders.values()):
            return dict(orders), []
        head = self.kept.head
        wallet = await ledger.lock_wallet(
            tx, head.tenant_id, head.user_id, now=self.graphs.sides.clock()
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
                unpaid.append(_refusal(action, NO_TOKENS, Cause.NO_TOKENS))
        return paid, unpaid

    async def _without(self, tx: Tx, refused: Sequence[JobFailed], outcome: _Outcome) -> Advance:
        """The way on from jobs that were not taken. Nothing else is started in this step."""
        if not refused:
            return self.advance
        world = replace(self.world, in_queue_max=0)
        further = next_actions(self.kept.plan, self.advance.run, refused, world)
        await self._cancel(tx, further, outcome)
        changed = dict.fromkeys((*self.advance.changed, *further.changed))
        return Advance((*self.advance.actions, *further.actions), further.run, tuple(changed))

    async def _cancel(self, tx: Tx, advance: Advance, outcome: _Outcome) -> None:
        sides, tenant_id = self.graphs.sides, self.kept.head.tenant_id
        for action in advance.actions:
            if not isinstance(action, CancelJob):
                continue
            try:
                job, words = await jobs.cancel(
                    tx, tenant_id, action.job_id, new_id=sides.new_id, now=sides.clock()
                )
            except NotFound:
                continue  # it was refused in this very step
            outcome.jobs = [each for each in outcome.jobs if each.id != job.id] + [job]
            outcome.words += words

    async def _write(self, tx: Tx, advance: Advance, outcome: _Outcome) -> None:
        now, revision = self.graphs.sides.clock(), self.kept.revision + 1
        run, head = advance.run, self.kept.head
        await store.write(tx, head, run, advance.changed, revision=revision, now=now)
        outcome.kept = Kept(
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


def _starts(advance: Advance) -> list[StartJob]:
    return [each for each in advance.actions if isinstance(each, StartJob)]


def _refusal(action: StartJob, message: str, cause: Cause) -> JobFailed:
    return JobFailed(action.key, action.attempt, message, cause)


def order_of(action: StartJob, world: Surroundings, user_id: UUID) -> Order:
    usual = {"stage": STAGE, "provider": PROVIDER}
    terms = {**usual, **(action.effect.of_order if action.effect else {})}
    stage = stage_of(action.backend_affinity, world, terms["stage"])
    return Order(
        slug=action.workflow,
        version=action.version,
        values=action.values,
        **{**terms, "stage": stage},
        priority=action.priority,
        backend_affinity=action.backend_affinity,
        user_id=user_id,
    )


def stage_of(affinity: str | None, world: Surroundings, usual: str) -> str:
    """A job that is bound to a backend must stand in its stage's lane, or nobody would take it."""
    for backend in world.backends:
        if affinity and backend.is_meant_by(affinity):
            return backend.fleet.partition("/")[2] or STAGE
    return usual

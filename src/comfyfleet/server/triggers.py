"""Triggers: schedules and incoming webhooks that start runs of graphs and pipelines, within a limit of tokens a day.

A firing is a row whose id is made from the trigger and the moment or delivery, and its run has an idempotency key
made from that: whoever takes up a firing that another process has begun gets the same run."""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID, uuid4, uuid5
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from comfyfleet.api.graphs import FiringCause, FiringStatus, TriggerKind
from comfyfleet.api.values import problem_with_text
from comfyfleet.api.webhooks import Signature
from comfyfleet.errors import (
    Conflict,
    FleetError,
    Forbidden,
    InvalidInput,
    LimitExceeded,
    LimitSpent,
    NotFound,
    QueueFull,
    Unavailable,
    said_to_customers,
)
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.errors import log_level_of
from comfyfleet.server.graphs import actions, store
from comfyfleet.server.graphs.actions import NewGraphRun, Owner
from comfyfleet.server.graphs.apply import GraphContext
from comfyfleet.server.graphs.document_work import check_size
from comfyfleet.server.graphs.plan import raise_problems
from comfyfleet.server.graphs.store import DayUse as DayUse
from comfyfleet.server.graphs.store import StoredTrigger as StoredTrigger
from comfyfleet.server.graphs.store import TriggerFiring as TriggerFiring
from comfyfleet.server.graphs.validate import check_inputs
from comfyfleet.server.pipelines import actions as pipelines
from comfyfleet.server.pipelines.actions import NewPipelineRun
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.trigger_inputs import (
    INPUT_NAME_PROBLEMS,
    check_paths,
    is_path,
    map_inputs,
    with_hint,
)

log = logging.getLogger(__name__)
TRIGGERS_PER_USER_MAX = 100
MOMENTS_SHOWN = 5  # of a schedule that somebody tries
SCHEDULE_CHARACTERS_MAX = 100
INPUTS_MAX = 100
# A moment is missed if nobody was there for so long. Passes come every second, unless one takes long.
LATE_SECONDS = 60
# More are not counted one by one.
MOMENTS_COUNTED_MAX = 1000
# Longer than a start takes, so that nobody else takes it up meanwhile: it would get the same run, and is work for nothing.
TAKEN_SECONDS = 30
TRIES_MAX = 120
# How often a repeated delivery looks whether the first has its run, before it starts that itself.
LOOKS_MAX, LOOK_SECONDS = 20, 0.1
# Of one trigger; more than these start nothing, and refusals beyond theirs are answered but not listed.
FIRINGS_PER_DAY_MAX, REFUSALS_PER_DAY_MAX = 10_000, 200
PER_PASS_MAX = 50
PAGE_MAX = 200
ERROR_CHARACTERS_MAX = 500
SECRET_PREFIX = "hook_"  # noqa: S105 - only what each of them begins with


# Moments of a schedule


def moments_after(
    cron: str, timezone: str, after: datetime, *, backwards: bool = False
) -> Iterator[datetime]:
    """Yields the moments of a schedule that lie after a moment, in UTC, in their order; or those before it.

    When clocks go forward, what would be in the hour that is left out comes right after it; when they go back, what
    has an hour of its own comes once, and what comes every hour or minute goes on. So does cron.
    """
    from cronsim import CronSim  # here, as few processes ever see a schedule

    last = after.astimezone(UTC)
    for each in CronSim(cron, after.astimezone(ZoneInfo(timezone)), reverse=backwards):
        moment = each.astimezone(UTC)
        # The library counts by the clock on the wall, which has some hours twice.
        if moment < last if backwards else moment > last:
            last = moment
            yield moment


def check_schedule(cron: str, timezone: str, now: datetime) -> datetime:
    """Returns the first moment of a schedule; refuses what is none."""
    check_timezone(timezone)
    if len(cron) > SCHEDULE_CHARACTERS_MAX or len(cron.split()) != 5:
        raise InvalidInput(
            "a schedule has five fields: minute, hour, day of the month, month, day of the week",
            field="cron",
        )
    try:
        first = next(moments_after(cron, timezone, now), None)
    # The library's own errors, and those that it does not foresee in strange texts.
    except Exception as error:  # noqa: BLE001
        raise InvalidInput(_schedule_problem(cron, str(error)), field="cron") from None
    if first is None:
        raise InvalidInput("the schedule has no moment in the next 50 years", field="cron")
    return first


# As the library calls them in its errors.
_SCHEDULE_FIELDS = {
    "minute": "0 to 59",
    "hour": "0 to 23",
    "day-of-month": "1 to 31 or L, and a day that the month has",
    "month": "1 to 12 or JAN to DEC",
    "day-of-week": "0 to 7 or SUN to SAT",
}


def _schedule_problem(cron: str, error: str) -> str:
    for (name, allowed), given in zip(_SCHEDULE_FIELDS.items(), cron.split(), strict=True):
        if error == f"Bad {name}":
            return f"the {name.replace('-', ' ')} of a schedule is {allowed}; not {given!r}"
    return f"the schedule can't be read: {error}"[:200]


def next_moments(cron: str, timezone: str, now: datetime) -> tuple[datetime, ...]:
    """Returns the first moments of a schedule; refuses what is none."""
    check_schedule(cron, timezone, now)
    return tuple(islice(moments_after(cron, timezone, now), MOMENTS_SHOWN))


def check_timezone(name: str) -> None:
    if name not in _timezones():
        raise InvalidInput(
            f"there is no time zone {name!r:.80}; names are like Europe/Berlin", field="timezone"
        )


@cache
def _timezones() -> frozenset[str]:
    return frozenset(available_timezones())


def day_of(trigger: StoredTrigger, now: datetime) -> str:
    zone = ZoneInfo(trigger.timezone) if trigger.timezone in _timezones() else UTC
    return now.astimezone(zone).date().isoformat()


class DueMoments(NamedTuple):
    fire_at: datetime | None  # None: none of them is fired
    cause: FiringCause
    missed: int
    missed_at: datetime | None
    next_at: datetime | None


def due_moments(trigger: StoredTrigger, now: datetime) -> DueMoments:
    """Decides about the moments of a schedule that have come: the newest is fired, unless it is late; those before
    it are missed. A late one is fired if the trigger is to catch up.
    """
    if trigger.cron is None or trigger.next_at is None:
        raise ValueError("the trigger has no schedule")
    where = trigger.cron, trigger.timezone
    come = [trigger.next_at]
    for moment in islice(moments_after(*where, trigger.next_at), MOMENTS_COUNTED_MAX):
        if moment > now:
            break
        come.append(moment)
    else:
        newest = islice(moments_after(*where, now + timedelta(seconds=1), backwards=True), 2)
        come += [each for each in reversed(list(newest)) if each > come[-1]]
    is_late = (now - come[-1]).total_seconds() > LATE_SECONDS
    missed = come if is_late else come[:-1]
    return DueMoments(
        come[-1] if trigger.catch_up or not is_late else None,
        FiringCause.CATCH_UP if is_late else FiringCause.SCHEDULE,
        len(missed),
        missed[-1] if missed else None,
        next(moments_after(*where, now), None),
    )


# Secrets of webhooks


def secret_of(trigger: StoredTrigger, key: str) -> str:
    """Returns a webhook's secret. It is derived from the installation's key, so it isn't stored."""
    said = f"trigger/{trigger.id}/{trigger.secret_number}".encode()
    return SECRET_PREFIX + hmac.new(key.encode(), said, hashlib.sha256).hexdigest()


# What users do


@dataclass(frozen=True, slots=True)
class NewTrigger:
    name: str
    tokens_per_day: int
    graph_id: UUID | None = None
    graph_version: int | None = None
    pipeline_id: UUID | None = None
    base_candidates: int | None = None
    inputs: Mapping[str, Any] | None = None
    cron: str | None = None  # None: it is a webhook
    timezone: str = "UTC"
    catch_up: bool = False
    max_tokens: int | None = None


async def create_trigger(graphs: GraphContext, owner: Owner, new: NewTrigger) -> StoredTrigger:
    context, now = graphs.context, graphs.context.clock()
    check_timezone(new.timezone)
    kind = TriggerKind.WEBHOOK if new.cron is None else TriggerKind.SCHEDULE
    trigger = StoredTrigger(
        id=context.new_id(),
        tenant_id=owner.tenant_id,
        user_id=owner.user_id,
        name=new.name,
        kind=kind,
        inputs=dict(new.inputs or {}),
        timezone=new.timezone,
        tokens_per_day=new.tokens_per_day,
        created_at=now,
        graph_id=new.graph_id,
        graph_version=new.graph_version,
        pipeline_id=new.pipeline_id,
        base_candidates=new.base_candidates,
        cron=new.cron,
        catch_up=new.catch_up,
        max_tokens=new.max_tokens,
        next_at=check_schedule(new.cron, new.timezone, now) if new.cron is not None else None,
    )
    await _check_target(graphs, owner, trigger)
    async with context.tenant_transaction(owner.tenant_id) as tx:
        if await store.count_triggers(tx, *_whose(owner)) >= TRIGGERS_PER_USER_MAX:
            raise LimitExceeded(f"a user has at most {TRIGGERS_PER_USER_MAX} triggers")
        await store.add_trigger(tx, trigger)
    return trigger


async def _check_target(graphs: GraphContext, owner: Owner, trigger: StoredTrigger) -> None:
    """Refuses what could never be started: it is better said now than at night."""
    if (trigger.graph_id is None) == (trigger.pipeline_id is None):
        raise InvalidInput("a trigger starts either a graph or a pipeline", field="graph_id")
    if len(trigger.inputs) > INPUTS_MAX:
        raise LimitExceeded(f"a trigger has at most {INPUTS_MAX} inputs", field="inputs")
    check_size(trigger.inputs)
    if trigger.kind == TriggerKind.WEBHOOK:
        check_paths(trigger.inputs)
    if trigger.pipeline_id is not None:
        if trigger.graph_version is not None:
            raise InvalidInput("a pipeline has no versions", field="version")
        if trigger.base_candidates is None:
            raise InvalidInput("a pipeline needs base_candidates", field="base_candidates")
        await pipelines.get_pipeline(graphs.context, *_whose(owner), trigger.pipeline_id)
        return
    if trigger.base_candidates is not None:
        raise InvalidInput("only a pipeline has base_candidates", field="base_candidates")
    await _check_graph(graphs, owner, trigger)


async def _check_graph(graphs: GraphContext, owner: Owner, trigger: StoredTrigger) -> None:
    if trigger.graph_id is None:
        return
    stored = await actions.get_graph(graphs, owner, trigger.graph_id, trigger.graph_version)
    found = (await actions.check_document(graphs, owner, dict(stored.document))).check
    problems = check_inputs(found.graph, trigger.inputs)
    if trigger.kind == TriggerKind.WEBHOOK:
        # The values of paths come with each delivery; others are the same for all of them.
        paths = {name for name, value in trigger.inputs.items() if is_path(value)}
        problems = tuple(
            with_hint(each)
            for each in problems
            if each.code in INPUT_NAME_PROBLEMS or each.node not in paths
        )
    raise_problems(list(problems))


def _whose(owner: Owner) -> tuple[UUID, UUID]:
    return owner.tenant_id, owner.user_id


async def get_trigger(graphs: GraphContext, owner: Owner, trigger_id: UUID) -> StoredTrigger:
    async with graphs.context.tenant(owner.tenant_id) as tx:
        return await _own(tx, owner, trigger_id)


async def _own(tx: Tx, owner: Owner, trigger_id: UUID) -> StoredTrigger:
    return _require(await store.get_trigger(tx, trigger_id, owner=_whose(owner)), trigger_id)


def _require(found: StoredTrigger | None, trigger_id: UUID) -> StoredTrigger:
    if found is None:
        raise NotFound(f"there is no trigger {trigger_id}")
    return found


async def list_triggers(
    graphs: GraphContext, owner: Owner, *, before: UUID | None = None, limit: int
) -> list[StoredTrigger]:
    """Returns a page, the newest first; `before` is the id of the last page's last."""
    async with graphs.context.tenant(owner.tenant_id) as tx:
        last = await _own(tx, owner, before) if before else None
        return await store.list_triggers(
            tx, *_whose(owner), before=last, limit=min(limit, PAGE_MAX)
        )


async def list_firings(
    graphs: GraphContext,
    owner: Owner,
    trigger_id: UUID,
    *,
    before: UUID | None = None,
    limit: int,
) -> list[TriggerFiring]:
    """Returns a page, the newest first; `before` is the id of the last page's last."""
    async with graphs.context.tenant(owner.tenant_id) as tx:
        await _own(tx, owner, trigger_id)
        last = await store.get_firing(tx, trigger_id, before) if before else None
        if before and last is None:
            raise NotFound(f"there is no firing {before}")
        return await store.list_firings(tx, trigger_id, before=last, limit=min(limit, PAGE_MAX))


async def day_uses(graphs: GraphContext, *found: StoredTrigger) -> list[DayUse]:
    """Returns what each trigger of one tenant has used today."""
    if not found:
        return []
    days = {each.id: day_of(each, graphs.context.clock()) for each in found}
    async with graphs.context.tenant(found[0].tenant_id) as tx:
        uses = await store.day_uses(tx, days)
    return [uses.get(each.id, DayUse()) for each in found]


async def pause_trigger(graphs: GraphContext, owner: Owner, trigger_id: UUID) -> StoredTrigger:
    """Pauses a trigger; a firing that has begun goes on."""
    return await _change(graphs, owner, trigger_id, {"is_paused": True})


async def resume_trigger(graphs: GraphContext, owner: Owner, trigger_id: UUID) -> StoredTrigger:
    """Resumes a trigger; moments that passed while it was paused are not missed."""
    found = await get_trigger(graphs, owner, trigger_id)
    if not found.is_paused:
        return found
    values: dict[str, Any] = {"is_paused": False}
    if found.cron is not None:
        now = graphs.context.clock()
        values["next_at"] = check_schedule(found.cron, found.timezone, now)
    return await _change(graphs, owner, trigger_id, values)


async def renew_secret(graphs: GraphContext, owner: Owner, trigger_id: UUID) -> StoredTrigger:
    """Gives a webhook another secret; the one before is no longer accepted."""
    found = await get_trigger(graphs, owner, trigger_id)
    if found.kind != TriggerKind.WEBHOOK:
        raise Conflict("only a webhook has a secret")
    return await _change(graphs, owner, trigger_id, {"secret_number": found.secret_number + 1})


async def _change(
    graphs: GraphContext, owner: Owner, trigger_id: UUID, values: Mapping[str, Any]
) -> StoredTrigger:
    async with graphs.context.tenant_transaction(owner.tenant_id) as tx:
        changed = await store.update_trigger(tx, _whose(owner), trigger_id, values)
    return _require(changed, trigger_id)


async def delete_trigger(graphs: GraphContext, owner: Owner, trigger_id: UUID) -> None:
    """Deletes a trigger with its firings; runs that it has started stay."""
    async with graphs.context.tenant_transaction(owner.tenant_id) as tx:
        if not await store.delete_trigger(tx, _whose(owner), trigger_id):
            raise NotFound(f"there is no trigger {trigger_id}")


async def find_webhook(graphs: GraphContext, trigger_id: UUID) -> StoredTrigger | None:
    """Finds a webhook of any tenant; whoever calls it checks the secret."""
    away: Unavailable | None = None
    for _, pool in graphs.context.pools.items():
        try:
            async with pool.read() as tx:
                found = await store.get_trigger(tx, trigger_id)
        except Unavailable as error:  # it may be there
            away = error
            continue
        if found is not None:
            return found if found.kind == TriggerKind.WEBHOOK else None
    if away is not None:
        raise away
    return None


# Firings


class RunCost(NamedTuple):
    """What a run would cost, or why there is none."""

    tokens_min: int = 0
    tokens_max: int | None = None  # None: nobody knows
    refusal: FleetError | None = None


Granted: TypeAlias = int | FleetError


def grant(trigger: StoredTrigger, cost: RunCost, use: DayUse, day: str) -> Granted:
    """Decides what a run may spend: what is left of the day, of which it gets no more than it can use."""
    if cost.refusal is not None:
        return cost.refusal
    if use.started >= FIRINGS_PER_DAY_MAX:
        return LimitSpent(f"it has fired {use.started:,} times on {day}{_what_now(trigger)}")
    left = trigger.tokens_per_day - use.tokens
    if trigger.max_tokens is not None and cost.tokens_min > trigger.max_tokens:
        return LimitSpent(
            f"a run costs at least {cost.tokens_min:,} tokens, and this trigger's limit for one run "
            f"is {trigger.max_tokens:,}; nothing was started"
        )
    if cost.tokens_min > left or (left <= 0 and cost.tokens_max != 0):
        return LimitSpent(
            f"{use.tokens:,} of {trigger.tokens_per_day:,} tokens of {day} are used or held by open runs, "
            f"and a run costs at least {cost.tokens_min:,}{_what_now(trigger)}"
        )
    bounds = (left, trigger.max_tokens, cost.tokens_max)
    return max(0, min(each for each in bounds if each is not None))


def _what_now(trigger: StoredTrigger) -> str:
    if trigger.kind == TriggerKind.SCHEDULE:
        return "; this run is skipped"
    return "; nothing was started or stored: send it again on the next day, as a new delivery"


async def _cost(graphs: GraphContext, trigger: StoredTrigger, inputs: Mapping[str, Any]) -> RunCost:
    try:
        await _require_active(graphs, trigger)
        if trigger.graph_id is None:
            return RunCost(await _pipeline_cost(graphs, trigger))
        quote = await actions.quote_run(
            graphs, _owner(trigger), trigger.graph_id, inputs, version=trigger.graph_version
        )
        return RunCost(quote.tokens_min, quote.tokens_max)
    except (Unavailable, QueueFull):
        raise
    except FleetError as error:
        return RunCost(refusal=error)


async def _pipeline_cost(graphs: GraphContext, trigger: StoredTrigger) -> int:
    if trigger.pipeline_id is None:
        return 0
    whose = trigger.tenant_id, trigger.user_id
    return await pipelines.least_cost(
        graphs.context, whose, trigger.pipeline_id, trigger.base_candidates or 1
    )


def _owner(trigger: StoredTrigger) -> Owner:
    return Owner(trigger.tenant_id, trigger.user_id)


async def _require_active(graphs: GraphContext, trigger: StoredTrigger) -> None:
    """A trigger outlives the key that made it, but not its user and tenant."""
    async with graphs.context.central.read() as tx:
        await tenants.require_kept(tx, trigger.tenant_id)
    async with graphs.context.tenant(trigger.tenant_id) as tx:
        user = await tenants.get_user(tx, trigger.tenant_id, trigger.user_id)
    if not user.is_active:
        raise Forbidden("the user of this trigger is deactivated")


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a call that fires a trigger is recognized if it is repeated: by its id, if the sender gave
    it one, or by its signature, if it has one."""

    id: str | None = None
    signature: Signature | None = None

    def key_hashes(self, cause: FiringCause) -> list[str]:
        keys = []
        if self.signature is not None:
            keys.append(f"signature/{self.signature.timestamp}/{self.signature.mac}")
        if self.id is not None:
            keys.append(f"{cause}/{self.id}")
        return [hashlib.sha256(key.encode()).hexdigest() for key in keys]

    def firing_id(self, trigger: StoredTrigger, cause: FiringCause) -> UUID:
        if self.id is not None:
            return uuid5(trigger.id, f"{cause}/{self.id}")
        if self.signature is not None:
            return uuid5(trigger.id, "/".join(("signature", *map(str, self.signature))))
        return uuid4()


async def fire(
    graphs: GraphContext,
    trigger: StoredTrigger,
    *,
    cause: FiringCause,
    delivery: Delivery,
    body: Any,
) -> tuple[TriggerFiring, bool]:
    """Fires a trigger by a webhook or by hand; returns the firing and whether it is new. A repeated
    delivery returns the first one's firing.
    """
    pool = await graphs.context.pool_of(trigger.tenant_id)
    new = _new_firing(graphs, trigger, delivery.firing_id(trigger, cause), cause)
    async with pool.read() as tx:
        before, is_complete = await _find_repeated(tx, new, delivery)
    if before is not None and is_complete:
        return await _result_of(graphs, pool, trigger, before), False
    inputs, cost = ({}, RunCost()) if before else await _inputs_and_cost(graphs, trigger, body)
    async with pool.transaction() as tx:
        _require(await store.lock_trigger(tx, trigger.id), trigger.id)
        before, _ = await _find_repeated(tx, new, delivery)
        firing, is_kept = before, True
        if firing is None:
            firing, is_kept = await _granted(tx, trigger, replace(new, inputs=inputs), cost)
        if not is_kept:
            return firing, True
        if before is None:
            await store.add_firing(tx, firing)
        # Also for a repeat: a key that it has in addition must not count as new later.
        await store.add_delivery_keys(tx, firing, delivery.key_hashes(cause), now=new.created_at)
    if before is not None:
        return await _result_of(graphs, pool, trigger, before), False
    if firing.status == FiringStatus.STARTING:
        await _start(graphs, pool, trigger, firing)
    return await _get_firing(pool, firing), True


async def _find_repeated(
    tx: Tx, new: TriggerFiring, delivery: Delivery
) -> tuple[TriggerFiring | None, bool]:
    """Returns the firing of an earlier delivery with one of the keys, and whether all keys are known."""
    hashes = delivery.key_hashes(new.cause)
    found, known = await store.firing_of_keys(tx, new.trigger_id, hashes)
    # Also one that was stored before deliveries had keys.
    found = found or await store.get_firing(tx, new.trigger_id, new.id)
    return found, known.issuperset(hashes)


async def _inputs_and_cost(
    graphs: GraphContext, trigger: StoredTrigger, body: Any
) -> tuple[dict[str, Any], RunCost]:
    try:
        is_mapped = trigger.kind == TriggerKind.WEBHOOK
        inputs = map_inputs(trigger.inputs, body) if is_mapped else dict(trigger.inputs)
        return inputs, await _cost(graphs, trigger, inputs)
    except (InvalidInput, LimitExceeded) as error:
        return {}, RunCost(refusal=error)


async def _get_firing(pool: Database, firing: TriggerFiring) -> TriggerFiring:
    async with pool.read() as tx:
        found = await store.get_firing(tx, firing.trigger_id, firing.id)
    if found is None:
        raise NotFound(f"there is no trigger {firing.trigger_id}")
    return found


async def _result_of(
    graphs: GraphContext, pool: Database, trigger: StoredTrigger, firing: TriggerFiring
) -> TriggerFiring:
    """Returns a firing that another call began, with its run or refusal. If that call needs long its process may
    have died: then the run is started here, and is the same.
    """
    for _ in range(LOOKS_MAX):
        if firing.status != FiringStatus.STARTING:
            return firing
        await asyncio.sleep(LOOK_SECONDS)
        firing = await _get_firing(pool, firing)
    if firing.status == FiringStatus.STARTING:
        await _start(graphs, pool, trigger, firing)
    return await _get_firing(pool, firing)


def _new_firing(
    graphs: GraphContext, trigger: StoredTrigger, firing_id: UUID, cause: FiringCause
) -> TriggerFiring:
    now = graphs.context.clock()
    return TriggerFiring(
        id=firing_id,
        tenant_id=trigger.tenant_id,
        trigger_id=trigger.id,
        cause=cause,
        day=day_of(trigger, now),
        status=FiringStatus.STARTING,
        created_at=now,
        not_before=now + timedelta(seconds=TAKEN_SECONDS),
        tries=1,
    )


async def _granted(
    tx: Tx, trigger: StoredTrigger, firing: TriggerFiring, cost: RunCost
) -> tuple[TriggerFiring, bool]:
    """Returns the firing with what its run may spend, or refused; and whether it is kept. The trigger's row is
    locked.
    """
    use = (await store.day_uses(tx, {trigger.id: firing.day})).get(trigger.id, DayUse())
    granted = grant(trigger, cost, use, firing.day)
    if isinstance(granted, int):
        return replace(firing, granted_tokens=granted), True
    refused = replace(firing, **_refusal(granted), inputs=None, ended_at=firing.created_at)
    return refused, use.refused < REFUSALS_PER_DAY_MAX


def _refusal(error: FleetError) -> dict[str, Any]:
    message = said_to_customers(error)[:ERROR_CHARACTERS_MAX]
    return {
        "status": FiringStatus.REFUSED,
        "error_code": error.code,
        "error": message if problem_with_text(message) is None else ascii(message),
    }


async def _start(
    graphs: GraphContext, pool: Database, trigger: StoredTrigger, firing: TriggerFiring
) -> None:
    """Starts the run of a firing and writes how that went; what can't be done now is tried again by the sweep."""
    now = graphs.context.clock()
    try:
        run_id = await _start_run(graphs, trigger, firing)
        result: dict[str, Any] = {"status": FiringStatus.STARTED, "run_id": run_id}
    except (Unavailable, QueueFull) as error:
        if firing.tries < TRIES_MAX:
            log.log(log_level_of(error), "trigger %s waits: %s", trigger.id, error.message)
            return
        result = _refusal(error)
    except FleetError as error:
        result = _refusal(error)
    async with pool.transaction() as tx:
        await store.end_firing(tx, firing.id, {**result, "ended_at": now})


async def _start_run(graphs: GraphContext, trigger: StoredTrigger, firing: TriggerFiring) -> UUID:
    """Starts the run, or finds it: whoever calls this for a firing gives it the same key."""
    key, inputs = f"trigger/{firing.id}", firing.inputs or {}
    if trigger.graph_id is not None:
        wanted = NewGraphRun(inputs, trigger.graph_version, firing.granted_tokens, key)
        loaded, _ = await actions.start_run(graphs, _owner(trigger), trigger.graph_id, wanted)
        return loaded.head.id
    if trigger.pipeline_id is None:
        raise NotFound("the trigger has nothing to start")
    new = NewPipelineRun(
        trigger.base_candidates or 1,
        inputs,
        limits={"tokens": firing.granted_tokens},
        idempotency_key=key,
    )
    whose = trigger.tenant_id, trigger.user_id
    run, _ = await pipelines.start_run(graphs.context, *whose, trigger.pipeline_id, new)
    return run.id


# The sweep


async def is_any_due(graphs: GraphContext, pool: Database) -> bool:
    async with pool.read() as tx:
        return await store.is_any_trigger_due(tx, graphs.context.clock())


async def fire_due(graphs: GraphContext, pool: Database) -> bool:
    """Fires schedules whose moment has come, and takes up firings that were left; True if there are more."""
    now = graphs.context.clock()
    async with pool.read() as tx:
        due = await store.due_triggers(tx, now, limit=PER_PASS_MAX)
        stuck = await store.stuck_firings(tx, now, limit=PER_PASS_MAX)
    done = [await _fire_moment(graphs, pool, each) for each in due]
    done += [await _take_up(graphs, pool, each) for each in stuck]
    return all(done) and PER_PASS_MAX in (len(due), len(stuck))


async def _fire_moment(graphs: GraphContext, pool: Database, trigger: StoredTrigger) -> bool:
    """Claims the moments that have come, and fires at most one of them; False: it could not."""
    try:
        found = due_moments(trigger, graphs.context.clock())
        cost = await _cost(graphs, trigger, trigger.inputs) if found.fire_at else RunCost()
    except FleetError as error:
        log.log(log_level_of(error), "trigger %s waits: %s", trigger.id, error.message)
        return False
    except ZoneInfoNotFoundError:
        # Time zones are renamed, if rarely; others must not wait for this one.
        log.warning("trigger %s is paused: there is no time zone %s", trigger.id, trigger.timezone)
        async with pool.transaction() as tx:
            await store.claim_moment(tx, trigger, {"is_paused": True})
        return True
    async with pool.transaction() as tx:
        missed = {"missed": trigger.missed + found.missed, "missed_at": found.missed_at}
        values = {"next_at": found.next_at, **(missed if found.missed else {})}
        if not await store.claim_moment(tx, trigger, values):
            return True  # another control plane has it
        if found.missed:
            await store.add_firing(tx, _missed_firing(graphs, trigger, found))
        firing = await _moment_firing(graphs, tx, trigger, found, cost)
    if firing is not None and firing.status == FiringStatus.STARTING:
        await _start(graphs, pool, trigger, firing)
    return True


async def _moment_firing(
    graphs: GraphContext, tx: Tx, trigger: StoredTrigger, found: DueMoments, cost: RunCost
) -> TriggerFiring | None:
    """Adds the firing of a claimed moment; None if there is none."""
    if found.fire_at is None:
        return None
    firing_id = uuid5(trigger.id, f"moment/{found.fire_at.isoformat()}")
    new = _new_firing(graphs, trigger, firing_id, found.cause)
    planned = replace(new, planned_at=found.fire_at, inputs=dict(trigger.inputs))
    firing, _ = await _granted(tx, trigger, planned, cost)
    return firing if await store.add_firing(tx, firing) else None


def _missed_firing(
    graphs: GraphContext, trigger: StoredTrigger, found: DueMoments
) -> TriggerFiring:
    at = found.missed_at.isoformat() if found.missed_at else ""
    new = _new_firing(graphs, trigger, uuid5(trigger.id, f"missed/{at}"), FiringCause.SCHEDULE)
    return replace(
        new,
        status=FiringStatus.MISSED,
        planned_at=found.missed_at,
        missed=found.missed,
        ended_at=new.created_at,
    )


async def _take_up(graphs: GraphContext, pool: Database, firing: TriggerFiring) -> bool:
    """Goes on with a firing whose process has died, or that could not be started."""
    until = graphs.context.clock() + timedelta(seconds=TAKEN_SECONDS)
    async with pool.transaction() as tx:
        if not await store.take_firing(tx, firing, until=until):
            return True
        trigger = await store.get_trigger(tx, firing.trigger_id)
    if trigger is not None:
        await _start(graphs, pool, trigger, replace(firing, tries=firing.tries + 1))
    return True


async def prune_firings(tx: Tx, *, before: datetime, limit: int) -> int:
    return await store.prune_firings(tx, before=before, limit=limit)

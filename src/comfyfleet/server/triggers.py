"""Triggers, which are schedules and incoming webhooks that start runs within a daily token limit.

A trigger starts runs of a graph or a pipeline. A firing is a row whose id is derived from the
trigger and the scheduled time or delivery. The run's idempotency key is derived from that id, so a
process that continues another process's firing gets the same run.
"""

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
MOMENTS_SHOWN = 5  # number of times shown in the preview of a schedule
SCHEDULE_CHARACTERS_MAX = 100
INPUTS_MAX = 100
# A scheduled time counts as missed if it is more than this many seconds in the past. Passes usually
# run every second.
LATE_SECONDS = 60
# Maximum number of due times that are enumerated in one pass. Of any further due times, only the
# two newest are counted.
MOMENTS_COUNTED_MAX = 1000
# Seconds for which a firing is reserved for the process that claimed it. Starting a run takes less
# time, so other processes don't repeat the work. If one did, it would get the same run.
TAKEN_SECONDS = 30
TRIES_MAX = 120
# How many times a repeated delivery checks whether the first one has started the run, and the
# seconds between two checks. After that, it starts the run itself.
LOOKS_MAX, LOOK_SECONDS = 20, 0.1
# Limits per trigger and day. Further firings are refused, and further refusals aren't stored.
FIRINGS_PER_DAY_MAX, REFUSALS_PER_DAY_MAX = 10_000, 200
PER_PASS_MAX = 50
PAGE_MAX = 200
ERROR_CHARACTERS_MAX = 500
SECRET_PREFIX = "hook_"  # noqa: S105 - the prefix of all webhook secrets


# Schedules


def moments_after(
    cron: str, timezone: str, after: datetime, *, backwards: bool = False
) -> Iterator[datetime]:
    """Yields the times of a schedule in UTC that come after `after`, or before it with `backwards`.

    Daylight saving time is handled as in cron. When clocks go forward, times in the skipped hour
    come right after it. When clocks go back, times with a fixed hour occur only once, and times
    that repeat every hour or minute continue.
    """
    from cronsim import CronSim  # imported here, because few processes need it

    last = after.astimezone(UTC)
    for local in CronSim(cron, after.astimezone(ZoneInfo(timezone)), reverse=backwards):
        moment = local.astimezone(UTC)
        # Skips repeated times. The library uses local time, in which some hours occur twice.
        if moment < last if backwards else moment > last:
            last = moment
            yield moment


def check_schedule(cron: str, timezone: str, now: datetime) -> datetime:
    """Returns the next time of a schedule. Raises InvalidInput if the schedule is invalid."""
    check_timezone(timezone)
    if len(cron) > SCHEDULE_CHARACTERS_MAX or len(cron.split()) != 5:
        raise InvalidInput(
            "cron must have five fields: minute, hour, day of month, month, day of week",
            field="cron",
        )
    try:
        first = next(moments_after(cron, timezone, now), None)
    # For unusual strings, the library raises errors other than its own.
    except Exception as error:  # noqa: BLE001
        raise InvalidInput(_schedule_problem(cron, str(error)), field="cron") from None
    if first is None:
        raise InvalidInput("the schedule doesn't fire within the next 50 years", field="cron")
    return first


# Field names as they appear in the library's errors.
_SCHEDULE_FIELDS = {
    "minute": "0 to 59",
    "hour": "0 to 23",
    "day-of-month": "1 to 31 or L, and a day that the month has",
    "month": "1 to 12 or JAN to DEC",
    "day-of-week": "0 to 7 or SUN to SAT",
}


def _schedule_problem(cron: str, error: str) -> str:
    for (name, allowed), value in zip(_SCHEDULE_FIELDS.items(), cron.split(), strict=True):
        if error == f"Bad {name}":
            return f"the {name.replace('-', ' ')} of a schedule must be {allowed}, not {value!r}"
    return f"the schedule is invalid: {error}"[:200]


def next_moments(cron: str, timezone: str, now: datetime) -> tuple[datetime, ...]:
    """Returns the next times of a schedule. Raises InvalidInput if the schedule is invalid."""
    check_schedule(cron, timezone, now)
    return tuple(islice(moments_after(cron, timezone, now), MOMENTS_SHOWN))


def check_timezone(name: str) -> None:
    if name not in _timezones():
        raise InvalidInput(
            f"unknown time zone {name!r:.80}; use a name such as Europe/Berlin", field="timezone"
        )


@cache
def _timezones() -> frozenset[str]:
    return frozenset(available_timezones())


def day_of(trigger: StoredTrigger, now: datetime) -> str:
    zone = ZoneInfo(trigger.timezone) if trigger.timezone in _timezones() else UTC
    return now.astimezone(zone).date().isoformat()


class DueMoments(NamedTuple):
    fire_at: datetime | None  # None means that nothing is fired
    cause: FiringCause
    missed: int
    missed_at: datetime | None
    next_at: datetime | None


def due_moments(trigger: StoredTrigger, now: datetime) -> DueMoments:
    """Decides which of a schedule's due times to fire and which ones count as missed.

    The newest one is fired, and earlier ones are missed. If the newest one is late, it is missed as
    well, but fired anyway if the trigger's `catch_up` is set.
    """
    if trigger.cron is None or trigger.next_at is None:
        raise ValueError("the trigger has no schedule")
    where = trigger.cron, trigger.timezone
    due = [trigger.next_at]
    for moment in islice(moments_after(*where, trigger.next_at), MOMENTS_COUNTED_MAX):
        if moment > now:
            break
        due.append(moment)
    else:
        newest = islice(moments_after(*where, now + timedelta(seconds=1), backwards=True), 2)
        due += [moment for moment in reversed(list(newest)) if moment > due[-1]]
    is_late = (now - due[-1]).total_seconds() > LATE_SECONDS
    missed = due if is_late else due[:-1]
    return DueMoments(
        due[-1] if trigger.catch_up or not is_late else None,
        FiringCause.CATCH_UP if is_late else FiringCause.SCHEDULE,
        len(missed),
        missed[-1] if missed else None,
        next(moments_after(*where, now), None),
    )


# Webhook secrets


def secret_of(trigger: StoredTrigger, key: str) -> str:
    """Returns a webhook's secret, which is derived from the installation's key and isn't stored."""
    name = f"trigger/{trigger.id}/{trigger.secret_number}".encode()
    return SECRET_PREFIX + hmac.new(key.encode(), name, hashlib.sha256).hexdigest()


# User actions


@dataclass(frozen=True, slots=True)
class NewTrigger:
    name: str
    tokens_per_day: int
    graph_id: UUID | None = None
    graph_version: int | None = None
    pipeline_id: UUID | None = None
    base_candidates: int | None = None
    inputs: Mapping[str, Any] | None = None
    cron: str | None = None  # None means that the trigger is a webhook
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
            raise LimitExceeded(f"a user can have at most {TRIGGERS_PER_USER_MAX} triggers")
        await store.add_trigger(tx, trigger)
    return trigger


async def _check_target(graphs: GraphContext, owner: Owner, trigger: StoredTrigger) -> None:
    """Raises an error if the target can't be started, so that users notice before the first
    firing."""
    if (trigger.graph_id is None) == (trigger.pipeline_id is None):
        raise InvalidInput("send either a graph or a pipeline", field="graph_id")
    if len(trigger.inputs) > INPUTS_MAX:
        raise LimitExceeded(f"a trigger can have at most {INPUTS_MAX} inputs", field="inputs")
    check_size(trigger.inputs)
    if trigger.kind == TriggerKind.WEBHOOK:
        check_paths(trigger.inputs)
    if trigger.pipeline_id is not None:
        if trigger.graph_version is not None:
            raise InvalidInput("pipelines don't have versions", field="version")
        if trigger.base_candidates is None:
            raise InvalidInput(
                "base_candidates is required for a pipeline", field="base_candidates"
            )
        await pipelines.get_pipeline(graphs.context, *_whose(owner), trigger.pipeline_id)
        return
    if trigger.base_candidates is not None:
        raise InvalidInput("base_candidates is only valid for a pipeline", field="base_candidates")
    await _check_graph(graphs, owner, trigger)


async def _check_graph(graphs: GraphContext, owner: Owner, trigger: StoredTrigger) -> None:
    if trigger.graph_id is None:
        return
    stored = await actions.get_graph(graphs, owner, trigger.graph_id, trigger.graph_version)
    check = (await actions.check_document(graphs, owner, dict(stored.document))).check
    problems = check_inputs(check.graph, trigger.inputs)
    if trigger.kind == TriggerKind.WEBHOOK:
        # The values of paths are unknown until a delivery arrives. Other values can be checked now.
        paths = {name for name, value in trigger.inputs.items() if is_path(value)}
        problems = tuple(
            with_hint(problem)
            for problem in problems
            if problem.code in INPUT_NAME_PROBLEMS or problem.node not in paths
        )
    raise_problems(list(problems))


def _whose(owner: Owner) -> tuple[UUID, UUID]:
    return owner.tenant_id, owner.user_id


async def get_trigger(graphs: GraphContext, owner: Owner, trigger_id: UUID) -> StoredTrigger:
    async with graphs.context.tenant(owner.tenant_id) as tx:
        return await _own(tx, owner, trigger_id)


async def _own(tx: Tx, owner: Owner, trigger_id: UUID) -> StoredTrigger:
    return _require(await store.get_trigger(tx, trigger_id, owner=_whose(owner)), trigger_id)


def _require(trigger: StoredTrigger | None, trigger_id: UUID) -> StoredTrigger:
    if trigger is None:
        raise NotFound(f"trigger {trigger_id} was not found")
    return trigger


async def list_triggers(
    graphs: GraphContext, owner: Owner, *, before: UUID | None = None, limit: int
) -> list[StoredTrigger]:
    """Returns a page of triggers, newest first. `before` is the last id of the previous page."""
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
    """Returns a page of firings, newest first. `before` is the last id of the previous page."""
    async with graphs.context.tenant(owner.tenant_id) as tx:
        await _own(tx, owner, trigger_id)
        last = await store.get_firing(tx, trigger_id, before) if before else None
        if before and last is None:
            raise NotFound(f"firing {before} was not found")
        return await store.list_firings(tx, trigger_id, before=last, limit=min(limit, PAGE_MAX))


async def day_uses(graphs: GraphContext, *triggers: StoredTrigger) -> list[DayUse]:
    """Returns today's usage of each trigger. All triggers must belong to the same tenant."""
    if not triggers:
        return []
    days = {trigger.id: day_of(trigger, graphs.context.clock()) for trigger in triggers}
    async with graphs.context.tenant(triggers[0].tenant_id) as tx:
        uses = await store.day_uses(tx, days)
    return [uses.get(trigger.id, DayUse()) for trigger in triggers]


async def pause_trigger(graphs: GraphContext, owner: Owner, trigger_id: UUID) -> StoredTrigger:
    """Pauses a trigger. A firing that has started continues."""
    return await _change(graphs, owner, trigger_id, {"is_paused": True})


async def resume_trigger(graphs: GraphContext, owner: Owner, trigger_id: UUID) -> StoredTrigger:
    """Resumes a trigger. Scheduled times during the pause don't count as missed."""
    trigger = await get_trigger(graphs, owner, trigger_id)
    if not trigger.is_paused:
        return trigger
    values: dict[str, Any] = {"is_paused": False}
    if trigger.cron is not None:
        now = graphs.context.clock()
        values["next_at"] = check_schedule(trigger.cron, trigger.timezone, now)
    return await _change(graphs, owner, trigger_id, values)


async def renew_secret(graphs: GraphContext, owner: Owner, trigger_id: UUID) -> StoredTrigger:
    """Replaces a webhook's secret. The previous one is no longer accepted."""
    trigger = await get_trigger(graphs, owner, trigger_id)
    if trigger.kind != TriggerKind.WEBHOOK:
        raise Conflict("only webhooks have a secret")
    return await _change(graphs, owner, trigger_id, {"secret_number": trigger.secret_number + 1})


async def _change(
    graphs: GraphContext, owner: Owner, trigger_id: UUID, values: Mapping[str, Any]
) -> StoredTrigger:
    async with graphs.context.tenant_transaction(owner.tenant_id) as tx:
        changed = await store.update_trigger(tx, _whose(owner), trigger_id, values)
    return _require(changed, trigger_id)


async def delete_trigger(graphs: GraphContext, owner: Owner, trigger_id: UUID) -> None:
    """Deletes a trigger and its firings, but not its runs."""
    async with graphs.context.tenant_transaction(owner.tenant_id) as tx:
        if not await store.delete_trigger(tx, _whose(owner), trigger_id):
            raise NotFound(f"trigger {trigger_id} was not found")


async def find_webhook(graphs: GraphContext, trigger_id: UUID) -> StoredTrigger | None:
    """Finds a webhook of any tenant. The caller must check the secret."""
    outage: Unavailable | None = None
    for _, pool in graphs.context.pools.items():
        try:
            async with pool.read() as tx:
                trigger = await store.get_trigger(tx, trigger_id)
        except Unavailable as error:  # the webhook may be stored in this pool
            outage = error
            continue
        if trigger is not None:
            return trigger if trigger.kind == TriggerKind.WEBHOOK else None
    if outage is not None:
        raise outage
    return None


# Firings


class RunCost(NamedTuple):
    """The cost of a run, or the reason why it can't be started."""

    tokens_min: int = 0
    tokens_max: int | None = None  # None means that the maximum is unknown
    refusal: FleetError | None = None


Granted: TypeAlias = int | FleetError


def grant(trigger: StoredTrigger, cost: RunCost, use: DayUse, day: str) -> Granted:
    """Returns the tokens that a run may spend, or an error if the run must not be started.

    The run may spend the rest of the day's tokens, but no more than its own maximum.
    """
    if cost.refusal is not None:
        return cost.refusal
    if use.started >= FIRINGS_PER_DAY_MAX:
        return LimitSpent(
            f"the trigger has already fired {use.started:,} times on {day}{_consequence(trigger)}"
        )
    remaining = trigger.tokens_per_day - use.tokens
    if trigger.max_tokens is not None and cost.tokens_min > trigger.max_tokens:
        return LimitSpent(
            f"a run costs at least {cost.tokens_min:,} tokens, but this trigger's limit per run "
            f"is {trigger.max_tokens:,}; no run was started"
        )
    if cost.tokens_min > remaining or (remaining <= 0 and cost.tokens_max != 0):
        return LimitSpent(
            f"{use.tokens:,} of {trigger.tokens_per_day:,} tokens for {day} are used or reserved by"
            f" active runs, and a run costs at least {cost.tokens_min:,}{_consequence(trigger)}"
        )
    bounds = (remaining, trigger.max_tokens, cost.tokens_max)
    return max(0, min(bound for bound in bounds if bound is not None))


def _consequence(trigger: StoredTrigger) -> str:
    if trigger.kind == TriggerKind.SCHEDULE:
        return "; this run is skipped"
    return "; nothing was started or stored; send it again the next day as a new delivery"


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
    """Raises an error if the trigger's tenant or user is no longer active.

    The key with which the trigger was created isn't checked, because it may have been revoked.
    """
    async with graphs.context.central.read() as tx:
        await tenants.require_kept(tx, trigger.tenant_id)
    async with graphs.context.tenant(trigger.tenant_id) as tx:
        user = await tenants.get_user(tx, trigger.tenant_id, trigger.user_id)
    if not user.is_active:
        raise Forbidden("the owner of this trigger is deactivated")


@dataclass(frozen=True, slots=True)
class Delivery:
    """Identifies a delivery by the sender's id and by its signature, so that a repeated delivery
    can be recognized. Both are optional."""

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
    """Fires a trigger manually or for a webhook delivery.

    Returns the firing and whether it is new. A repeated delivery returns the firing of the first
    one.
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
        firing, is_stored = before, True
        if firing is None:
            firing, is_stored = await _granted(tx, trigger, replace(new, inputs=inputs), cost)
        if not is_stored:
            return firing, True
        if before is None:
            await store.add_firing(tx, firing)
        # A repeated delivery may have an additional key, which must be recognized later as well.
        await store.add_delivery_keys(tx, firing, delivery.key_hashes(cause), now=new.created_at)
    if before is not None:
        return await _result_of(graphs, pool, trigger, before), False
    if firing.status == FiringStatus.STARTING:
        await _start(graphs, pool, trigger, firing)
    return await _get_firing(pool, firing), True


async def _find_repeated(
    tx: Tx, new: TriggerFiring, delivery: Delivery
) -> tuple[TriggerFiring | None, bool]:
    """Returns the firing of an earlier delivery with one of the same keys, and whether all keys are
    already stored."""
    hashes = delivery.key_hashes(new.cause)
    firing, stored_hashes = await store.firing_of_keys(tx, new.trigger_id, hashes)
    # Firings that were stored by versions without delivery keys are found by their id.
    firing = firing or await store.get_firing(tx, new.trigger_id, new.id)
    return firing, stored_hashes.issuperset(hashes)


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
        current = await store.get_firing(tx, firing.trigger_id, firing.id)
    if current is None:
        raise NotFound(f"trigger {firing.trigger_id} was not found")
    return current


async def _result_of(
    graphs: GraphContext, pool: Database, trigger: StoredTrigger, firing: TriggerFiring
) -> TriggerFiring:
    """Waits for the result of a firing that another call has started.

    If that call takes too long, its process may have died, so the run is started here. The
    idempotency key ensures that it is the same run.
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
    """Returns the firing with its granted tokens or its refusal, and whether to store it.

    The caller must have locked the trigger's row.
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
    """Starts the run of a firing and stores the result.

    If a dependency is unavailable or the queue is full, the sweep retries the start later.
    """
    now = graphs.context.clock()
    try:
        run_id = await _start_run(graphs, trigger, firing)
        result: dict[str, Any] = {"status": FiringStatus.STARTED, "run_id": run_id}
    except (Unavailable, QueueFull) as error:
        if firing.tries < TRIES_MAX:
            log.log(log_level_of(error), "trigger %s is delayed: %s", trigger.id, error.message)
            return
        result = _refusal(error)
    except FleetError as error:
        result = _refusal(error)
    async with pool.transaction() as tx:
        await store.end_firing(tx, firing.id, {**result, "ended_at": now})


async def _start_run(graphs: GraphContext, trigger: StoredTrigger, firing: TriggerFiring) -> UUID:
    """Starts the run of a firing and returns its id. Repeated calls return the same run."""
    key, inputs = f"trigger/{firing.id}", firing.inputs or {}
    if trigger.graph_id is not None:
        new_run = NewGraphRun(inputs, trigger.graph_version, firing.granted_tokens, key)
        loaded, _ = await actions.start_run(graphs, _owner(trigger), trigger.graph_id, new_run)
        return loaded.head.id
    if trigger.pipeline_id is None:
        raise NotFound("the trigger has neither a graph nor a pipeline")
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
    """Fires due schedules and continues abandoned firings. Returns True if there may be more
    work."""
    now = graphs.context.clock()
    async with pool.read() as tx:
        due = await store.due_triggers(tx, now, limit=PER_PASS_MAX)
        stuck = await store.stuck_firings(tx, now, limit=PER_PASS_MAX)
    done = [await _fire_moment(graphs, pool, trigger) for trigger in due]
    done += [await _take_up(graphs, pool, firing) for firing in stuck]
    return all(done) and PER_PASS_MAX in (len(due), len(stuck))


async def _fire_moment(graphs: GraphContext, pool: Database, trigger: StoredTrigger) -> bool:
    """Claims a schedule's due times and fires at most one of them. Returns False if this must be
    retried later."""
    try:
        due = due_moments(trigger, graphs.context.clock())
        cost = await _cost(graphs, trigger, trigger.inputs) if due.fire_at else RunCost()
    except FleetError as error:
        log.log(log_level_of(error), "trigger %s is delayed: %s", trigger.id, error.message)
        return False
    except ZoneInfoNotFoundError:
        # Time zones are occasionally renamed. The trigger is paused, so that it doesn't delay
        # others.
        log.warning("trigger %s is paused: unknown time zone %s", trigger.id, trigger.timezone)
        async with pool.transaction() as tx:
            await store.claim_moment(tx, trigger, {"is_paused": True})
        return True
    async with pool.transaction() as tx:
        missed = {"missed": trigger.missed + due.missed, "missed_at": due.missed_at}
        values = {"next_at": due.next_at, **(missed if due.missed else {})}
        if not await store.claim_moment(tx, trigger, values):
            return True  # another control plane has claimed it
        if due.missed:
            await store.add_firing(tx, _missed_firing(graphs, trigger, due))
        firing = await _moment_firing(graphs, tx, trigger, due, cost)
    if firing is not None and firing.status == FiringStatus.STARTING:
        await _start(graphs, pool, trigger, firing)
    return True


async def _moment_firing(
    graphs: GraphContext, tx: Tx, trigger: StoredTrigger, due: DueMoments, cost: RunCost
) -> TriggerFiring | None:
    """Adds the firing for a claimed time. Returns None if there is nothing to fire, or if the
    firing already exists."""
    if due.fire_at is None:
        return None
    firing_id = uuid5(trigger.id, f"moment/{due.fire_at.isoformat()}")
    new = _new_firing(graphs, trigger, firing_id, due.cause)
    planned = replace(new, planned_at=due.fire_at, inputs=dict(trigger.inputs))
    firing, _ = await _granted(tx, trigger, planned, cost)
    return firing if await store.add_firing(tx, firing) else None


def _missed_firing(graphs: GraphContext, trigger: StoredTrigger, due: DueMoments) -> TriggerFiring:
    at = due.missed_at.isoformat() if due.missed_at else ""
    new = _new_firing(graphs, trigger, uuid5(trigger.id, f"missed/{at}"), FiringCause.SCHEDULE)
    return replace(
        new,
        status=FiringStatus.MISSED,
        planned_at=due.missed_at,
        missed=due.missed,
        ended_at=new.created_at,
    )


async def _take_up(graphs: GraphContext, pool: Database, firing: TriggerFiring) -> bool:
    """Continues a firing that couldn't be started or whose process has died."""
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

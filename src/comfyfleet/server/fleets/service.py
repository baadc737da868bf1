"""Fleets and workers: created, assigned workflows, registered, seen, approved, drained, revoked, removed."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from comfyfleet.api.values import is_storable
from comfyfleet.api.worker import BackendFacts
from comfyfleet.errors import (
    Conflict,
    FleetFull,
    InvalidInput,
    NotFound,
    Unauthenticated,
    WorkerRevoked,
)
from comfyfleet.server.db import Tx
from comfyfleet.server.fleets import model, store
from comfyfleet.server.fleets.eligibility import EligibilityCache
from comfyfleet.server.fleets.model import (
    AUTO,
    FROM_FLEET,
    AssignedWorkflow,
    BackendOffer,
    Fleet,
    FleetAssignment,
    FleetLane,
    FleetWorker,
    MissingRequirements,
    Sighting,
    StoredReading,
    WorkerRegistration,
    WorkerStanding,
    apply_sighting,
    check_approval,
    check_cap,
    check_capabilities,
    check_fleet_name,
    facts_hash,
    fleet_in_id,
    own_id,
    with_refusal,
)
from comfyfleet.server.secrets import hash_key, is_key_of_hash
from comfyfleet.workflow.edit.addresses import hint

RETRY_FULL_FLEET_SECONDS = 60
OTHERS_PAGE = 10
OTHERS_PAGES_MAX = 100


async def register_worker(
    tx: Tx,
    fleet: Fleet,
    registration: WorkerRegistration,
    key_hash: str,
    *,
    cap: int,
    now: datetime,
    unseen_since: datetime | None = None,
) -> FleetWorker:
    """Approved at once, unless the fleet wants an operator to do it. `cap`: of a fleet without its own.

    The id of a worker of this fleet that was not seen since `unseen_since` is taken over, orders to
    it included: it has lost its key. What it held is for the caller to requeue.
    """
    check_capabilities(registration.capabilities)
    subset = await _subset(tx, registration.workflow_slugs)
    # Counted while nobody else joins, or two would both be the last one in.
    await store.lock_fleet(tx, fleet.id)
    registration = await _with_own_id(tx, fleet, registration)
    before = await _taken_over(tx, fleet, registration, unseen_since)
    limit = cap if fleet.max_workers is None else fleet.max_workers
    if await store.count_workers(tx, fleet.id) >= limit:
        raise FleetFull(
            f"the fleet {fleet.name} has as many workers as it may: {limit}",
            retry_after_seconds=RETRY_FULL_FLEET_SECONDS,
        )
    row = _row(fleet, registration, key_hash, now) | (before or {})
    if await store.add_worker(tx, row, subset) is None:
        raise _taken(registration)
    return await get_worker(tx, registration.worker_id)


async def _with_own_id(
    tx: Tx, fleet: Fleet, registration: WorkerRegistration
) -> WorkerRegistration:
    """An id that a worker of another fleet has keeps nobody out: here it gets the fleet's name.

    So does one with the name of another fleet, which only that fleet's workers may have.
    """
    known = await find_worker(tx, registration.worker_id)
    is_others = known is not None and known.fleet_id != fleet.id
    if is_others or await _is_named_after_another(tx, fleet, registration.worker_id):
        return replace(registration, worker_id=own_id(fleet, registration.worker_id))
    return registration


async def _is_named_after_another(tx: Tx, fleet: Fleet, worker_id: str) -> bool:
    named = fleet_in_id(worker_id)
    if named is None or named == (fleet.slug, fleet.stage):
        return False
    return await store.get_fleet(tx, *named) is not None


async def _taken_over(
    tx: Tx, fleet: Fleet, registration: WorkerRegistration, unseen_since: datetime | None
) -> dict[str, Any] | None:
    """What of the worker that had this id goes over to the new one; None: nobody had it."""
    known = await find_worker(tx, registration.worker_id)
    if known is None:
        return None
    if known.fleet_id != fleet.id:
        raise _taken(registration)
    if known.revoked_at is not None:
        raise _revoked(known)
    if unseen_since is None or not await store.delete_worker(
        tx, known.id, unseen_since=unseen_since
    ):
        raise _taken(registration)
    # By hand means each one: whoever knows the secret may have waited for this one to fall silent.
    is_approved = known.is_approved and fleet.approval == AUTO
    return {"is_approved": is_approved, "is_draining": known.is_draining}


async def authenticate_worker(tx: Tx, key: str) -> FleetWorker:
    """Whoever comes with the key that it was told of for the first time must `take_next_key`."""
    return _let_in(await store.worker_by_key_hash(tx, hash_key(key)))


async def authenticate_with_standing(tx: Tx, key: str) -> tuple[FleetWorker, WorkerStanding]:
    """The same for one that asks for a job, with what decides that: in one statement."""
    worker, standing = await store.by_key_hash(tx, hash_key(key))
    return _let_in(worker), standing


def _let_in(worker: FleetWorker | None) -> FleetWorker:
    if worker is None:
        raise Unauthenticated("this is not a worker's key")
    if worker.revoked_at is not None:
        raise _revoked(worker)
    return worker


async def take_next_key(tx: Tx, worker: FleetWorker, key_hash: str) -> FleetWorker:
    """From now on it has this key, and the one before is dead."""
    if not await store.take_next_key(tx, worker.id, key_hash):
        raise Unauthenticated("this is not a worker's key")
    return replace(worker, key_hash=key_hash, next_key=None, next_key_hash=None)


async def reauthenticate(tx: Tx, worker_id: str, key_hash: str) -> FleetWorker:
    """As it now is. Raises Unauthenticated if its key was revoked or replaced meanwhile."""
    found = await store.worker_by_key_hash(tx, key_hash)
    if found is None or found.key_hash != key_hash:
        raise Unauthenticated(f"the key of the worker {worker_id} was replaced or removed")
    if found.revoked_at is not None:
        raise _revoked(found)
    return found


def _revoked(worker: FleetWorker) -> WorkerRevoked:
    return WorkerRevoked(
        f"the worker {worker.worker_id} was revoked",
        hint="An operator can let it in again: comfyfleet admin workers approve",
    )


async def find_worker(tx: Tx, worker_id: str) -> FleetWorker | None:
    return await store.worker_by_id(tx, worker_id) if is_storable(worker_id) else None


async def get_worker(tx: Tx, worker_id: str) -> FleetWorker:
    worker = await find_worker(tx, worker_id)
    if worker is None:
        raise NotFound(f"there is no worker {worker_id}")
    return worker


async def workers_of(
    tx: Tx,
    fleet: Fleet | None = None,
    *,
    seen_since: datetime | None = None,
    after_worker_id: str | None = None,
    limit: int | None = None,
) -> list[FleetWorker]:
    """By their ids, of one fleet or of all."""
    return await store.all_workers(
        tx,
        fleet_ids=None if fleet is None else [fleet.id],
        seen_since=seen_since,
        after_worker_id=after_worker_id,
        limit=limit,
    )


async def one_of_each_kind(tx: Tx, fleet: Fleet, *, seen_since: datetime) -> list[FleetWorker]:
    """Workers of the fleet that stand for all: of those that can run the same, one is enough."""
    return await store.one_of_each_kind(tx, fleet.id, seen_since=seen_since)


async def count_workers(tx: Tx, fleet: Fleet) -> int:
    return await store.count_workers(tx, fleet.id)


async def workers_for(tx: Tx, workflow_id: int, *, stage: str) -> list[FleetWorker]:
    """Those whose fleet has the workflow and that don't leave it out, whatever state they are in."""
    fleets = [fleet.id for fleet in await store.fleets_with(tx, workflow_id, stage)]
    return [
        worker
        for worker in await store.all_workers(tx, fleet_ids=fleets)
        if worker.workflow_ids is None or workflow_id in worker.workflow_ids
    ]


async def facts_of(tx: Tx, workers: Iterable[FleetWorker]) -> dict[str, BackendFacts]:
    """What their backends are and have, by worker; one that has told nothing is not there."""
    return await store.backend_facts_of(tx, [worker.id for worker in workers])


async def reported_object_infos(tx: Tx) -> dict[int, str]:
    """The hash of what each fleet's backends can do, as a worker of it says."""
    return await store.object_info_hashes(tx)


async def record_sighting(
    tx: Tx,
    worker: FleetWorker,
    sighting: Sighting,
    *,
    now: datetime,
    every: timedelta = model.SEEN_WRITE_EVERY,
) -> FleetWorker:
    """The worker as it now is. Written only when that is due or something of weight changed: by one
    statement, unless it tells of its backend."""
    known = apply_sighting(worker, sighting, now)
    if not model.is_worth_writing(worker, sighting, now, every):
        return known
    if sighting.capabilities is not None:
        check_capabilities(sighting.capabilities)
    reading = None
    if sighting.reading is not None:
        told = sighting.reading.model_dump(mode="json", exclude_none=True)
        reading = store.due(worker.worker_id, told, now=now, none_since=now - model.READING_EVERY)
    if not await store.note_sighting(tx, worker.id, _sighted(known), reading):
        raise Unauthenticated(f"the worker {worker.worker_id} was removed")
    if sighting.backend is not None:
        await store.update_worker(tx, worker.id, _facts(sighting.backend))
    return known


async def with_keys(tx: Tx, key_hashes: Collection[str]) -> list[FleetWorker]:
    """Those whose key it is, without those that were revoked."""
    return await store.workers_with_keys(tx, key_hashes)


async def note_seen(tx: Tx, workers: Iterable[FleetWorker], *, now: datetime) -> None:
    """They are there, and have nothing new to tell."""
    await store.update_seen(tx, [worker.id for worker in workers], now)


async def get_standing(tx: Tx, worker: FleetWorker) -> WorkerStanding:
    return await store.of_worker(tx, worker.fleet_id, worker.worker_id)


async def lanes_of(
    tx: Tx,
    worker: FleetWorker,
    providers: Iterable[str],
    *,
    assigned: Sequence[AssignedWorkflow] | None = None,
    abilities: EligibilityCache | None = None,
    offer: BackendOffer | None = None,
) -> frozenset[FleetLane]:
    """What it may and can run just now: nothing while it drains, or was revoked. `assigned`: the
    workflows of its fleet, if they are known."""
    if assigned is None:
        assigned = (await get_standing(tx, worker)).assigned
    if abilities is not None:
        assigned = await abilities.able(tx, offer, assigned)
    return model.lanes(worker, assigned, providers)


async def lanes_of_all(
    tx: Tx, workers: Collection[FleetWorker], *, abilities: EligibilityCache, now: datetime
) -> dict[str, frozenset[FleetLane]]:
    """The same for each of many, by the hash of its key; what is alike in them is decided once."""
    assigned = await store.assigned(tx, {worker.fleet_id for worker in workers})
    offers = await abilities.offers(tx, workers, now=now)
    alike: dict[Hashable, frozenset[FleetLane]] = {}
    found: dict[str, frozenset[FleetLane]] = {}
    for worker in workers:
        offer = offers.get(worker.worker_id)
        kind = (
            worker.fleet_id,
            worker.takes_jobs,
            worker.workflow_ids,
            worker.capabilities,
            worker.providers,
            offer.key if offer else None,
        )
        if kind not in alike:
            able = await abilities.able(tx, offer, assigned.get(worker.fleet_id, []))
            alike[kind] = model.lanes(worker, able, worker.providers)
        found[worker.key_hash] = alike[kind]
    return found


async def workflows_of(tx: Tx, worker: FleetWorker) -> list[str]:
    """The slugs of what it may run as far as it depends on assignments, sorted."""
    assigned = await store.assigned(tx, [worker.fleet_id])
    return [
        each.slug
        for each in assigned.get(worker.fleet_id, ())
        if worker.workflow_ids is None or each.workflow_id in worker.workflow_ids
    ]


async def live_workers_by_lane(tx: Tx, *, seen_since: datetime) -> dict[FleetLane, frozenset[str]]:
    """Who could take a job of each lane: approved, not draining, and heard of lately."""
    live = await store.all_workers(tx, seen_since=seen_since)
    return model.workers_by_lane(live, await store.assigned(tx))


async def find_two_workers(
    tx: Tx,
    lanes: Collection[tuple[int, str, str]],
    *,
    seen_since: datetime,
    abilities: EligibilityCache | None = None,
) -> frozenset[str]:
    """Two who live and may and can run any of these lanes, which are of one stage; or all there are.

    The first page mostly settles it.
    """
    if not lanes:
        return frozenset()
    stage = next(iter(lanes))[1]
    fleets = await store.ids_with_any(tx, {lane[0] for lane in lanes}, stage)
    assigned = await store.assigned(tx, fleets)
    found: frozenset[str] = frozenset()
    behind: str | None = None
    for _ in range(OTHERS_PAGES_MAX):
        some = await store.all_workers(
            tx,
            fleet_ids=fleets,
            seen_since=seen_since,
            only_taking_jobs=True,
            after_worker_id=behind,
            limit=OTHERS_PAGE,
        )
        able = await _able(tx, some, assigned, abilities, now=seen_since)
        found = found.union(*(able.get(FleetLane(*lane), frozenset()) for lane in lanes))
        if len(found) > 1 or len(some) < OTHERS_PAGE:
            break
        behind = some[-1].worker_id
    return found


async def _able(
    tx: Tx,
    workers: Collection[FleetWorker],
    assigned: Mapping[int, list[AssignedWorkflow]],
    abilities: EligibilityCache | None,
    *,
    now: datetime,
) -> dict[FleetLane, frozenset[str]]:
    """The workers of each lane, of those that can run it."""
    if abilities is None:
        return model.workers_by_lane(workers, assigned)
    offers = await abilities.offers(tx, workers, now=now)
    found: dict[FleetLane, frozenset[str]] = {}
    for worker in workers:
        mine = assigned.get(worker.fleet_id, [])
        able = await abilities.able(tx, offers.get(worker.worker_id), mine)
        for lane in model.lanes(worker, able, worker.providers):
            found[lane] = found.get(lane, frozenset()) | {worker.worker_id}
    return found


async def record_refusal(
    tx: Tx, worker: FleetWorker, missing: MissingRequirements, *, now: datetime
) -> None:
    """Its backend lacks these, whatever its lists say; until it tells its facts anew."""
    await store.update_worker(
        tx, worker.id, {"refusals": with_refusal(worker.refusals, missing, now)}
    )


async def stale_workers(tx: Tx, *, unseen_since: datetime) -> list[FleetWorker]:
    return await store.all_workers(tx, unseen_since=unseen_since)


async def approve_worker(tx: Tx, worker: FleetWorker) -> FleetWorker:
    """It may take jobs. A key that somebody else may have is rotated instead."""
    return await _changed(tx, worker, is_approved=True, revoked_at=None)


async def revoke_worker(tx: Tx, worker: FleetWorker, *, now: datetime) -> FleetWorker:
    """Its key is refused from the next word on, and its id lets nobody in.

    What it holds is for the caller to requeue.
    """
    return await _changed(tx, worker, is_approved=False, revoked_at=worker.revoked_at or now)


async def drain_worker(tx: Tx, worker: FleetWorker, *, is_draining: bool = True) -> FleetWorker:
    """What runs ends, nothing new begins."""
    return await _changed(tx, worker, is_draining=is_draining)


async def rotate_key(tx: Tx, worker: FleetWorker, *, key: str, at_once: bool = False) -> None:
    """The worker is told with its next answer; the key it has is good until it uses the new one.

    At once: the key that it has is dead now, as somebody else may have it.
    """
    told = {"next_key": None, "next_key_hash": None, "key_hash": hash_key(key)}
    if not at_once:
        told = {"next_key": key, "next_key_hash": hash_key(key)}
    await store.update_worker(tx, worker.id, told)


async def remove_worker(tx: Tx, worker: FleetWorker) -> bool:
    """Its id and its place in the fleet are free; false: somebody else removed it."""
    return await store.delete_worker(tx, worker.id)


async def remove_stale_worker(tx: Tx, worker: FleetWorker, *, unseen_since: datetime) -> bool:
    """Only if it is still unseen: it may have come back while the sweep was looking."""
    return await store.delete_worker(tx, worker.id, unseen_since=unseen_since)


async def readings(tx: Tx, worker_id: str, *, since: datetime, limit: int) -> list[StoredReading]:
    """The newest first."""
    return await store.newest_readings(tx, worker_id, since=since, limit=limit)


async def prune_readings(tx: Tx, *, before: datetime, limit: int) -> int:
    """Deletes old ones, at most `limit` at a time; tells how many."""
    return await store.delete_readings_before(tx, before, limit=limit)


async def _subset(tx: Tx, slugs: tuple[str, ...] | None) -> list[int]:
    if slugs is None:
        return []
    known = await store.workflow_ids(tx, [slug for slug in slugs if is_storable(slug)])
    unknown = sorted(set(slugs) - known.keys())
    if unknown or not slugs:
        message = f"there is no workflow {', '.join(unknown)}" if unknown else "name a workflow"
        raise InvalidInput(message, field="workflow_slugs", unknown=unknown)
    return list(known.values())


def _taken(registration: WorkerRegistration) -> Conflict:
    return Conflict(f"there is a worker {registration.worker_id} already", field="worker_id")


def _row(
    fleet: Fleet, registration: WorkerRegistration, key_hash: str, now: datetime
) -> dict[str, Any]:
    return {
        "worker_id": registration.worker_id,
        "key_hash": key_hash,
        "fleet_id": fleet.id,
        "registration_source": FROM_FLEET,
        "protocol_version": registration.protocol_version,
        "capabilities": sorted(registration.capabilities),
        "providers": list(registration.providers),
        "max_concurrency": registration.max_concurrency,
        "current_load": 0,
        "is_approved": fleet.approval == AUTO,
        "is_draining": False,
        **_facts(registration.backend),
        "models_loaded": [],
        "last_seen_at": now,
        "created_at": now,
    }


def _sighted(known: FleetWorker) -> Mapping[str, Any]:
    return {
        "last_seen_at": known.last_seen_at,
        "current_load": known.current_load,
        "models_loaded": list(known.models_loaded),
        "capabilities": sorted(known.capabilities),
        "providers": list(known.providers),
        "max_concurrency": known.max_concurrency,
    }


def _facts(facts: BackendFacts | None) -> dict[str, Any]:
    """What was refused before may be there now: that is forgotten."""
    if facts is None:
        return {"facts": None, "facts_hash": None, "refusals": None}
    told = facts.model_dump(mode="json")
    return {"facts": told, "facts_hash": facts_hash(facts), "refusals": None}


async def _changed(tx: Tx, worker: FleetWorker, **values: Any) -> FleetWorker:
    if not await store.update_worker(tx, worker.id, values):
        raise NotFound(f"there is no worker {worker.worker_id}")
    return replace(worker, **values)


async def create(
    tx: Tx,
    *,
    slug: str,
    stage: str,
    secret_hash: str,
    max_workers: int | None,
    now: datetime,
    approval: str = AUTO,
) -> Fleet:
    check_fleet_name(slug, stage)
    check_cap(max_workers)
    check_approval(approval)
    row = {
        "slug": slug,
        "stage": stage,
        "secret_hash": secret_hash,
        "max_workers": max_workers,
        "approval": approval,
        "created_at": now,
    }
    fleet = await store.add_fleet(tx, row)
    if fleet is None:
        raise Conflict(f"there is a fleet {slug}/{stage} already", field="slug")
    return fleet


async def get(tx: Tx, slug: str, stage: str) -> Fleet:
    name = f"{slug}/{stage}"
    return _found(await store.get_fleet(tx, slug, stage) if is_storable(name) else None, name)


async def by_id(tx: Tx, fleet_id: int) -> Fleet:
    return _found(await store.fleet_by_id(tx, fleet_id), str(fleet_id))


async def all_of(tx: Tx) -> list[Fleet]:
    return await store.all_fleets(tx)


def check_secret(fleet: Fleet, secret: str) -> None:
    if not is_key_of_hash(secret, fleet.secret_hash):
        raise Unauthenticated(f"that is not the secret of the fleet {fleet.name}")


async def check_known_secret(tx: Tx, secret: str) -> None:
    """Whether any fleet has it: which one must have it is said in the body."""
    if not await store.has_fleet_secret(tx, hash_key(secret)):
        raise Unauthenticated(
            "that is the secret of no fleet here" if secret else "the fleet's secret is needed",
            hint="Send X-Fleet-Secret: SECRET; it was shown when the fleet was made.",
        )


async def by_secret(tx: Tx, secret: str) -> Fleet:
    """Secrets are made by us and long: no two fleets have the same one."""
    found = await store.fleet_by_secret(tx, hash_key(secret))
    if found is None:
        raise Unauthenticated("that is the secret of no fleet here")
    return found


async def rotate_secret(tx: Tx, fleet: Fleet, *, secret_hash: str) -> Fleet:
    """Only new workers need it: those that have joined go on with keys of their own."""
    return _found(await store.update_fleet(tx, fleet.id, {"secret_hash": secret_hash}), fleet.name)


async def set_cap(tx: Tx, fleet: Fleet, *, max_workers: int | None) -> Fleet:
    """A lower cap sends nobody away; it lets nobody else in."""
    check_cap(max_workers)
    return _found(await store.update_fleet(tx, fleet.id, {"max_workers": max_workers}), fleet.name)


async def set_approval(tx: Tx, fleet: Fleet, *, approval: str) -> Fleet:
    """For those who join from now on."""
    check_approval(approval)
    return _found(await store.update_fleet(tx, fleet.id, {"approval": approval}), fleet.name)


async def set_object_info(tx: Tx, fleet: Fleet, *, key: str, content_hash: str) -> Fleet:
    values = {"object_info_key": key, "object_info_hash": content_hash}
    return _found(await store.update_fleet(tx, fleet.id, values), fleet.name)


async def set_open_workflow(tx: Tx, fleet: Fleet, *, workflow_id: int | None) -> Fleet:
    return _found(
        await store.update_fleet(tx, fleet.id, {"open_workflow_id": workflow_id}), fleet.name
    )


async def assign(
    tx: Tx, fleet: Fleet, workflow_ids: Collection[int], *, now: datetime
) -> FleetAssignment:
    """These and no others; tells which are new, as jobs of theirs may now have somebody to wait for.

    The fleet's open workflow is none of the operator's business and stays.
    """
    wanted = set(workflow_ids)
    if fleet.open_workflow_id is not None:
        wanted.add(fleet.open_workflow_id)
    unknown = wanted - await store.known_workflow_ids(tx, wanted)
    if unknown:
        raise InvalidInput(
            f"there is no workflow {', '.join(map(str, sorted(unknown)))}", field="workflow_ids"
        )
    await store.lock_fleet(tx, fleet.id)
    before = {each.workflow_id for each in await assigned_to(tx, fleet)}
    await store.unassign(tx, fleet.id, before - wanted)
    await store.assign(tx, fleet.id, wanted - before, now)
    return FleetAssignment(
        frozenset(wanted), frozenset(wanted - before), frozenset(before - wanted)
    )


async def assigned_to(tx: Tx, fleet: Fleet) -> Sequence[AssignedWorkflow]:
    return (await store.assigned(tx, [fleet.id])).get(fleet.id, [])


async def assignments(tx: Tx) -> dict[int, list[AssignedWorkflow]]:
    """The workflows of every fleet, by the fleet's number."""
    return await store.assigned(tx)


async def fleets_with(tx: Tx, workflow_id: int, *, stage: str | None = None) -> list[Fleet]:
    """The fleets that a workflow is assigned to."""
    return await store.fleets_with(tx, workflow_id, stage)


async def workflow_ids(tx: Tx, slugs: Collection[str]) -> dict[str, int]:
    """By slug; one that doesn't exist is named in the error."""
    known = await store.workflow_ids(tx, [slug for slug in slugs if is_storable(slug)])
    unknown = sorted(set(slugs) - known.keys())
    if unknown:
        near = await store.slugs(tx)
        raise InvalidInput(
            f"there is no workflow {', '.join(unknown)}{hint(unknown[0], near, 'there are')}",
            field="workflow_slugs",
            unknown=unknown,
        )
    return known


def _found(fleet: Fleet | None, name: str) -> Fleet:
    if fleet is None:
        raise NotFound(f"there is no fleet {name}")
    return fleet


__all__ = [
    "all_of",
    "approve_worker",
    "assign",
    "assigned_to",
    "assignments",
    "authenticate_with_standing",
    "authenticate_worker",
    "by_id",
    "check_known_secret",
    "check_secret",
    "count_workers",
    "create",
    "drain_worker",
    "facts_of",
    "find_two_workers",
    "find_worker",
    "fleets_with",
    "get",
    "get_standing",
    "get_worker",
    "lanes_of",
    "lanes_of_all",
    "live_workers_by_lane",
    "note_seen",
    "one_of_each_kind",
    "prune_readings",
    "readings",
    "reauthenticate",
    "record_refusal",
    "record_sighting",
    "register_worker",
    "remove_stale_worker",
    "remove_worker",
    "reported_object_infos",
    "revoke_worker",
    "rotate_key",
    "rotate_secret",
    "set_approval",
    "set_cap",
    "set_object_info",
    "set_open_workflow",
    "stale_workers",
    "take_next_key",
    "with_keys",
    "workers_for",
    "workers_of",
    "workflow_ids",
    "workflows_of",
]

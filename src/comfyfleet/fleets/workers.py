"""Workers: they join by their fleet's secret, are seen, and leave; operators may hold them back."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from comfyfleet.db import Tx
from comfyfleet.fleets import decide
from comfyfleet.fleets.abilities import Abilities
from comfyfleet.fleets.model import (
    AUTO,
    FROM_FLEET,
    Assigned,
    Fleet,
    Lane,
    Registration,
    Sighting,
    Standing,
    StoredReading,
    Worker,
    after,
    check_capabilities,
    fleet_in_id,
    own_id,
)
from comfyfleet.fleets.offers import Missing, Offer, facts_hash, with_refusal
from comfyfleet.fleets.store import fleets as fleet_store
from comfyfleet.fleets.store import readings as reading_store
from comfyfleet.fleets.store import standings as standing_store
from comfyfleet.fleets.store import workers as store
from comfyfleet.kernel.errors import (
    Conflict,
    FleetFull,
    InvalidInput,
    NotFound,
    Unauthenticated,
    WorkerRevoked,
)
from comfyfleet.kernel.keys import hashed
from comfyfleet.kernel.texts import is_storable
from comfyfleet.wire.messages import BackendFacts

RETRY_FULL_FLEET_SECONDS = 60
OTHERS_PAGE = 10
OTHERS_PAGES_MAX = 100


async def register(
    tx: Tx,
    fleet: Fleet,
    registration: Registration,
    key_hash: str,
    *,
    cap: int,
    now: datetime,
    unseen_since: datetime | None = None,
) -> Worker:
    """Approved at once, unless the fleet wants an operator to do it. `cap`: of a fleet without its own.

    The id of a worker of this fleet that was not seen since `unseen_since` is taken over, orders to
    it included: it has lost its key. What it held is for the caller to requeue.
    """
    check_capabilities(registration.capabilities)
    subset = await _subset(tx, registration.workflow_slugs)
    # Counted while nobody else joins, or two would both be the last one in.
    await fleet_store.lock(tx, fleet.id)
    registration = await _with_own_id(tx, fleet, registration)
    before = await _taken_over(tx, fleet, registration, unseen_since)
    limit = cap if fleet.max_workers is None else fleet.max_workers
    if await store.count(tx, fleet.id) >= limit:
        raise FleetFull(
            f"the fleet {fleet.name} has as many workers as it may: {limit}",
            retry_after_seconds=RETRY_FULL_FLEET_SECONDS,
        )
    row = _row(fleet, registration, key_hash, now) | (before or {})
    if await store.add(tx, row, subset) is None:
        raise _taken(registration)
    return await get_worker(tx, registration.worker_id)


async def _with_own_id(tx: Tx, fleet: Fleet, registration: Registration) -> Registration:
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
    return await fleet_store.get(tx, *named) is not None


async def _taken_over(
    tx: Tx, fleet: Fleet, registration: Registration, unseen_since: datetime | None
) -> dict[str, Any] | None:
    """What of the worker that had this id goes over to the new one; None: nobody had it."""
    known = await find_worker(tx, registration.worker_id)
    if known is None:
        return None
    if known.fleet_id != fleet.id:
        raise _taken(registration)
    if known.revoked_at is not None:
        raise _revoked(known)
    if unseen_since is None or not await store.remove(tx, known.id, unseen_since=unseen_since):
        raise _taken(registration)
    # By hand means each one: whoever knows the secret may have waited for this one to fall silent.
    is_approved = known.is_approved and fleet.approval == AUTO
    return {"is_approved": is_approved, "is_draining": known.is_draining}


async def authenticate(tx: Tx, key: str) -> Worker:
    """Whoever comes with the key that it was told of for the first time must `take_next_key`."""
    return _let_in(await store.by_key_hash(tx, hashed(key)))


async def authenticate_with_standing(tx: Tx, key: str) -> tuple[Worker, Standing]:
    """The same for one that asks for a job, with what decides that: in one statement."""
    worker, standing = await standing_store.by_key_hash(tx, hashed(key))
    return _let_in(worker), standing


def _let_in(worker: Worker | None) -> Worker:
    if worker is None:
        raise Unauthenticated("that is no worker's key")
    if worker.revoked_at is not None:
        raise _revoked(worker)
    return worker


async def take_next_key(tx: Tx, worker: Worker, key_hash: str) -> Worker:
    """From now on it has this key, and the one before is dead."""
    if not await store.take_next_key(tx, worker.id, key_hash):
        raise Unauthenticated("that is no worker's key")
    return replace(worker, key_hash=key_hash, next_key=None, next_key_hash=None)


async def still_known(tx: Tx, worker_id: str, key_hash: str) -> Worker:
    """As it now is. Raises Unauthenticated if its key was revoked or replaced meanwhile."""
    found = await store.by_key_hash(tx, key_hash)
    if found is None or found.key_hash != key_hash:
        raise Unauthenticated(f"the key of the worker {worker_id} was replaced or removed")
    if found.revoked_at is not None:
        raise _revoked(found)
    return found


def _revoked(worker: Worker) -> WorkerRevoked:
    return WorkerRevoked(
        f"the worker {worker.worker_id} was revoked",
        hint="An operator can let it in again: comfyfleet admin workers approve",
    )


async def find_worker(tx: Tx, worker_id: str) -> Worker | None:
    return await store.by_worker_id(tx, worker_id) if is_storable(worker_id) else None


async def get_worker(tx: Tx, worker_id: str) -> Worker:
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
) -> list[Worker]:
    """By their ids, of one fleet or of all."""
    return await store.all_of(
        tx,
        fleet_ids=None if fleet is None else [fleet.id],
        seen_since=seen_since,
        after_worker_id=after_worker_id,
        limit=limit,
    )


async def one_of_each_kind(tx: Tx, fleet: Fleet, *, seen_since: datetime) -> list[Worker]:
    """Workers of the fleet that stand for all: of those that can run the same, one is enough."""
    return await store.one_of_each_kind(tx, fleet.id, seen_since=seen_since)


async def count_workers(tx: Tx, fleet: Fleet) -> int:
    return await store.count(tx, fleet.id)


async def workers_for(tx: Tx, workflow_id: int, *, stage: str) -> list[Worker]:
    """Those whose fleet has the workflow and that don't leave it out, whatever state they are in."""
    fleets = [fleet.id for fleet in await fleet_store.fleets_with(tx, workflow_id, stage)]
    return [
        worker
        for worker in await store.all_of(tx, fleet_ids=fleets)
        if worker.workflow_ids is None or workflow_id in worker.workflow_ids
    ]


async def facts_of(tx: Tx, workers: Iterable[Worker]) -> dict[str, BackendFacts]:
    """What their backends are and have, by worker; one that has told nothing is not there."""
    return await store.facts_of(tx, [worker.id for worker in workers])


async def reported_object_infos(tx: Tx) -> dict[int, str]:
    """The hash of what each fleet's backends can do, as a worker of it says."""
    return await store.object_info_hashes(tx)


async def seen(
    tx: Tx,
    worker: Worker,
    sighting: Sighting,
    *,
    now: datetime,
    every: timedelta = decide.SEEN_WRITE_EVERY,
) -> Worker:
    """The worker as it now is. Written only when that is due or something of weight changed: by one
    statement, unless it tells of its backend."""
    known = after(worker, sighting, now)
    if not decide.is_worth_writing(worker, sighting, now, every):
        return known
    if sighting.capabilities is not None:
        check_capabilities(sighting.capabilities)
    reading = None
    if sighting.reading is not None:
        told = sighting.reading.model_dump(mode="json", exclude_none=True)
        reading = reading_store.due(
            worker.worker_id, told, now=now, none_since=now - decide.READING_EVERY
        )
    if not await store.note_sighting(tx, worker.id, _sighted(known), reading):
        raise Unauthenticated(f"the worker {worker.worker_id} was removed")
    if sighting.backend is not None:
        await store.change(tx, worker.id, _facts(sighting.backend))
    return known


async def with_keys(tx: Tx, key_hashes: Collection[str]) -> list[Worker]:
    """Those whose key it is, without those that were revoked."""
    return await store.with_keys(tx, key_hashes)


async def note_seen(tx: Tx, workers: Iterable[Worker], *, now: datetime) -> None:
    """They are there, and have nothing new to tell."""
    await store.note_seen(tx, [worker.id for worker in workers], now)


async def standing_of(tx: Tx, worker: Worker) -> Standing:
    return await standing_store.of_worker(tx, worker.fleet_id, worker.worker_id)


async def lanes_of(
    tx: Tx,
    worker: Worker,
    providers: Iterable[str],
    *,
    assigned: Sequence[Assigned] | None = None,
    abilities: Abilities | None = None,
    offer: Offer | None = None,
) -> frozenset[Lane]:
    """What it may and can run just now: nothing while it drains, or was revoked. `assigned`: the
    workflows of its fleet, if they are known."""
    if assigned is None:
        assigned = (await standing_of(tx, worker)).assigned
    if abilities is not None:
        assigned = await abilities.able(tx, offer, assigned)
    return decide.lanes(worker, assigned, providers)


async def lanes_of_all(
    tx: Tx, workers: Collection[Worker], *, abilities: Abilities, now: datetime
) -> dict[str, frozenset[Lane]]:
    """The same for each of many, by the hash of its key; what is alike in them is decided once."""
    assigned = await fleet_store.assigned(tx, {worker.fleet_id for worker in workers})
    offers = await abilities.offers(tx, workers, now=now)
    alike: dict[Hashable, frozenset[Lane]] = {}
    found: dict[str, frozenset[Lane]] = {}
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
            alike[kind] = decide.lanes(worker, able, worker.providers)
        found[worker.key_hash] = alike[kind]
    return found


async def workflows_of(tx: Tx, worker: Worker) -> list[str]:
    """The slugs of what it may run as far as it depends on assignments, sorted."""
    assigned = await fleet_store.assigned(tx, [worker.fleet_id])
    return [
        each.slug
        for each in assigned.get(worker.fleet_id, ())
        if worker.workflow_ids is None or each.workflow_id in worker.workflow_ids
    ]


async def live_by_lane(tx: Tx, *, seen_since: datetime) -> dict[Lane, frozenset[str]]:
    """Who could take a job of each lane: approved, not draining, and heard of lately."""
    live = await store.all_of(tx, seen_since=seen_since)
    return decide.by_lane(live, await fleet_store.assigned(tx))


async def two_for(
    tx: Tx,
    lanes: Collection[tuple[int, str, str]],
    *,
    seen_since: datetime,
    abilities: Abilities | None = None,
) -> frozenset[str]:
    """Two who live and may and can run any of these lanes, which are of one stage; or all there are.

    The first page mostly settles it.
    """
    if not lanes:
        return frozenset()
    stage = next(iter(lanes))[1]
    fleets = await fleet_store.ids_with_any(tx, {lane[0] for lane in lanes}, stage)
    assigned = await fleet_store.assigned(tx, fleets)
    found: frozenset[str] = frozenset()
    behind: str | None = None
    for _ in range(OTHERS_PAGES_MAX):
        some = await store.all_of(
            tx,
            fleet_ids=fleets,
            seen_since=seen_since,
            only_taking_jobs=True,
            after_worker_id=behind,
            limit=OTHERS_PAGE,
        )
        able = await _able(tx, some, assigned, abilities, now=seen_since)
        found = found.union(*(able.get(Lane(*lane), frozenset()) for lane in lanes))
        if len(found) > 1 or len(some) < OTHERS_PAGE:
            break
        behind = some[-1].worker_id
    return found


async def _able(
    tx: Tx,
    workers: Collection[Worker],
    assigned: Mapping[int, list[Assigned]],
    abilities: Abilities | None,
    *,
    now: datetime,
) -> dict[Lane, frozenset[str]]:
    """The workers of each lane, of those that can run it."""
    if abilities is None:
        return decide.by_lane(workers, assigned)
    offers = await abilities.offers(tx, workers, now=now)
    found: dict[Lane, frozenset[str]] = {}
    for worker in workers:
        mine = assigned.get(worker.fleet_id, [])
        able = await abilities.able(tx, offers.get(worker.worker_id), mine)
        for lane in decide.lanes(worker, able, worker.providers):
            found[lane] = found.get(lane, frozenset()) | {worker.worker_id}
    return found


async def note_refusal(tx: Tx, worker: Worker, missing: Missing, *, now: datetime) -> None:
    """Its backend lacks these, whatever its lists say; until it tells its facts anew."""
    await store.change(tx, worker.id, {"refusals": with_refusal(worker.refusals, missing, now)})


async def stale(tx: Tx, *, unseen_since: datetime) -> list[Worker]:
    return await store.all_of(tx, unseen_since=unseen_since)


async def approve(tx: Tx, worker: Worker) -> Worker:
    """It may take jobs. A key that somebody else may have is rotated instead."""
    return await _changed(tx, worker, is_approved=True, revoked_at=None)


async def revoke(tx: Tx, worker: Worker, *, now: datetime) -> Worker:
    """Its key is refused from the next word on, and its id lets nobody in.

    What it holds is for the caller to requeue.
    """
    return await _changed(tx, worker, is_approved=False, revoked_at=worker.revoked_at or now)


async def drain(tx: Tx, worker: Worker, *, is_draining: bool = True) -> Worker:
    """What runs ends, nothing new begins."""
    return await _changed(tx, worker, is_draining=is_draining)


async def rotate_key(tx: Tx, worker: Worker, *, key: str, at_once: bool = False) -> None:
    """The worker is told with its next answer; the key it has is good until it uses the new one.

    At once: the key that it has is dead now, as somebody else may have it.
    """
    told = {"next_key": None, "next_key_hash": None, "key_hash": hashed(key)}
    if not at_once:
        told = {"next_key": key, "next_key_hash": hashed(key)}
    await store.change(tx, worker.id, told)


async def remove(tx: Tx, worker: Worker) -> bool:
    """Its id and its place in the fleet are free; false: somebody else removed it."""
    return await store.remove(tx, worker.id)


async def remove_stale(tx: Tx, worker: Worker, *, unseen_since: datetime) -> bool:
    """Only if it is still unseen: it may have come back while the sweep was looking."""
    return await store.remove(tx, worker.id, unseen_since=unseen_since)


async def readings(tx: Tx, worker_id: str, *, since: datetime, limit: int) -> list[StoredReading]:
    """The newest first."""
    return await reading_store.newest(tx, worker_id, since=since, limit=limit)


async def thin_readings(tx: Tx, *, before: datetime, limit: int) -> int:
    """Deletes old ones, at most `limit` at a time; tells how many."""
    return await reading_store.delete_before(tx, before, limit=limit)


async def _subset(tx: Tx, slugs: tuple[str, ...] | None) -> list[int]:
    if slugs is None:
        return []
    known = await fleet_store.workflow_ids(tx, [slug for slug in slugs if is_storable(slug)])
    unknown = sorted(set(slugs) - known.keys())
    if unknown or not slugs:
        message = f"there is no workflow {', '.join(unknown)}" if unknown else "name a workflow"
        raise InvalidInput(message, field="workflow_slugs", unknown=unknown)
    return list(known.values())


def _taken(registration: Registration) -> Conflict:
    return Conflict(f"there is a worker {registration.worker_id} already", field="worker_id")


def _row(fleet: Fleet, registration: Registration, key_hash: str, now: datetime) -> dict[str, Any]:
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


def _sighted(known: Worker) -> Mapping[str, Any]:
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


async def _changed(tx: Tx, worker: Worker, **values: Any) -> Worker:
    if not await store.change(tx, worker.id, values):
        raise NotFound(f"there is no worker {worker.worker_id}")
    return replace(worker, **values)

"""Operations on fleets (create, assign workflows, set limits) and workers (register, approve,
drain, revoke, remove)."""

import asyncio
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from comfyfleet.api.admin import FleetPrompts
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
    BackendKind,
    BackendOffer,
    BackendSummary,
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
    check_starts_within,
    facts_hash,
    fleet_prefix_of,
    prefixed_worker_id,
    with_refusal,
)
from comfyfleet.server.secrets import hash_key, is_key_of_hash
from comfyfleet.workflow.edit.input_lookup import hint

RETRY_FULL_FLEET_SECONDS = 60
WORKERS_PAGE = 10  # workers that are read together
WORKERS_PAGES_MAX = 100


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
    """Registers a worker. The worker is approved immediately unless the fleet requires an
    operator's approval.

    If a worker of this fleet with the same id has not been seen since `unseen_since`, the new one
    replaces it and keeps its approval and draining state. The caller requeues the old one's jobs.
    `cap` applies to fleets without their own cap.
    """
    check_capabilities(registration.capabilities)
    subset = await _served_workflow_ids(tx, registration.workflow_slugs)
    # Locks the fleet before counting, so that two workers can't both take the last place.
    await store.lock_fleet(tx, fleet.id)
    registration = await _with_unique_id(tx, fleet, registration)
    inherited = await _replace_stale(tx, fleet, registration, unseen_since)
    limit = cap if fleet.max_workers is None else fleet.max_workers
    if await store.count_workers(tx, fleet.id) >= limit:
        raise FleetFull(
            f"fleet {fleet.name} already has {limit} workers, which is its limit",
            retry_after_seconds=RETRY_FULL_FLEET_SECONDS,
        )
    row = _row(fleet, registration, key_hash, now) | (inherited or {})
    if await store.add_worker(tx, row, subset) is None:
        raise _id_taken_error(registration)
    return await get_worker(tx, registration.worker_id)


async def _with_unique_id(
    tx: Tx, fleet: Fleet, registration: WorkerRegistration
) -> WorkerRegistration:
    """Prefixes the worker's id with the fleet's name if a worker of another fleet has the same id,
    or if the id starts with another fleet's name."""
    known = await find_worker(tx, registration.worker_id)
    is_of_another_fleet = known is not None and known.fleet_id != fleet.id
    if is_of_another_fleet or await _has_other_fleets_prefix(tx, fleet, registration.worker_id):
        return replace(registration, worker_id=prefixed_worker_id(fleet, registration.worker_id))
    return registration


async def _has_other_fleets_prefix(tx: Tx, fleet: Fleet, worker_id: str) -> bool:
    named = fleet_prefix_of(worker_id)
    if named is None or named == (fleet.slug, fleet.stage):
        return False
    return await store.get_fleet(tx, *named) is not None


async def _replace_stale(
    tx: Tx, fleet: Fleet, registration: WorkerRegistration, unseen_since: datetime | None
) -> dict[str, Any] | None:
    """Deletes the stale worker with this id. Returns the state that the new worker inherits, or
    None if there was no such worker."""
    known = await find_worker(tx, registration.worker_id)
    if known is None:
        return None
    if known.fleet_id != fleet.id:
        raise _id_taken_error(registration)
    if known.revoked_at is not None:
        raise _revoked_error(known)
    if unseen_since is None or not await store.delete_worker(
        tx, known.id, unseen_since=unseen_since
    ):
        raise _id_taken_error(registration)
    # With manual approval, the new worker must be approved as well. Otherwise, anyone with the
    # secret could replace a stale worker that was approved.
    is_approved = known.is_approved and fleet.approval == AUTO
    return {"is_approved": is_approved, "is_draining": known.is_draining}


async def authenticate_worker(tx: Tx, key: str) -> FleetWorker:
    """Returns the worker with this key. If this is the worker's next key, the caller must then call
    `take_next_key`."""
    return _require_valid(await store.worker_by_key_hash(tx, hash_key(key)))


async def authenticate_with_standing(tx: Tx, key: str) -> tuple[FleetWorker, WorkerStanding]:
    """Returns the worker with this key and its standing, in a single statement."""
    worker, standing = await store.worker_and_standing_by_key_hash(tx, hash_key(key))
    return _require_valid(worker), standing


def _require_valid(worker: FleetWorker | None) -> FleetWorker:
    if worker is None:
        raise Unauthenticated("this key doesn't belong to a worker")
    if worker.revoked_at is not None:
        raise _revoked_error(worker)
    return worker


async def take_next_key(tx: Tx, worker: FleetWorker, key_hash: str) -> FleetWorker:
    """Makes the next key the worker's key. The previous one becomes invalid."""
    if not await store.take_next_key(tx, worker.id, key_hash):
        raise Unauthenticated("this key doesn't belong to a worker")
    return replace(worker, key_hash=key_hash, next_key=None, next_key_hash=None)


async def reauthenticate(tx: Tx, worker_id: str, key_hash: str) -> FleetWorker:
    """Reads the worker again. Raises Unauthenticated if its key was replaced or removed in the
    meantime, and WorkerRevoked if it was revoked."""
    worker = await store.worker_by_key_hash(tx, key_hash)
    if worker is None or worker.key_hash != key_hash:
        raise Unauthenticated(f"the key of worker {worker_id} was replaced or removed")
    if worker.revoked_at is not None:
        raise _revoked_error(worker)
    return worker


def _revoked_error(worker: FleetWorker) -> WorkerRevoked:
    return WorkerRevoked(
        f"worker {worker.worker_id} was revoked",
        hint="An operator can approve it again with: comfyfleet admin workers approve",
    )


async def find_worker(tx: Tx, worker_id: str) -> FleetWorker | None:
    return await store.worker_by_id(tx, worker_id) if is_storable(worker_id) else None


async def get_worker(tx: Tx, worker_id: str) -> FleetWorker:
    worker = await find_worker(tx, worker_id)
    if worker is None:
        raise NotFound(f"worker {worker_id} was not found")
    return worker


async def workers_of(
    tx: Tx,
    fleet: Fleet | None = None,
    *,
    seen_since: datetime | None = None,
    after_worker_id: str | None = None,
    limit: int | None = None,
) -> list[FleetWorker]:
    """Returns the workers of a fleet, or of all fleets, ordered by id."""
    return await store.all_workers(
        tx,
        fleet_ids=None if fleet is None else [fleet.id],
        seen_since=seen_since,
        after_worker_id=after_worker_id,
        limit=limit,
    )


async def one_of_each_kind(tx: Tx, fleet: Fleet, *, seen_since: datetime) -> list[FleetWorker]:
    """Returns one worker for each combination of backend facts and capabilities in the fleet."""
    return await store.one_of_each_kind(tx, fleet.id, seen_since=seen_since)


async def count_workers(tx: Tx, fleet: Fleet) -> int:
    return await store.count_workers(tx, fleet.id)


async def workers_for(
    tx: Tx, workflow_id: int, *, stage: str, online_since: datetime | None = None
) -> list[FleetWorker]:
    """Returns the workers, in any state, that may serve a workflow assigned to their fleet. If
    `online_since` is set, returns a few workers that accept jobs and were seen since then."""
    ids = [fleet.id for fleet in await store.fleets_with(tx, workflow_id, stage)]
    if online_since is None:
        rows = await store.workers_in_pages(tx, ids)
    else:
        rows = await store.all_workers(
            tx, fleet_ids=ids, seen_since=online_since, only_taking_jobs=True, limit=WORKERS_PAGE
        )
    return [row for row in rows if row.workflow_ids is None or workflow_id in row.workflow_ids]


async def facts_of(tx: Tx, workers: Iterable[FleetWorker]) -> dict[str, BackendFacts]:
    """Returns backend facts by worker id. Workers without facts are left out."""
    return await store.backend_facts_of(tx, [worker.id for worker in workers])


async def reported_object_infos(tx: Tx) -> dict[int, str]:
    """Returns, for each fleet, the hash of the object_info that its workers report."""
    return await store.object_info_hashes(tx)


async def backend_kinds(tx: Tx) -> list[BackendKind]:
    """Returns the kinds of backends of each fleet, including those of offline workers."""
    return await store.backend_kinds(tx)


async def record_sighting(
    tx: Tx,
    worker: FleetWorker,
    sighting: Sighting,
    *,
    now: datetime,
    every: timedelta = model.SEEN_WRITE_EVERY,
) -> FleetWorker:
    """Returns the updated worker. Only writes it if that is due or an important value has changed.

    Uses one statement, or two if backend facts are reported.
    """
    updated = apply_sighting(worker, sighting, now)
    if not model.is_worth_writing(worker, sighting, now, every):
        return updated
    if sighting.capabilities is not None:
        check_capabilities(sighting.capabilities)
    reading = None
    if sighting.reading is not None:
        values = sighting.reading.model_dump(mode="json", exclude_none=True)
        reading = store.add_reading_call(
            worker.worker_id, values, now=now, none_since=now - model.READING_EVERY
        )
    if not await store.note_sighting(tx, worker.id, _sighting_row(updated), reading):
        raise Unauthenticated(f"worker {worker.worker_id} was removed")
    if sighting.backend is not None:
        await asyncio.sleep(0)  # lets other tasks run, because hashing many names takes long
        facts = _facts_row(sighting.backend, updated.facts_hash)
        await store.update_worker(tx, worker.id, facts)
    return updated


async def with_keys(tx: Tx, key_hashes: Collection[str]) -> list[FleetWorker]:
    """Returns the workers with these keys. Revoked workers are left out."""
    return await store.workers_with_keys(tx, key_hashes)


async def note_seen(tx: Tx, workers: Iterable[FleetWorker], *, now: datetime) -> None:
    """Marks waiting workers as seen."""
    await store.update_seen(tx, [worker.id for worker in workers], now)


async def get_standing(tx: Tx, worker: FleetWorker) -> WorkerStanding:
    return await store.standing_of_worker(tx, worker.fleet_id, worker.worker_id)


async def lanes_of(
    tx: Tx,
    worker: FleetWorker,
    providers: Iterable[str],
    *,
    assigned: Sequence[AssignedWorkflow] | None = None,
    abilities: EligibilityCache | None = None,
    offer: BackendOffer | None = None,
) -> frozenset[FleetLane]:
    """Returns the lanes that a worker may run and whose requirements its backend meets. There are
    none if the worker is draining or revoked.

    `assigned` contains the fleet's workflows, if the caller has already read them.
    """
    if assigned is None:
        assigned = (await get_standing(tx, worker)).assigned
    if abilities is not None:
        assigned = await abilities.able(tx, offer, assigned)
    return model.lanes(worker, assigned, providers)


async def lanes_of_all(
    tx: Tx, workers: Collection[FleetWorker], *, abilities: EligibilityCache, now: datetime
) -> dict[str, frozenset[FleetLane]]:
    """Returns the lanes of workers by key hash, computed once for workers with equal properties."""
    assigned = await store.assigned(tx, {worker.fleet_id for worker in workers})
    offers = await abilities.offers(tx, workers, now=now)
    lanes_by_kind: dict[Hashable, frozenset[FleetLane]] = {}
    lanes_by_key: dict[str, frozenset[FleetLane]] = {}
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
        if kind not in lanes_by_kind:
            able = await abilities.able(tx, offer, assigned.get(worker.fleet_id, []))
            lanes_by_kind[kind] = model.lanes(worker, able, worker.providers)
        lanes_by_key[worker.key_hash] = lanes_by_kind[kind]
    return lanes_by_key


async def workflows_of(tx: Tx, worker: FleetWorker) -> list[str]:
    """Returns the slugs of the workflows assigned to a worker, sorted."""
    assigned = await store.assigned(tx, [worker.fleet_id])
    return [
        workflow.slug
        for workflow in assigned.get(worker.fleet_id, ())
        if worker.workflow_ids is None or workflow.workflow_id in worker.workflow_ids
    ]


async def find_two_workers(
    tx: Tx,
    lanes: Collection[tuple[int, str, str]],
    *,
    seen_since: datetime,
    abilities: EligibilityCache | None = None,
) -> frozenset[str]:
    """Finds up to two live workers that can run any of these lanes, which belong to one stage.

    Two are enough to know that another worker can run a job. The first page usually has them.
    """
    if not lanes:
        return frozenset()
    stage = next(iter(lanes))[1]
    fleets = await store.fleet_ids_with_any(tx, {lane[0] for lane in lanes}, stage)
    assigned = await store.assigned(tx, fleets)
    worker_ids: frozenset[str] = frozenset()
    after_id: str | None = None
    for _ in range(WORKERS_PAGES_MAX):
        page = await store.all_workers(
            tx,
            fleet_ids=fleets,
            seen_since=seen_since,
            only_taking_jobs=True,
            after_worker_id=after_id,
            limit=WORKERS_PAGE,
        )
        able = await _able_workers_by_lane(tx, page, assigned, abilities, now=seen_since)
        worker_ids = worker_ids.union(*(able.get(FleetLane(*lane), frozenset()) for lane in lanes))
        if len(worker_ids) > 1 or len(page) < WORKERS_PAGE:
            break
        after_id = page[-1].worker_id
    return worker_ids


async def _able_workers_by_lane(
    tx: Tx,
    workers: Collection[FleetWorker],
    assigned: Mapping[int, list[AssignedWorkflow]],
    abilities: EligibilityCache | None,
    *,
    now: datetime,
) -> dict[FleetLane, frozenset[str]]:
    """Returns the ids of the workers that can run each lane."""
    if abilities is None:
        return model.workers_by_lane(workers, assigned)
    offers = await abilities.offers(tx, workers, now=now)
    ids_by_lane: dict[FleetLane, frozenset[str]] = {}
    for worker in workers:
        mine = assigned.get(worker.fleet_id, [])
        able = await abilities.able(tx, offers.get(worker.worker_id), mine)
        for lane in model.lanes(worker, able, worker.providers):
            ids_by_lane[lane] = ids_by_lane.get(lane, frozenset()) | {worker.worker_id}
    return ids_by_lane


async def record_refusal(
    tx: Tx, worker: FleetWorker, missing: MissingRequirements, *, now: datetime
) -> None:
    """Records that a backend lacks these node types and models despite its lists. The refusal
    counts until it expires or the backend reports its facts again."""
    await store.update_worker(
        tx, worker.id, {"refusals": with_refusal(worker.refusals, missing, now)}
    )


async def stale_workers(tx: Tx, *, unseen_since: datetime) -> list[FleetWorker]:
    return await store.all_workers(tx, unseen_since=unseen_since)


async def approve_worker(tx: Tx, worker: FleetWorker) -> FleetWorker:
    """Approves a worker, even if it was revoked. The worker keeps its key, which must be rotated if
    others may know it."""
    return await _update_worker(tx, worker, is_approved=True, revoked_at=None)


async def revoke_worker(tx: Tx, worker: FleetWorker, *, now: datetime) -> FleetWorker:
    """Revokes a worker. Its key is refused from now on, and its id can't be registered.

    The caller requeues the worker's jobs.
    """
    return await _update_worker(tx, worker, is_approved=False, revoked_at=worker.revoked_at or now)


async def drain_worker(tx: Tx, worker: FleetWorker, *, is_draining: bool = True) -> FleetWorker:
    """Drains a worker: its running jobs finish, and it gets no new ones."""
    return await _update_worker(tx, worker, is_draining=is_draining)


async def rotate_key(tx: Tx, worker: FleetWorker, *, key: str, at_once: bool = False) -> None:
    """Sets a new key. The worker receives it with its next response, and the old key remains valid
    until the worker uses the new one.

    `at_once` invalidates the old key immediately, in case others know it.
    """
    values = {"next_key": None, "next_key_hash": None, "key_hash": hash_key(key)}
    if not at_once:
        values = {"next_key": key, "next_key_hash": hash_key(key)}
    await store.update_worker(tx, worker.id, values)


async def remove_worker(tx: Tx, worker: FleetWorker) -> bool:
    """Removes a worker, which frees its id and its place in the fleet. Returns False if it was
    already removed."""
    return await store.delete_worker(tx, worker.id)


async def remove_stale_worker(tx: Tx, worker: FleetWorker, *, unseen_since: datetime) -> bool:
    """Removes a worker, unless it was seen again after the sweep read it."""
    return await store.delete_worker(tx, worker.id, unseen_since=unseen_since)


async def readings(tx: Tx, worker_id: str, *, since: datetime, limit: int) -> list[StoredReading]:
    """Returns a worker's readings, the newest first."""
    return await store.newest_readings(tx, worker_id, since=since, limit=limit)


async def backends_of(tx: Tx, worker_ids: Collection[str]) -> dict[str, BackendSummary]:
    """Returns the backends of these workers. Workers that reported none are left out."""
    return await store.backends_of(tx, worker_ids) if worker_ids else {}


async def latest_readings(tx: Tx, worker_ids: Collection[str]) -> dict[str, StoredReading]:
    """Returns the latest readings of these workers. Workers without readings are left out."""
    return await store.latest_readings(tx, worker_ids) if worker_ids else {}


async def prune_readings(tx: Tx, *, before: datetime, limit: int) -> int:
    """Deletes up to `limit` old readings and returns their number."""
    return await store.delete_readings_before(tx, before, limit=limit)


UNKNOWN_SHOWN_MAX = 20


async def _served_workflow_ids(tx: Tx, slugs: tuple[str, ...] | None) -> list[int]:
    if slugs is None:
        return []
    known = await store.workflow_ids(tx, [slug for slug in slugs if is_storable(slug)])
    unknown = sorted(set(slugs) - known.keys())
    if unknown or not slugs:
        near = await store.workflow_slugs(tx) if unknown else []
        suggestion = hint(unknown[0][:100], near, "available") if unknown else ""
        shown = unknown[:UNKNOWN_SHOWN_MAX]
        more = f" and {len(unknown) - len(shown):,} more" if len(unknown) > len(shown) else ""
        named = f"unknown workflow {', '.join(shown)}{more}{suggestion}"
        message = named if unknown else "workflow_slugs must contain at least one workflow"
        raise InvalidInput(message, field="workflow_slugs", unknown=shown)
    return list(known.values())


def _id_taken_error(registration: WorkerRegistration) -> Conflict:
    return Conflict(f"worker {registration.worker_id} already exists", field="worker_id")


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
        **_facts_row(registration.backend),
        "models_loaded": [],
        "last_seen_at": now,
        "created_at": now,
    }


def _sighting_row(known: FleetWorker) -> Mapping[str, Any]:
    return {
        "last_seen_at": known.last_seen_at,
        "current_load": known.current_load,
        "models_loaded": list(known.models_loaded),
        "capabilities": sorted(known.capabilities),
        "providers": list(known.providers),
        "max_concurrency": known.max_concurrency,
        "backend_problem": known.backend_problem,
    }


def _facts_row(facts: BackendFacts | None, known_hash: str | None = None) -> dict[str, Any]:
    """Returns the columns for backend facts. Clears refusals, because the backend may have the
    refused parts now. `known_hash` is the hash of the facts, if already computed."""
    if facts is None:
        return {"facts": None, "facts_hash": None, "object_info_hash": None, "refusals": None}
    return {
        "facts": facts.model_dump(mode="json"),
        "facts_hash": known_hash or facts_hash(facts),
        "object_info_hash": facts.object_info_hash if facts.object_info_size else None,
        "refusals": None,
    }


async def _update_worker(tx: Tx, worker: FleetWorker, **values: Any) -> FleetWorker:
    if not await store.update_worker(tx, worker.id, values):
        raise NotFound(f"worker {worker.worker_id} was not found")
    return replace(worker, **values)


async def create_fleet(
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
        raise Conflict(f"fleet {slug}/{stage} already exists", field="slug")
    return fleet


async def get_fleet(tx: Tx, slug: str, stage: str) -> Fleet:
    name = f"{slug}/{stage}"
    return _require_fleet(
        await store.get_fleet(tx, slug, stage) if is_storable(name) else None, name
    )


async def fleet_by_id(tx: Tx, fleet_id: int) -> Fleet:
    return _require_fleet(await store.fleet_by_id(tx, fleet_id), str(fleet_id))


async def list_fleets(tx: Tx) -> list[Fleet]:
    return await store.all_fleets(tx)


def check_secret(fleet: Fleet, secret: str) -> None:
    if not is_key_of_hash(secret, fleet.secret_hash):
        raise Unauthenticated(f"this is not the secret of fleet {fleet.name}")


async def check_known_secret(tx: Tx, secret: str) -> None:
    """Checks that a fleet has this secret, before the body that names the fleet is read."""
    if not await store.has_fleet_secret(tx, hash_key(secret)):
        raise Unauthenticated(
            "no fleet has this secret" if secret else "the fleet's secret is required",
            hint="Send X-Fleet-Secret: SECRET. The secret was shown when the fleet was created.",
        )


async def fleet_by_secret(tx: Tx, secret: str) -> Fleet:
    """Finds the fleet with this secret. Secrets are long and random, so they are unique."""
    fleet = await store.fleet_by_secret(tx, hash_key(secret))
    if fleet is None:
        raise Unauthenticated("no fleet has this secret")
    return fleet


async def rotate_secret(tx: Tx, fleet: Fleet, *, secret_hash: str) -> Fleet:
    """Sets a new secret for registration. Registered workers keep their keys."""
    return _require_fleet(
        await store.update_fleet(tx, fleet.id, {"secret_hash": secret_hash}), fleet.name
    )


async def set_cap(tx: Tx, fleet: Fleet, *, max_workers: int | None) -> Fleet:
    """Sets the maximum number of workers. A lower limit doesn't remove workers."""
    check_cap(max_workers)
    return _require_fleet(
        await store.update_fleet(tx, fleet.id, {"max_workers": max_workers}), fleet.name
    )


async def set_starts_within(tx: Tx, fleet: Fleet, *, seconds: int | None) -> Fleet:
    """Sets how long jobs may wait for machines that start on demand."""
    check_starts_within(seconds)
    return _require_fleet(
        await store.update_fleet(tx, fleet.id, {"starts_within_seconds": seconds}), fleet.name
    )


async def starts_within(tx: Tx) -> dict[str, int]:
    """Returns the longest startup time of on-demand machines in seconds, by workflow slug. Only
    includes workflows of fleets that have this setting."""
    seconds_by_fleet = {
        fleet.id: fleet.starts_within_seconds
        for fleet in await store.all_fleets(tx)
        if fleet.starts_within_seconds is not None
    }
    seconds_by_slug: dict[str, int] = {}
    if not seconds_by_fleet:
        return seconds_by_slug
    for fleet_id, workflows in (await store.assigned(tx)).items():
        if (seconds := seconds_by_fleet.get(fleet_id)) is not None:
            for workflow in workflows:
                seconds_by_slug[workflow.slug] = max(seconds, seconds_by_slug.get(workflow.slug, 0))
    return seconds_by_slug


async def set_approval(tx: Tx, fleet: Fleet, *, approval: str) -> Fleet:
    """Sets how new workers are approved. Registered workers are not affected."""
    check_approval(approval)
    return _require_fleet(
        await store.update_fleet(tx, fleet.id, {"approval": approval}), fleet.name
    )


async def set_prompts(tx: Tx, fleet: Fleet, terms: FleetPrompts) -> Fleet:
    values = {"gateway": terms.model_dump(mode="json")}
    return _require_fleet(await store.update_fleet(tx, fleet.id, values), fleet.name)


async def set_object_info(tx: Tx, fleet: Fleet, *, key: str, content_hash: str) -> Fleet:
    values = {"object_info_key": key, "object_info_hash": content_hash}
    return _require_fleet(await store.update_fleet(tx, fleet.id, values), fleet.name)


async def set_open_workflow(tx: Tx, fleet: Fleet, *, workflow_id: int | None) -> Fleet:
    return _require_fleet(
        await store.update_fleet(tx, fleet.id, {"open_workflow_id": workflow_id}), fleet.name
    )


async def assign(
    tx: Tx, fleet: Fleet, workflow_ids: Collection[int], *, now: datetime
) -> FleetAssignment:
    """Sets the workflows of a fleet and returns the change.

    The fleet's open workflow is always assigned.
    """
    new_ids = set(workflow_ids)
    if fleet.open_workflow_id is not None:
        new_ids.add(fleet.open_workflow_id)
    unknown = new_ids - await store.known_workflow_ids(tx, new_ids)
    if unknown:
        raise InvalidInput(
            f"unknown workflow id {', '.join(map(str, sorted(unknown)))}", field="workflow_ids"
        )
    await store.lock_fleet(tx, fleet.id)
    before = {workflow.workflow_id for workflow in await assigned_to(tx, fleet)}
    await store.unassign(tx, fleet.id, before - new_ids)
    await store.assign(tx, fleet.id, new_ids - before, now)
    return FleetAssignment(
        frozenset(new_ids), frozenset(new_ids - before), frozenset(before - new_ids)
    )


async def assigned_to(tx: Tx, fleet: Fleet) -> Sequence[AssignedWorkflow]:
    return (await store.assigned(tx, [fleet.id])).get(fleet.id, [])


async def assignments(tx: Tx) -> dict[int, list[AssignedWorkflow]]:
    """Returns the workflows of each fleet by fleet id."""
    return await store.assigned(tx)


async def fleets_with(tx: Tx, workflow_id: int, *, stage: str | None = None) -> list[Fleet]:
    """Returns the fleets that a workflow is assigned to."""
    return await store.fleets_with(tx, workflow_id, stage)


async def workflow_ids(tx: Tx, slugs: Collection[str]) -> dict[str, int]:
    """Returns workflow ids by slug. Raises InvalidInput for unknown slugs."""
    known = await store.workflow_ids(tx, [slug for slug in slugs if is_storable(slug)])
    unknown = sorted(set(slugs) - known.keys())
    if unknown:
        near = await store.workflow_slugs(tx)
        raise InvalidInput(
            f"unknown workflow {', '.join(unknown)}{hint(unknown[0], near, 'available')}",
            field="workflow_slugs",
            unknown=unknown,
        )
    return known


def _require_fleet(fleet: Fleet | None, name: str) -> Fleet:
    if fleet is None:
        raise NotFound(f"fleet {name} was not found")
    return fleet


__all__ = [
    "approve_worker",
    "assign",
    "assigned_to",
    "assignments",
    "authenticate_with_standing",
    "authenticate_worker",
    "backend_kinds",
    "check_known_secret",
    "check_secret",
    "count_workers",
    "create_fleet",
    "drain_worker",
    "facts_of",
    "find_two_workers",
    "find_worker",
    "fleet_by_id",
    "fleets_with",
    "get_fleet",
    "get_standing",
    "get_worker",
    "lanes_of",
    "lanes_of_all",
    "list_fleets",
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
    "set_prompts",
    "stale_workers",
    "take_next_key",
    "with_keys",
    "workers_for",
    "workers_of",
    "workflow_ids",
    "workflows_of",
]

"""Fleets: made by operators, and the workflows that are assigned to them."""

from collections.abc import Collection, Sequence
from datetime import datetime

from comfyfleet.db import Tx
from comfyfleet.fleets.model import (
    AUTO,
    Assigned,
    Assignment,
    Fleet,
    check_approval,
    check_cap,
    check_fleet_name,
)
from comfyfleet.fleets.store import fleets as store
from comfyfleet.fleets.workers import (
    approve,
    authenticate,
    authenticate_with_standing,
    count_workers,
    drain,
    facts_of,
    find_worker,
    get_worker,
    lanes_of,
    lanes_of_all,
    live_by_lane,
    note_refusal,
    note_seen,
    one_of_each_kind,
    readings,
    register,
    remove,
    remove_stale,
    reported_object_infos,
    revoke,
    rotate_key,
    seen,
    stale,
    standing_of,
    still_known,
    take_next_key,
    thin_readings,
    two_for,
    with_keys,
    workers_for,
    workers_of,
    workflows_of,
)
from comfyfleet.kernel.errors import Conflict, InvalidInput, NotFound, Unauthenticated
from comfyfleet.kernel.keys import fits, hashed
from comfyfleet.kernel.texts import is_storable
from comfyfleet.workflow.setting.wording import hint

__all__ = [
    "all_of",
    "approve",
    "assign",
    "assigned_to",
    "assignments",
    "authenticate",
    "authenticate_with_standing",
    "by_id",
    "check_known_secret",
    "check_secret",
    "count_workers",
    "create",
    "drain",
    "facts_of",
    "find_worker",
    "fleets_with",
    "get",
    "get_worker",
    "lanes_of",
    "lanes_of_all",
    "live_by_lane",
    "note_refusal",
    "note_seen",
    "one_of_each_kind",
    "readings",
    "register",
    "remove",
    "remove_stale",
    "reported_object_infos",
    "revoke",
    "rotate_key",
    "rotate_secret",
    "seen",
    "set_approval",
    "set_cap",
    "set_object_info",
    "set_open_workflow",
    "stale",
    "standing_of",
    "still_known",
    "take_next_key",
    "thin_readings",
    "two_for",
    "with_keys",
    "workers_for",
    "workers_of",
    "workflow_ids",
    "workflows_of",
]


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
    fleet = await store.add(tx, row)
    if fleet is None:
        raise Conflict(f"there is a fleet {slug}/{stage} already", field="slug")
    return fleet


async def get(tx: Tx, slug: str, stage: str) -> Fleet:
    name = f"{slug}/{stage}"
    return _found(await store.get(tx, slug, stage) if is_storable(name) else None, name)


async def by_id(tx: Tx, fleet_id: int) -> Fleet:
    return _found(await store.by_id(tx, fleet_id), str(fleet_id))


async def all_of(tx: Tx) -> list[Fleet]:
    return await store.all_of(tx)


def check_secret(fleet: Fleet, secret: str) -> None:
    if not fits(secret, fleet.secret_hash):
        raise Unauthenticated(f"that is not the secret of the fleet {fleet.name}")


async def check_known_secret(tx: Tx, secret: str) -> None:
    """Whether any fleet has it: which one must have it is said in the body."""
    if not await store.has_secret(tx, hashed(secret)):
        raise Unauthenticated(
            "that is the secret of no fleet here" if secret else "the fleet's secret is needed",
            hint="Send X-Fleet-Secret: SECRET; it was shown when the fleet was made.",
        )


async def by_secret(tx: Tx, secret: str) -> Fleet:
    """Secrets are made by us and long: no two fleets have the same one."""
    found = await store.by_secret(tx, hashed(secret))
    if found is None:
        raise Unauthenticated("that is the secret of no fleet here")
    return found


async def rotate_secret(tx: Tx, fleet: Fleet, *, secret_hash: str) -> Fleet:
    """Only new workers need it: those that have joined go on with keys of their own."""
    return _found(await store.change(tx, fleet.id, {"secret_hash": secret_hash}), fleet.name)


async def set_cap(tx: Tx, fleet: Fleet, *, max_workers: int | None) -> Fleet:
    """A lower cap sends nobody away; it lets nobody else in."""
    check_cap(max_workers)
    return _found(await store.change(tx, fleet.id, {"max_workers": max_workers}), fleet.name)


async def set_approval(tx: Tx, fleet: Fleet, *, approval: str) -> Fleet:
    """For those who join from now on."""
    check_approval(approval)
    return _found(await store.change(tx, fleet.id, {"approval": approval}), fleet.name)


async def set_object_info(tx: Tx, fleet: Fleet, *, key: str, content_hash: str) -> Fleet:
    values = {"object_info_key": key, "object_info_hash": content_hash}
    return _found(await store.change(tx, fleet.id, values), fleet.name)


async def set_open_workflow(tx: Tx, fleet: Fleet, *, workflow_id: int | None) -> Fleet:
    return _found(await store.change(tx, fleet.id, {"open_workflow_id": workflow_id}), fleet.name)


async def assign(
    tx: Tx, fleet: Fleet, workflow_ids: Collection[int], *, now: datetime
) -> Assignment:
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
    await store.lock(tx, fleet.id)
    before = {each.workflow_id for each in await assigned_to(tx, fleet)}
    await store.unassign(tx, fleet.id, before - wanted)
    await store.assign(tx, fleet.id, wanted - before, now)
    return Assignment(frozenset(wanted), frozenset(wanted - before), frozenset(before - wanted))


async def assigned_to(tx: Tx, fleet: Fleet) -> Sequence[Assigned]:
    return (await store.assigned(tx, [fleet.id])).get(fleet.id, [])


async def assignments(tx: Tx) -> dict[int, list[Assigned]]:
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

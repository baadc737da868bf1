"""Workers: joining, being seen, being held back, leaving; on every database."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update
from tests.support.jobs.dispatches import new
from tests.support.jobs.fleets import NOW, a_fleet, a_worker, a_workflow, key_of

from comfyfleet.api.worker import BackendFacts, Reading
from comfyfleet.errors import (
    Conflict,
    FleetFull,
    InvalidInput,
    NotFound,
    Unauthenticated,
    WorkerRevoked,
)
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.central_tables import dispatches
from comfyfleet.server.db.coordination import MAINTENANCE, write_state
from comfyfleet.server.fleets import model, store
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet, FleetWorker, Sighting, WorkerRegistration
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.secrets import hash_key

BOTH = ("self_hosted", "cloud")
FACTS = BackendFacts(
    kind="ComfyUI",
    gpu="A GPU",
    node_types=("KSampler",),
    model_files={"CheckpointLoaderSimple.ckpt_name": ("sdxl.safetensors",)},
)


def later(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


async def test_a_worker_that_joins_is_approved_at_once(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        worker = await a_worker(tx, fleet, "gpu-7", capabilities=["video"], backend=FACTS)
        assert await fleets.get_worker(tx, "gpu-7") == worker
        facts = await fleets.facts_of(tx, [worker])
    assert worker.is_approved
    assert worker.registration_source == "fleet"
    assert worker.capabilities == {"video"}
    assert worker.affinities == {"worker:gpu-7", "fleet:gpus/production"}
    assert facts == {"gpu-7": FACTS}


async def test_an_id_that_is_taken_is_a_conflict(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        await a_worker(tx, fleet, "gpu-7")
        with pytest.raises(Conflict, match="gpu-7"):
            await fleets.register_worker(
                tx, fleet, WorkerRegistration("gpu-7"), hash_key("k"), cap=50, now=NOW
            )


async def test_a_fleet_that_is_full_lets_nobody_in(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx, max_workers=1)
        await a_worker(tx, fleet, "gpu-1")
        with pytest.raises(FleetFull, match="gpus/production"):
            await a_worker(tx, fleet, "gpu-2")
        with pytest.raises(Conflict):
            await a_worker(tx, fleet, "gpu-1")


async def test_the_cap_holds_when_many_join_at_once(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)

    async def join(number: int) -> bool:
        registration = WorkerRegistration(f"gpu-{number}")
        try:
            async with central.transaction() as tx:
                await fleets.register_worker(
                    tx, fleet, registration, hash_key(f"{number}"), cap=5, now=NOW
                )
        except FleetFull:
            return False
        return True

    joined = await asyncio.gather(*(join(number) for number in range(20)))
    assert sum(joined) == 5


async def test_one_id_is_given_once_in_each_fleet_to_many_that_ask(central: Database) -> None:
    async with central.transaction() as tx:
        one, two = await a_fleet(tx, "one"), await a_fleet(tx, "two")

    async def join(fleet: Fleet, number: int) -> bool:
        try:
            async with central.transaction() as tx:
                await fleets.register_worker(
                    tx, fleet, WorkerRegistration("gpu"), hash_key(f"{number}"), cap=50, now=NOW
                )
        except Conflict:
            return False
        return True

    joined = await asyncio.gather(*(join((one, two)[n % 2], n) for n in range(10)))
    assert sum(joined) == 2


async def test_a_workflow_that_does_not_exist_is_named(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        await a_workflow(tx, "upscale")
        with pytest.raises(InvalidInput, match="nowhere") as refused:
            await a_worker(tx, fleet, workflow_slugs=("upscale", "nowhere"))
        assert refused.value.details["field"] == "workflow_slugs"
        assert await fleets.find_worker(tx, "gpu-1") is None
        with pytest.raises(InvalidInput):
            await a_worker(tx, fleet, workflow_slugs=())


async def test_a_key_opens_the_door_until_it_is_rotated(central: Database) -> None:
    async with central.transaction() as tx:
        worker = await a_worker(tx, await a_fleet(tx), "gpu-7")
        assert await fleets.authenticate_worker(tx, key_of("gpu-7")) == worker
        await fleets.rotate_key(tx, worker, key="new", at_once=True)
        with pytest.raises(Unauthenticated):
            await fleets.authenticate_worker(tx, key_of("gpu-7"))
        assert await fleets.authenticate_worker(tx, "new") == worker


async def test_a_revoked_key_is_dead_until_the_worker_is_approved_again(central: Database) -> None:
    async with central.transaction() as tx:
        worker = await a_worker(tx, await a_fleet(tx), "gpu-7")
        worker = await fleets.revoke_worker(tx, worker, now=NOW)
        with pytest.raises(Unauthenticated, match="revoked"):
            await fleets.authenticate_worker(tx, key_of("gpu-7"))
        await fleets.approve_worker(tx, worker)
        assert (await fleets.authenticate_worker(tx, key_of("gpu-7"))).is_approved


async def test_a_worker_has_both_keys_until_it_uses_the_new_one(central: Database) -> None:
    async with central.transaction() as tx:
        worker = await a_worker(tx, await a_fleet(tx), "gpu-7")
        await fleets.rotate_key(tx, worker, key="new")
        assert (await fleets.authenticate_worker(tx, key_of("gpu-7"))).next_key == "new"
        known = await fleets.authenticate_worker(tx, "new")
        taken = await fleets.take_next_key(tx, known, hash_key("new"))
        assert (taken.next_key, taken.key_hash) == (None, hash_key("new"))
        assert (await fleets.authenticate_worker(tx, "new")).next_key is None
        with pytest.raises(Unauthenticated):
            await fleets.authenticate_worker(tx, key_of("gpu-7"))
        with pytest.raises(Unauthenticated, match="replaced"):
            await fleets.reauthenticate(tx, worker.worker_id, worker.key_hash)


async def test_a_revoked_worker_bars_its_id_for_good_and_not_its_place(central: Database) -> None:
    soon = NOW + timedelta(days=30)
    async with central.transaction() as tx:
        fleet = await a_fleet(tx, max_workers=1)
        worker = await fleets.revoke_worker(tx, await a_worker(tx, fleet, "gpu-7"), now=NOW)
        assert await fleets.stale_workers(tx, unseen_since=soon) == []
        assert not await fleets.remove_stale_worker(tx, worker, unseen_since=soon)
        with pytest.raises(WorkerRevoked):
            await joined(tx, fleet, "gpu-7", unseen_since=soon)
        await joined(tx, fleet, "gpu-8", unseen_since=soon)


async def test_the_id_of_a_worker_that_is_lost_is_taken_over_with_the_orders_to_it(
    central: Database,
) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx, max_workers=1)
        worker = await fleets.drain_worker(tx, await a_worker(tx, fleet, "gpu-7"))
        with pytest.raises(Conflict):
            await joined(tx, fleet, "gpu-7", unseen_since=worker.last_seen_at)
        taken = await joined(tx, fleet, "gpu-7", unseen_since=NOW + timedelta(seconds=90))
        assert taken.is_draining
        with pytest.raises(Unauthenticated):
            await fleets.authenticate_worker(tx, key_of("gpu-7"))
        assert (await fleets.authenticate_worker(tx, "another key")).id == taken.id


async def test_an_id_of_another_fleet_keeps_nobody_out(central: Database) -> None:
    async with central.transaction() as tx:
        rogue = await a_worker(tx, await a_fleet(tx, "rogue"), "gpu-7")
        mine = await joined(tx, await a_fleet(tx, "gpus"), "gpu-7", unseen_since=NOW)
        assert (rogue.worker_id, mine.worker_id) == ("gpu-7", "gpus.production:gpu-7")
        assert mine.fleet_slug == "gpus"
        assert mine.affinities == {"worker:gpus.production:gpu-7", "fleet:gpus/production"}


async def test_a_fleet_may_want_workers_to_be_approved_by_hand(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await fleets.set_approval(tx, await a_fleet(tx), approval="manual")
        await fleets.assign(tx, fleet, {await a_workflow(tx)}, now=NOW)
        worker = await a_worker(tx, fleet)
        assert (worker.is_approved, worker.revoked_at) == (False, None)
        assert await fleets.lanes_of(tx, worker, BOTH) == frozenset()
        assigned = (await fleets.get_standing(tx, worker)).assigned
        assert "approval" in model.why_no_lanes(worker, assigned)
        approved = await fleets.approve_worker(tx, worker)
        assert await fleets.lanes_of(tx, approved, BOTH)
        with pytest.raises(InvalidInput):
            await fleets.set_approval(tx, fleet, approval="perhaps")


async def joined(tx: Tx, fleet: Fleet, worker_id: str, *, unseen_since: datetime) -> FleetWorker:
    return await fleets.register_worker(
        tx,
        fleet,
        WorkerRegistration(worker_id),
        hash_key("another key"),
        cap=50,
        now=NOW,
        unseen_since=unseen_since,
    )


async def test_a_removed_worker_frees_its_id_and_its_place(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx, max_workers=1)
        await a_workflow(tx)
        worker = await a_worker(tx, fleet, workflow_slugs=("upscale",))
        assert await fleets.remove_worker(tx, worker)
        assert not await fleets.remove_worker(tx, worker)
        await a_worker(tx, fleet)
        with pytest.raises(NotFound):
            await fleets.get_worker(tx, "gpu-2")
        with pytest.raises(NotFound):
            await fleets.drain_worker(tx, worker)


async def test_lanes_are_what_is_assigned_and_runnable_with_its_capabilities(
    central: Database,
) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        plain = await a_workflow(tx, "plain")
        video = await a_workflow(tx, "video", required_capabilities=["video", "big"])
        paused = await a_workflow(tx, "paused", is_paused=True)
        inactive = await a_workflow(tx, "inactive", is_active=False)
        await a_workflow(tx, "not-assigned")
        await fleets.assign(tx, fleet, {plain, video, paused, inactive}, now=NOW)
        simple = await a_worker(tx, fleet, "simple", capabilities=["video"])
        able = await a_worker(tx, fleet, "able", capabilities=["video", "big", "other"])
        assert await fleets.lanes_of(tx, simple, BOTH) == {
            (plain, "production", "self_hosted"),
            (plain, "production", "cloud"),
        }
        assert {lane.workflow_id for lane in await fleets.lanes_of(tx, able, BOTH)} == {
            plain,
            video,
        }
        assert await fleets.workflows_of(tx, simple) == ["inactive", "paused", "plain", "video"]


async def test_a_worker_may_serve_only_some_of_its_fleets_workflows(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        one, two = await a_workflow(tx, "one"), await a_workflow(tx, "two")
        await a_workflow(tx, "elsewhere")
        await fleets.assign(tx, fleet, {one, two}, now=NOW)
        worker = await a_worker(tx, fleet, workflow_slugs=("two", "elsewhere"))
        assert await fleets.lanes_of(tx, worker, ["cloud"]) == {(two, "production", "cloud")}
        assert await fleets.workflows_of(tx, worker) == ["two"]
        assert await fleets.workers_for(tx, one, stage="production") == []
        assert await fleets.workers_for(tx, two, stage="production") == [worker]
        assert await fleets.workers_for(tx, two, stage="staging") == []


async def test_a_worker_that_drains_or_was_revoked_has_no_lanes(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        await fleets.assign(tx, fleet, {await a_workflow(tx)}, now=NOW)
        worker = await a_worker(tx, fleet)
        drained = await fleets.drain_worker(tx, worker)
        assert await fleets.lanes_of(tx, drained, BOTH) == frozenset()
        back = await fleets.drain_worker(tx, drained, is_draining=False)
        assert len(await fleets.lanes_of(tx, back, BOTH)) == 2
        revoked = await fleets.revoke_worker(tx, back, now=NOW)
        assert await fleets.lanes_of(tx, revoked, BOTH) == frozenset()


async def is_alone(tx: Tx, worker: FleetWorker, lanes: Any, since: datetime) -> bool:
    return await fleets.find_two_workers(tx, lanes, seen_since=since) <= {worker.worker_id}


async def test_what_stands_for_and_against_a_worker_is_read_at_once(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        worker = await a_worker(tx, fleet)
        assert await fleets.get_standing(tx, worker) == ([], (), False)
        await fleets.assign(
            tx, fleet, {await a_workflow(tx, "b"), await a_workflow(tx, "a")}, now=NOW
        )
        await write_state(tx, MAINTENANCE, True)
        held = []
        for number in range(3):
            made = await dispatch.enqueue(tx, [new()], now=NOW)
            held.append(made[0].id)
            whose = worker.worker_id if number else "another"
            values = {"status": "leased", "worker_id": whose}
            await tx.execute(update(dispatches).where(dispatches.c.id == held[-1]).values(values))
        found = await fleets.get_standing(tx, worker)
    assert [each.slug for each in found.assigned] == ["a", "b"]
    assert found.held == tuple(held[1:])
    assert found.in_maintenance


async def test_a_key_is_read_together_with_what_stands_for_and_against_its_worker(
    central: Database,
) -> None:
    async with central.transaction() as tx:
        fleet, other = await a_fleet(tx), await a_fleet(tx, "other")
        plain = await a_workflow(tx, "plain")
        large = await a_workflow(tx, "large", required_capabilities=frozenset({"large"}))
        await fleets.assign(tx, fleet, {plain, large}, now=NOW)
        await fleets.assign(tx, other, {await a_workflow(tx, "others")}, now=NOW)
        await a_worker(tx, fleet, "all")
        await a_worker(tx, fleet, "two", workflow_slugs=("large", "plain"))
        (made,) = await dispatch.enqueue(tx, [new()], now=NOW)
        leased = {"status": "leased", "worker_id": "two"}
        await tx.execute(update(dispatches).where(dispatches.c.id == made.id).values(leased))
        for each in ("all", "two"):
            worker, standing = await fleets.authenticate_with_standing(tx, key_of(each))
            assert worker == await fleets.authenticate_worker(tx, key_of(each))
            assert standing == await fleets.get_standing(tx, worker)
            assert [each.slug for each in standing.assigned] == ["large", "plain"]
    assert worker.workflow_ids == frozenset({plain, large})
    assert standing.held == (made.id,)
    assert standing.assigned[0].required_capabilities == {"large"}
    assert standing.assigned[0].is_runnable is True


async def test_a_key_that_is_not_good_is_refused_with_and_without_a_standing(
    central: Database,
) -> None:
    async with central.transaction() as tx:
        worker = await a_worker(tx, await a_fleet(tx))
        with pytest.raises(Unauthenticated):
            await fleets.authenticate_with_standing(tx, "nobody's")
        await fleets.rotate_key(tx, worker, key="next")
        told, _ = await fleets.authenticate_with_standing(tx, "next")
        assert told == worker
        await fleets.revoke_worker(tx, worker, now=NOW)
        with pytest.raises(WorkerRevoked):
            await fleets.authenticate_with_standing(tx, key_of(worker.worker_id))


async def test_a_worker_is_alone_until_another_lives_in_one_of_its_lanes(
    central: Database,
) -> None:
    since = NOW - later(90)
    async with central.transaction() as tx:
        one, two = await a_fleet(tx, "one"), await a_fleet(tx, "two")
        shared, own = await a_workflow(tx, "shared"), await a_workflow(tx, "own")
        await fleets.assign(tx, one, {shared, own}, now=NOW)
        await fleets.assign(tx, two, {shared}, now=NOW)
        worker = await a_worker(tx, one, "gpu-1")
        lanes = await fleets.lanes_of(tx, worker, ["self_hosted"])
        assert await is_alone(tx, worker, lanes, since)
        await a_worker(tx, two, "offline", now=NOW - later(91))
        assert await is_alone(tx, worker, lanes, since)
        other = await a_worker(tx, two, "gpu-2")
        assert not await is_alone(tx, worker, lanes, since)
        live = await fleets.find_two_workers(tx, lanes, seen_since=since)
        assert live == {"gpu-1", "gpu-2"}
        await fleets.drain_worker(tx, other)
        assert await is_alone(tx, worker, lanes, since)


async def test_those_who_cannot_help_do_not_hide_the_one_who_can(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        video = await a_workflow(tx, "video", required_capabilities=["video"])
        await fleets.assign(tx, fleet, {video}, now=NOW)
        worker = await a_worker(tx, fleet, "a", capabilities=["video"])
        for number in range(25):
            await a_worker(tx, fleet, f"b-{number:02}")
        lanes = await fleets.lanes_of(tx, worker, ["self_hosted"])
        assert await is_alone(tx, worker, lanes, NOW)
        await a_worker(tx, fleet, "c", capabilities=["video"])
        assert not await is_alone(tx, worker, lanes, NOW)
        assert await is_alone(tx, worker, frozenset(), NOW)


async def test_a_sighting_is_written_every_ten_seconds_or_when_it_is_news(
    central: Database,
) -> None:
    async with central.transaction() as tx:
        worker = await a_worker(tx, await a_fleet(tx))
        soon = NOW + later(9)
        seen = await fleets.record_sighting(tx, worker, Sighting(load=1), now=soon)
        assert (seen.current_load, seen.last_seen_at) == (1, soon)
        assert await fleets.get_worker(tx, "gpu-1") == worker
        seen = await fleets.record_sighting(
            tx, worker, Sighting(capabilities=frozenset({"video"}), load=1), now=soon
        )
        assert await fleets.get_worker(tx, "gpu-1") == seen
        seen = await fleets.record_sighting(
            tx, seen, Sighting(models_loaded=("sdxl",), load=2), now=soon + later(10)
        )
        assert await fleets.get_worker(tx, "gpu-1") == seen
    assert seen.capabilities == {"video"}
    assert (seen.models_loaded, seen.current_load) == (("sdxl",), 2)


async def test_what_a_backend_has_is_kept_when_it_changes(central: Database) -> None:
    async with central.transaction() as tx:
        worker = await a_worker(tx, await a_fleet(tx))
        assert await fleets.facts_of(tx, [worker]) == {}
        await fleets.record_sighting(tx, worker, Sighting(backend=FACTS), now=NOW)
        assert await fleets.facts_of(tx, [worker]) == {"gpu-1": FACTS}


async def test_a_worker_that_was_removed_cannot_be_seen(central: Database) -> None:
    async with central.transaction() as tx:
        worker = await a_worker(tx, await a_fleet(tx))
        await fleets.remove_worker(tx, worker)
        with pytest.raises(Unauthenticated, match="removed"):
            await fleets.record_sighting(tx, worker, Sighting(), now=NOW + later(60))


async def test_readings_are_kept_every_thirty_seconds_and_not_for_ever(central: Database) -> None:
    async with central.transaction() as tx:
        worker = await a_worker(tx, await a_fleet(tx))
        for second in range(0, 100, 10):
            reading = Reading(cpu_percent=second)
            await fleets.record_sighting(
                tx, worker, Sighting(reading=reading), now=NOW + later(second)
            )
        kept = await fleets.readings(tx, "gpu-1", since=NOW, limit=10)
        assert [each.reading.cpu_percent for each in kept] == [70, 40, 10]
        removed = await fleets.prune_readings(tx, before=NOW + later(50), limit=10)
        left = await fleets.readings(tx, "gpu-1", since=NOW, limit=10)
    assert removed == 2
    assert [each.at for each in left] == [NOW + later(70)]


async def test_stale_workers_are_removed_unless_they_came_back(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        gone = await a_worker(tx, fleet, "gone")
        back = await a_worker(tx, fleet, "back")
        now = NOW + later(601)
        since = now - later(600)
        assert await fleets.stale_workers(tx, unseen_since=since) == [back, gone]
        await fleets.record_sighting(tx, back, Sighting(), now=now)
        assert not await fleets.remove_stale_worker(tx, back, unseen_since=since)
        assert await fleets.remove_stale_worker(tx, gone, unseen_since=since)
        assert await fleets.workers_of(tx, fleet) == [
            await fleets.get_worker(tx, "back"),
        ]


async def test_all_workers_of_a_workflow_are_read_in_pages(
    central: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "WORKERS_PER_PAGE", 3)
    async with central.transaction() as tx:
        fleet, other = await a_fleet(tx), await a_fleet(tx, "other")
        video = await a_workflow(tx, "video")
        await fleets.assign(tx, fleet, {video}, now=NOW)
        await a_worker(tx, other, "elsewhere")
        ids = [(await a_worker(tx, fleet, f"b-{number:02}")).worker_id for number in range(7)]
        workers = await fleets.workers_for(tx, video, stage="production")
        assert [worker.worker_id for worker in workers] == ids
        some = await fleets.workers_for(tx, video, stage="production", online_since=NOW - later(1))
        assert [worker.worker_id for worker in some] == ids
        none = await fleets.workers_for(tx, video, stage="production", online_since=NOW + later(1))
        assert none == []

"""Fleets and what is assigned to them, on every database."""

import pytest
from tests.support.jobs.fleets import NOW, SECRET, a_fleet, a_worker, a_workflow

from comfyfleet.errors import Conflict, InvalidInput, NotFound, Unauthenticated
from comfyfleet.server.db import Database
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.secrets import hash_key


async def test_a_fleet_is_found_by_slug_and_stage(central: Database) -> None:
    async with central.transaction() as tx:
        made = await a_fleet(tx, "gpus", "production")
        other = await a_fleet(tx, "gpus", "staging")
        assert await fleets.get_fleet(tx, "gpus", "production") == made
        assert await fleets.fleet_by_id(tx, other.id) == other
        assert await fleets.list_fleets(tx) == [made, other]
        with pytest.raises(NotFound, match="gpus/elsewhere"):
            await fleets.get_fleet(tx, "gpus", "elsewhere")


async def test_two_fleets_cannot_have_one_name(central: Database) -> None:
    async with central.transaction() as tx:
        await a_fleet(tx)
        with pytest.raises(Conflict):
            await a_fleet(tx)


@pytest.mark.parametrize(
    ("slug", "stage", "field"),
    [("", "production", "slug"), ("a/b", "production", "slug"), ("gpus", "St age", "stage")],
)
async def test_a_name_that_would_not_fit_a_url_is_refused(
    central: Database, slug: str, stage: str, field: str
) -> None:
    async with central.transaction() as tx:
        with pytest.raises(InvalidInput) as refused:
            await a_fleet(tx, slug, stage)
    assert refused.value.details["field"] == field


async def test_only_the_newest_secret_is_right(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        fleets.check_secret(fleet, SECRET)
        rotated = await fleets.rotate_secret(tx, fleet, secret_hash=hash_key("new"))
    fleets.check_secret(rotated, "new")
    with pytest.raises(Unauthenticated):
        fleets.check_secret(rotated, SECRET)


async def test_a_cap_can_be_set_and_taken_away(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        assert (await fleets.set_cap(tx, fleet, max_workers=3)).max_workers == 3
        assert (await fleets.set_cap(tx, fleet, max_workers=None)).max_workers is None
        with pytest.raises(InvalidInput, match="max_workers"):
            await fleets.set_cap(tx, fleet, max_workers=-1)


async def test_assigning_replaces_the_whole_set_and_tells_what_is_new(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        one, two, three = [await a_workflow(tx, slug) for slug in ("one", "two", "three")]
        first = await fleets.assign(tx, fleet, {one, two}, now=NOW)
        second = await fleets.assign(tx, fleet, {two, three}, now=NOW)
        slugs = [each.slug for each in await fleets.assigned_to(tx, fleet)]
        with_two = await fleets.fleets_with(tx, two, stage="production")
        none_left = await fleets.assign(tx, fleet, set(), now=NOW)
    assert first.added == {one, two}
    assert second.added == {three}
    assert second.removed == {one}
    assert slugs == ["three", "two"]
    assert with_two == [fleet]
    assert none_left.removed == {two, three}


async def test_an_unknown_workflow_is_named_and_nothing_is_assigned(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        known = await a_workflow(tx)
        with pytest.raises(InvalidInput, match="999"):
            await fleets.assign(tx, fleet, {known, 999}, now=NOW)
        assert await fleets.assigned_to(tx, fleet) == []
        with pytest.raises(InvalidInput, match="nowhere") as refused:
            await fleets.workflow_ids(tx, ["upscale", "nowhere"])
    assert refused.value.details == {"field": "workflow_slugs", "unknown": ["nowhere"]}


async def test_the_open_workflow_of_a_fleet_stays_assigned(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        opened, other = await a_workflow(tx, "open-gpus"), await a_workflow(tx, "other")
        fleet = await fleets.set_open_workflow(tx, fleet, workflow_id=opened)
        assignment = await fleets.assign(tx, fleet, {other}, now=NOW)
    assert assignment.workflow_ids == {opened, other}


async def test_the_object_info_of_a_fleet_is_the_last_reported(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        assert fleet.object_info_hash is None
        await fleets.set_object_info(tx, fleet, key="central/object_info/a.json", content_hash="a")
        found = await fleets.get_fleet(tx, "gpus", "production")
    assert (found.object_info_key, found.object_info_hash) == ("central/object_info/a.json", "a")


async def test_workers_are_listed_by_fleet_in_pages(central: Database) -> None:
    async with central.transaction() as tx:
        one, two = await a_fleet(tx, "one"), await a_fleet(tx, "two")
        await a_workflow(tx, "x")
        await a_workflow(tx, "y")
        for fleet, worker_id in ((one, "b"), (two, "c"), (one, "a")):
            await a_worker(tx, fleet, worker_id, workflow_slugs=("x", "y"))
        of_one = await fleets.workers_of(tx, one)
        page = await fleets.workers_of(tx, limit=2)
        rest = await fleets.workers_of(tx, after_worker_id="b", limit=2)
    assert [worker.worker_id for worker in of_one] == ["a", "b"]
    assert [worker.worker_id for worker in page] == ["a", "b"]
    assert [worker.worker_id for worker in rest] == ["c"]

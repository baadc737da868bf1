"""Registered workflows and their versions, on every database."""

import asyncio
from dataclasses import replace

import pytest
from tests.fleetkit.making import NOW, a_fleet
from tests.fleetkit.objects import MemoryObjects
from tests.fleetkit.prompts import OBJECT_INFO, PROMPT, PROPERTIES, WHAT, drafted

from comfyfleet.db import Database
from comfyfleet.effects import documents
from comfyfleet.effects import service as effects
from comfyfleet.effects.model import Terms
from comfyfleet.effects.objectinfo import engine_object_info, object_info_for
from comfyfleet.fleets import objectinfo
from comfyfleet.fleets import service as fleets
from comfyfleet.kernel.errors import InvalidInput, NotFound


async def test_what_is_registered_is_found_as_it_was(central: Database) -> None:
    objects, draft = MemoryObjects(), drafted(*PROPERTIES)
    await documents.keep(objects, draft)
    terms = Terms(frozenset({"video", "big"}), run_limit_seconds=60, price_tokens=5)
    async with central.begin() as tx:
        workflow, version = await effects.register(tx, draft, terms, now=NOW)
    async with central.look() as tx:
        assert await effects.by_slug(tx, "photo") == workflow
        assert await effects.get(tx, workflow.id) == workflow
        assert await effects.get_version(tx, workflow) == version
        assert await effects.all_of(tx) == [workflow]
    assert workflow.required_capabilities == {"video", "big"}
    assert (workflow.version, workflow.run_limit_seconds, workflow.price_tokens) == (1, 60, 5)
    assert workflow.is_active
    assert not workflow.is_paused
    assert version.properties == draft.properties
    assert await documents.read(objects, version) == PROMPT


async def test_the_next_version_is_what_new_jobs_get_and_the_old_one_stays(
    central: Database,
) -> None:
    async with central.begin() as tx:
        first, _ = await effects.register(
            tx, drafted(*PROPERTIES), Terms(price_tokens=5), now=NOW, run_limit_seconds=90
        )
        second, newest = await effects.register(tx, drafted(WHAT), Terms(), now=NOW)
        old = await effects.get_version(tx, second, 1)
        assert [each.version for each in await effects.versions_of(tx, second)] == [2, 1]
    assert (second.id, second.version, newest.version) == (first.id, 2, 2)
    assert (second.price_tokens, second.run_limit_seconds) == (5, 90)
    assert len(old.properties) == len(PROPERTIES)


async def test_an_older_version_can_be_chosen_again_and_numbers_go_on(central: Database) -> None:
    async with central.begin() as tx:
        for _ in range(2):
            workflow, _ = await effects.register(tx, drafted(), Terms(), now=NOW)
        back = await effects.activate(tx, workflow, version=1)
        assert (await effects.get_version(tx, back)).version == 1
        after, _ = await effects.register(tx, drafted(), Terms(), now=NOW)
        with pytest.raises(NotFound, match="no version 9"):
            await effects.activate(tx, after, version=9)
    assert (back.version, after.version) == (1, 3)


async def test_versions_made_at_once_get_numbers_of_their_own(central: Database) -> None:
    async def register() -> int:
        async with central.begin() as tx:
            return (await effects.register(tx, drafted(), Terms(), now=NOW))[1].version

    numbers = await asyncio.gather(*(register() for _ in range(8)))
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_a_workflow_is_held_back_and_let_go(central: Database) -> None:
    async with central.begin() as tx:
        workflow, _ = await effects.register(tx, drafted(), Terms(), now=NOW)
        assert (await effects.pause(tx, workflow)).is_paused
        assert not (await effects.resume(tx, workflow)).is_paused
        inactive = await effects.deactivate(tx, workflow)
        assert not inactive.is_active
        registered, _ = await effects.register(tx, drafted(), Terms(), now=NOW)
        assert not registered.is_active
        assert (await effects.activate(tx, workflow)).is_active


async def test_terms_change_without_a_version(central: Database) -> None:
    async with central.begin() as tx:
        workflow, _ = await effects.register(tx, drafted(), Terms(), now=NOW)
        changed = await effects.change_terms(tx, workflow, Terms(frozenset({"x"}), 5, 7))
        assert await effects.change_terms(tx, changed, Terms()) == changed
    assert changed == replace(
        workflow, required_capabilities=frozenset({"x"}), run_limit_seconds=5, price_tokens=7
    )


@pytest.mark.parametrize(
    "terms", [Terms(run_limit_seconds=0), Terms(price_tokens=-1), Terms(price_tokens=2**31)]
)
async def test_terms_that_make_no_sense_are_refused(central: Database, terms: Terms) -> None:
    async with central.begin() as tx:
        with pytest.raises(InvalidInput):
            await effects.register(tx, drafted(), terms, now=NOW)
        assert await effects.all_of(tx) == []


async def test_a_fleet_has_one_open_workflow_of_its_own(central: Database) -> None:
    async with central.begin() as tx:
        one, two = await a_fleet(tx, "a-b", "c"), await a_fleet(tx, "a", "b-c")
        opened = await effects.open_workflow_of(tx, one, now=NOW)
        other = await effects.open_workflow_of(tx, two, now=NOW)
        fleet = await fleets.get(tx, "a-b", "c")
        assert await effects.open_workflow_of(tx, fleet, now=NOW) == opened
        assert [each.slug for each in await fleets.assigned_to(tx, fleet)] == [opened.slug]
        assert await effects.all_of(tx) == []
        assert await effects.all_of(tx, with_open=True) == sorted(
            [opened, other], key=lambda each: each.slug
        )
        with pytest.raises(InvalidInput, match="open"):
            await effects.register(tx, drafted(slug=opened.slug), Terms(), now=NOW)
    assert opened.id != other.id
    assert (opened.is_open, opened.version) == (True, 0)


async def test_a_fleets_own_object_info_goes_before_the_engines(central: Database) -> None:
    objects = MemoryObjects()
    async with central.begin() as tx:
        fleet = await a_fleet(tx)
    assert await object_info_for(objects, fleet) == engine_object_info()
    key, content_hash = await objectinfo.keep(objects, OBJECT_INFO)
    async with central.begin() as tx:
        fleet = await fleets.set_object_info(tx, fleet, key=key, content_hash=content_hash)
    assert await object_info_for(objects, fleet) == OBJECT_INFO
    assert key == f"central/object_info/{content_hash}.json"


@pytest.mark.parametrize("data", [b"", b"[]", b'{"KSampler": 5}', b'{"K": {"input": []}}'])
def test_what_is_no_object_info_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        objectinfo.parse(data)

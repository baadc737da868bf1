"""Registered workflows and their versions, on every database."""

import asyncio
from dataclasses import replace

import pytest
from tests.support.databases.memory_objects import MemoryObjects
from tests.support.jobs.fleets import NOW, a_fleet
from tests.support.jobs.workflows import OBJECT_INFO, PROMPT, PROPERTIES, WHAT, drafted
from tests.support.server.object_infos import store_object_info

from comfyfleet.errors import InvalidInput, NotFound
from comfyfleet.server.catalog import service
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import WorkflowTerms
from comfyfleet.server.catalog.service import engine_object_info, object_info_for
from comfyfleet.server.db import Database
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.object_info_parser import parse_object_info


async def test_what_is_registered_is_found_as_it_was(central: Database) -> None:
    objects, draft = MemoryObjects(), drafted(*PROPERTIES)
    await service.store_document(objects, draft)
    terms = WorkflowTerms(frozenset({"video", "big"}), run_limit_seconds=60, price_tokens=5)
    async with central.transaction() as tx:
        workflow, version = await catalog.register_workflow(tx, draft, terms, now=NOW)
    async with central.read() as tx:
        assert await catalog.workflow_by_slug(tx, "photo") == workflow
        assert await catalog.get_workflow(tx, workflow.id) == workflow
        assert await catalog.get_version(tx, workflow) == version
        assert await catalog.list_workflows(tx) == [workflow]
    assert workflow.required_capabilities == {"video", "big"}
    assert (workflow.version, workflow.run_limit_seconds, workflow.price_tokens) == (1, 60, 5)
    assert workflow.is_active
    assert not workflow.is_paused
    assert version.properties == draft.properties
    assert await service.read_document(objects, version) == PROMPT


async def test_the_next_version_is_what_new_jobs_get_and_the_old_one_stays(
    central: Database,
) -> None:
    async with central.transaction() as tx:
        first, _ = await catalog.register_workflow(
            tx, drafted(*PROPERTIES), WorkflowTerms(price_tokens=5), now=NOW, run_limit_seconds=90
        )
        second, newest = await catalog.register_workflow(
            tx, drafted(WHAT), WorkflowTerms(), now=NOW
        )
        old = await catalog.get_version(tx, second, 1)
        assert [each.version for each in await catalog.versions_of(tx, second)] == [2, 1]
    assert (second.id, second.version, newest.version) == (first.id, 2, 2)
    assert (second.price_tokens, second.run_limit_seconds) == (5, 90)
    assert len(old.properties) == len(PROPERTIES)


async def test_a_draft_is_a_version_that_no_new_job_gets_until_it_is_chosen(
    central: Database,
) -> None:
    terms = WorkflowTerms(price_tokens=5)
    async with central.transaction() as tx:
        await catalog.register_workflow(tx, drafted(*PROPERTIES), terms, now=NOW)
        kept, draft = await catalog.register_workflow(
            tx, drafted(WHAT), WorkflowTerms(), now=NOW, is_draft=True
        )
        assert (kept.version, draft.version) == (1, 2)
        assert len(await catalog.properties_in_use(tx, kept.slug)) == len(PROPERTIES)
        with pytest.raises(InvalidInput, match="these settings apply to all versions"):
            await catalog.register_workflow(tx, drafted(), terms, now=NOW, is_draft=True)
        used = await catalog.activate_version(tx, kept, version=draft.version)
        assert (await catalog.get_version(tx, used)).properties == draft.properties
        _, third = await catalog.register_workflow(tx, drafted(), WorkflowTerms(), now=NOW)
    assert third.version == 3


async def test_an_older_version_can_be_chosen_again_and_numbers_go_on(central: Database) -> None:
    async with central.transaction() as tx:
        for _ in range(2):
            workflow, _ = await catalog.register_workflow(tx, drafted(), WorkflowTerms(), now=NOW)
        back = await catalog.activate_version(tx, workflow, version=1)
        assert (await catalog.get_version(tx, back)).version == 1
        after, _ = await catalog.register_workflow(tx, drafted(), WorkflowTerms(), now=NOW)
        with pytest.raises(NotFound, match="no version 9"):
            await catalog.activate_version(tx, after, version=9)
    assert (back.version, after.version) == (1, 3)


async def test_versions_made_at_once_get_numbers_of_their_own(central: Database) -> None:
    async def register() -> int:
        async with central.transaction() as tx:
            return (await catalog.register_workflow(tx, drafted(), WorkflowTerms(), now=NOW))[
                1
            ].version

    numbers = await asyncio.gather(*(register() for _ in range(8)))
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_a_workflow_is_held_back_and_let_go(central: Database) -> None:
    async with central.transaction() as tx:
        workflow, _ = await catalog.register_workflow(tx, drafted(), WorkflowTerms(), now=NOW)
        assert (await catalog.pause_workflow(tx, workflow)).is_paused
        assert not (await catalog.resume_workflow(tx, workflow)).is_paused
        inactive = await catalog.deactivate_version(tx, workflow)
        assert not inactive.is_active
        registered, _ = await catalog.register_workflow(tx, drafted(), WorkflowTerms(), now=NOW)
        assert not registered.is_active
        assert (await catalog.activate_version(tx, workflow)).is_active


async def test_terms_change_without_a_version(central: Database) -> None:
    async with central.transaction() as tx:
        workflow, _ = await catalog.register_workflow(tx, drafted(), WorkflowTerms(), now=NOW)
        changed = await catalog.change_terms(tx, workflow, WorkflowTerms(frozenset({"x"}), 5, 7))
        assert await catalog.change_terms(tx, changed, WorkflowTerms()) == changed
    assert changed == replace(
        workflow, required_capabilities=frozenset({"x"}), run_limit_seconds=5, price_tokens=7
    )


@pytest.mark.parametrize(
    "terms",
    [
        WorkflowTerms(run_limit_seconds=0),
        WorkflowTerms(price_tokens=-1),
        WorkflowTerms(price_tokens=2**31),
    ],
)
async def test_terms_that_make_no_sense_are_refused(
    central: Database, terms: WorkflowTerms
) -> None:
    async with central.transaction() as tx:
        with pytest.raises(InvalidInput):
            await catalog.register_workflow(tx, drafted(), terms, now=NOW)
        assert await catalog.list_workflows(tx) == []


async def test_a_fleet_has_one_open_workflow_of_its_own(central: Database) -> None:
    async with central.transaction() as tx:
        one, two = await a_fleet(tx, "a-b", "c"), await a_fleet(tx, "a", "b-c")
        opened = await catalog.open_workflow_of(tx, one, now=NOW)
        other = await catalog.open_workflow_of(tx, two, now=NOW)
        fleet = await fleets.get_fleet(tx, "a-b", "c")
        assert await catalog.open_workflow_of(tx, fleet, now=NOW) == opened
        assert [each.slug for each in await fleets.assigned_to(tx, fleet)] == [opened.slug]
        assert await catalog.list_workflows(tx) == []
        assert await catalog.list_workflows(tx, with_open=True) == sorted(
            [opened, other], key=lambda each: each.slug
        )
        with pytest.raises(InvalidInput, match="open"):
            await catalog.register_workflow(tx, drafted(slug=opened.slug), WorkflowTerms(), now=NOW)
    assert opened.id != other.id
    assert (opened.is_open, opened.version) == (True, 0)


async def test_a_fleets_own_object_info_goes_before_the_engines(central: Database) -> None:
    objects = MemoryObjects()
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
    assert await object_info_for(objects, fleet) == engine_object_info()
    key, content_hash = await store_object_info(objects, OBJECT_INFO)
    async with central.transaction() as tx:
        fleet = await fleets.set_object_info(tx, fleet, key=key, content_hash=content_hash)
    assert await object_info_for(objects, fleet) == OBJECT_INFO
    assert key == f"central/object_info/{content_hash}.json"


@pytest.mark.parametrize("data", [b"", b"[]", b'{"KSampler": 5}', b'{"K": {"input": []}}'])
def test_what_is_no_object_info_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        parse_object_info(data)

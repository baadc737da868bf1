"""Effects: priced workflows that customers pick, on every database."""

import asyncio
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.support.jobs.fleets import NOW, a_fleet
from tests.support.jobs.workflows import PROPERTIES, WHAT, drafted

from comfyfleet.errors import Conflict, InvalidInput, LimitExceeded, NotFound
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import (
    EffectDefinition,
    EffectExample,
    EffectSettings,
    ExampleFile,
    RegisteredWorkflow,
    WorkflowTerms,
)
from comfyfleet.server.db import Database, Tx

FACE = EffectSettings(
    title="Photo",
    description="As if taken.",
    preview_url="https://example.com/photo.webp",
    price_tokens=12,
    overrides={"steps": 30, "what": "a dog"},
    stage="staging",
    provider="cloud",
    is_published=True,
    max_upload_bytes=1000,
    media_types=("image/png", "image/webp"),
)
MIB = 1024**2


async def a_workflow(tx: Tx, slug: str = "photo") -> RegisteredWorkflow:
    workflow, _ = await catalog.register_workflow(
        tx, drafted(*PROPERTIES, slug=slug), WorkflowTerms(), now=NOW
    )
    return workflow


async def make(
    tx: Tx, workflow: RegisteredWorkflow, slug: str = "photo", settings: EffectSettings = FACE
) -> EffectDefinition:
    return await catalog.create_effect(
        tx, effect_id=uuid4(), slug=slug, workflow=workflow, settings=settings, now=NOW
    )


async def test_an_effect_is_found_as_it_was_made(central: Database) -> None:
    async with central.transaction() as tx:
        workflow = await a_workflow(tx)
        made = await make(tx, workflow)
        assert await catalog.get_effect(tx, made.id) == made
        assert await catalog.effect_by_slug(tx, "photo") == made
        assert await catalog.list_effects(tx, workflow=workflow) == [made]
    assert (made.settings, made.workflow_id) == (FACE, workflow.id)


async def test_a_slug_is_taken_once_even_at_once(central: Database) -> None:
    async with central.transaction() as tx:
        workflow = await a_workflow(tx)

    async def attempt() -> bool:
        try:
            async with central.transaction() as tx:
                await make(tx, workflow)
        except Conflict:
            return False
        return True

    assert sum(await asyncio.gather(*(attempt() for _ in range(6)))) == 1


async def test_without_a_title_the_slug_is_shown(central: Database) -> None:
    async with central.transaction() as tx:
        made = await make(tx, await a_workflow(tx), settings=EffectSettings(title=" "))
        changed = await catalog.update_effect(tx, made, replace(FACE, title=""))
    assert (made.settings.title, changed.settings.title) == ("photo", "photo")
    assert changed.settings.price_tokens == 12


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"price_tokens": -1}, "price_tokens"),
        ({"price_tokens": 2**31}, "price_tokens"),
        ({"overrides": {"steps": 51}}, "overrides"),
        ({"overrides": {"gone": 1}}, "overrides"),
        ({"stage": "Über"}, "stage"),
        ({"provider": "local"}, "provider"),
        ({"media_types": ("video/mp4",)}, "media_types"),
        ({"media_types": ("image/*",)}, "media_types"),
        ({"max_upload_bytes": -5}, "max_upload_bytes"),
        ({"preview_url": "javascript:alert(1)"}, "preview_url"),
        ({"title": "x" * 201}, "title"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    central: Database, change: dict[str, Any], field: str
) -> None:
    async with central.transaction() as tx:
        with pytest.raises(InvalidInput) as refused:
            await make(tx, await a_workflow(tx), settings=replace(FACE, **change))
    assert refused.value.details["field"] == field


async def test_an_open_workflow_is_no_effect(central: Database) -> None:
    async with central.transaction() as tx:
        fleet = await a_fleet(tx)
        with pytest.raises(InvalidInput, match="open"):
            await make(tx, await catalog.open_workflow_of(tx, fleet, now=NOW))


async def test_the_catalogue_has_what_is_published_and_active(central: Database) -> None:
    async with central.transaction() as tx:
        photo, film = await a_workflow(tx), await a_workflow(tx, "film")
        made = [await make(tx, photo, slug) for slug in ("c", "a", "b")]
        await make(tx, photo, "draft", EffectSettings())
        await make(tx, film, "film")
        await catalog.deactivate_version(tx, film)
        first = await catalog.list_published(tx, limit=2)
        rest = await catalog.list_published(tx, after_slug="b", limit=9)
        version = await catalog.get_version(tx, photo)
    assert [each.effect.slug for each in first + rest] == ["a", "b", "c"]
    assert all((each.workflow, each.version) == (photo, version) for each in first)
    assert first[0].effect == made[1]
    assert first[0].takes == "image"


async def test_what_is_not_for_sale_can_not_be_picked(central: Database) -> None:
    async with central.transaction() as tx:
        workflow = await a_workflow(tx)
        made = await make(tx, workflow, settings=EffectSettings())
        for effect_id in (made.id, UUID(int=5)):
            with pytest.raises(NotFound):
                await catalog.resolve(tx, effect_id)
        published = await catalog.publish_effect(tx, made)
        assert (await catalog.resolve(tx, made.id)).effect == published
        await catalog.deactivate_version(tx, workflow)
        with pytest.raises(NotFound):
            await catalog.resolve(tx, made.id)
        await catalog.activate_version(tx, workflow)
        await catalog.withdraw_effect(tx, made)
        with pytest.raises(NotFound):
            await catalog.resolve(tx, made.id)


async def test_a_version_that_would_break_a_published_effect_is_told(central: Database) -> None:
    async with central.transaction() as tx:
        workflow = await a_workflow(tx)
        made = await make(tx, workflow)
        await make(tx, workflow, "draft", replace(FACE, is_published=False))
        assert await catalog.broken_effects(tx, workflow, drafted(*PROPERTIES).properties) == []
        [(broken, why)] = await catalog.broken_effects(tx, workflow, [WHAT])
    assert broken == made
    assert why == "the workflow has no property 'steps'"


async def test_an_upload_is_checked_before_it_is_sent(central: Database) -> None:
    async with central.transaction() as tx:
        workflow = await a_workflow(tx)
        await make(tx, workflow, "narrow")
        await make(tx, workflow, "wide", EffectSettings(is_published=True))
        narrow, wide = await catalog.list_published(tx, limit=2)
    narrow.check_upload("image/png", 1000, at_most_bytes=MIB)
    wide.check_upload("image/jpeg", MIB, at_most_bytes=MIB)
    for offer, media_type in ((narrow, "image/jpeg"), (wide, "video/mp4")):
        with pytest.raises(InvalidInput):
            offer.check_upload(media_type, 1, at_most_bytes=MIB)
    for offer, size in ((narrow, 1001), (wide, MIB + 1)):
        with pytest.raises(LimitExceeded):
            offer.check_upload("image/png", size, at_most_bytes=MIB)


async def test_the_typical_duration_is_the_median_of_the_last_runs(central: Database) -> None:
    async with central.transaction() as tx:
        made = await make(tx, await a_workflow(tx))
        await catalog.note_durations(tx, made.id, [10.0, 900.0])
        await catalog.note_durations(tx, made.id, [20.0])
        await catalog.note_durations(tx, UUID(int=5), [20.0])
        timed = await catalog.get_effect(tx, made.id)
        await catalog.note_durations(tx, made.id, [3.0] * 30)
        quicker = await catalog.get_effect(tx, made.id)
    assert made.typical_seconds is None
    assert timed.last_processing_time_seconds == 20.0
    assert timed.typical_seconds == 20.0, "one slow run frightens nobody"
    assert quicker.typical_seconds == 3.0, "older runs are forgotten"


async def test_effects_are_found_by_text_and_tag(central: Database) -> None:
    async with central.transaction() as tx:
        workflow = await a_workflow(tx)
        for slug, title, tags in (
            ("soft", "Soft 100%", ("portrait", "calm")),
            ("toon", "Cartoon", ("portrait mode",)),
            ("secret", "Soft secret", ("hidden",)),
        ):
            settings = EffectSettings(
                title=title, is_published=slug != "secret", tags=tags, description="Nice_one"
            )
            await make(tx, workflow, slug, settings)

        async def found(**by: str) -> list[str]:
            offers = await catalog.list_published(tx, limit=9, **by)
            return [each.effect.slug for each in offers]

        assert await found(text="CARTOON") == ["toon"]
        assert await found(text="0%") == ["soft"]
        assert await found(text="%") == ["soft"]
        assert await found(text="e_o") == ["soft", "toon"]
        assert await found(text="soft") == ["soft"]
        assert await found(text="calm") == ["soft"]
        assert await found(tag="portrait") == ["soft"]
        assert await found(tag='portrait" mode') == []
        assert await found(tag="portrait mode", text="x") == []
        assert await catalog.published_tags(tx) == ["calm", "portrait", "portrait mode"]


@pytest.mark.parametrize("tag", ["", "Upper", "a_b", '"', "x" * 41, " a", "ä"])
async def test_a_tag_is_plain(central: Database, tag: str) -> None:
    async with central.transaction() as tx:
        with pytest.raises(InvalidInput):
            await make(tx, await a_workflow(tx), settings=replace(FACE, tags=(tag,)))


async def test_examples_are_set_replaced_and_removed(central: Database) -> None:
    files = [ExampleFile(f"{number:032x}.png", "image/png", 5, 3, 2) for number in range(4)]
    async with central.transaction() as tx:
        effect = await make(tx, await a_workflow(tx))
        effect, gone = await catalog.set_example(tx, effect, 0, "before", files[0])
        assert gone == ()
        effect, gone = await catalog.set_example(tx, effect, 0, "after", files[1])
        effect, gone = await catalog.set_example(tx, effect, 1, "after", files[2])
        effect, gone = await catalog.set_example(tx, effect, 0, "after", files[3])
        assert gone == (files[1],)
        wanted = (EffectExample(files[0], files[3]), EffectExample(None, files[2]))
        assert (await catalog.get_effect(tx, effect.id)).examples == effect.examples == wanted
        for position in (3, -1, 6):
            with pytest.raises(InvalidInput):
                await catalog.set_example(tx, effect, position, "after", files[1])
        effect, gone = await catalog.remove_example(tx, effect, 0)
        assert (effect.examples, gone) == (wanted[1:], (files[0], files[3]))
        with pytest.raises(NotFound):
            await catalog.remove_example(tx, effect, 1)

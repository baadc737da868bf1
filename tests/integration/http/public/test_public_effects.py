"""The catalogue as pages show it: searched, with examples, and with all that a form needs."""

import asyncio
from typing import Any

import jsonschema
from tests.support.server.control_plane import client_of
from tests.support.server.customers import DRAWN, PRICE, Customer, EffectSetup, png

from comfyfleet.client import Client

FORM = [
    {"name": "prefix", "type": "text", "placeholder": "PREFIX", "default": "a", "format": "multiline"},
    {"name": "colour", "type": "integer", "binding": "1.color", "format": "colour", "label": "Tint"},
]  # fmt: skip


async def test_effects_are_found_by_text_and_tag_with_all_tags(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    await effect_setup.change(effect_setup.draw, tags=("sketch", "fast"), title="Pencil")
    found = await ada.get("effects", q="penc")
    assert [each["slug"] for each in found["effects"]] == ["draw"]
    assert found["tags"] == ["fast", "sketch"]
    assert found["effects"][0]["tags"] == ["sketch", "fast"]
    assert [each["slug"] for each in (await ada.get("effects", tag="fast"))["effects"]] == ["draw"]
    assert (await ada.get("effects", tag="slow"))["effects"] == []
    assert len((await ada.get("effects", q=""))["effects"]) == 2
    assert (await ada.get("effects", after="draw"))["tags"] == []


async def test_an_effect_is_shown_by_its_slug_too(effect_setup: EffectSetup, ada: Customer) -> None:
    by_id = await ada.get(f"effects/{effect_setup.draw.id}")
    assert await ada.get("effects/draw") == by_id
    await effect_setup.publish("quiet", "draw", is_published=False)
    for missing in ("quiet", "nothing", "a%00b"):
        assert (await ada.client.get(f"/api/effects/{missing}")).status_code in (404, 422)


async def test_it_is_told_whether_the_caller_can_pay(effect_setup: EffectSetup) -> None:
    poor, rich = (
        await effect_setup.customer(tokens=PRICE - 1),
        await effect_setup.customer(tokens=PRICE),
    )
    assert not (await poor.get("effects/draw"))["can_pay"]
    assert (await rich.get("effects/draw"))["can_pay"]
    assert [each["can_pay"] for each in (await poor.get("effects"))["effects"]] == [False, False]


async def test_each_property_says_how_it_is_entered(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    made = await effect_setup.fleet_setup.register_workflow("form", document=DRAWN, properties=FORM)
    assert made.status_code == 201, made.text
    await effect_setup.fleet_setup.assign("invert", "draw", "form")
    effect = await effect_setup.publish("form")
    schema = (await ada.get("effects/form"))["properties"]
    jsonschema.Draft202012Validator.check_schema(schema)
    fields = schema["properties"]
    assert list(fields) == ["prefix", "colour"]
    assert fields["prefix"]["x-kind"] == "multiline"
    colour = fields["colour"]
    assert (colour["x-kind"], colour["title"], colour["maximum"]) == ("colour", "Tint", 0xFFFFFF)
    assert (await ada.get("effects/draw"))["properties"]["properties"]["colour"]["x-kind"] == "seed"
    refused = await ada.submit(effect, properties={"colour": 0x1000000})
    assert refused.status_code == 422
    await ada.job(effect, properties={"colour": 0xFFCC1A})
    shown = (await effect_setup.fleet_setup.admin.get("/api/admin/workflows/form")).json()
    assert shown["properties"][1]["format"] == "colour"
    assert shown["properties"][1]["label"] == "Tint"


async def test_a_format_fits_its_type(effect_setup: EffectSetup) -> None:
    for change in ({"format": "mask"}, {"format": "rainbow"}, {"label": "x" * 201}):
        properties = [{**FORM[1], **change}]
        refused = await effect_setup.fleet_setup.register_workflow(
            "odd", document=DRAWN, properties=properties
        )
        assert refused.status_code == 422, refused.text


async def put(effect_setup: EffectSetup, path: str, content: bytes, status: int = 200) -> Any:
    admin = effect_setup.fleet_setup.admin
    answer = await admin.put(f"/api/admin/effects/{path}", content=content)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_examples_are_shown_to_everybody_and_cached(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    await put(effect_setup, "draw/examples/0/before", png(colour=1))
    answer = await put(effect_setup, "draw/examples/0/after", png(width=9, colour=2))
    assert answer["examples"] == (await ada.get("effects/draw"))["examples"]
    (example,) = answer["examples"]
    after = example["after"]
    assert (after["content_type"], after["width"], after["height"]) == ("image/png", 9, 1)
    async with client_of(effect_setup.plane, None) as stranger:
        shown = await stranger.get(after["url"])
        assert (shown.status_code, shown.content) == (200, png(width=9, colour=2))
        assert "immutable" in shown.headers["cache-control"]
        assert "sandbox" in shown.headers["content-security-policy"]
        again = {"If-None-Match": shown.headers["etag"]}
        assert (await stranger.get(after["url"], headers=again)).status_code == 304
        part = await stranger.get(after["url"], headers={"Range": "bytes=0-3"})
        assert (part.status_code, part.content) == (206, b"\x89PNG")
        for name in ("0" * 32 + ".png", "nothing", "..%2Fx"):
            missing = await stranger.get(f"/api/effect-examples/{name}")
            assert missing.status_code == 404
    audited = await effect_setup.fleet_setup.audited("set_example")
    assert [each["subject"] for each in audited] == ["effect:draw"] * 2


async def test_examples_are_shown_as_soon_as_they_are_given_and_all_at_once(
    effect_setup: EffectSetup,
) -> None:
    """Names are kept in memory: neither a new one nor two at the same time must be unknown."""
    looks = effect_setup.fleet_setup.admin
    for side in ("before", "after"):
        answer = await put(effect_setup, f"draw/examples/0/{side}", png(colour=1))
        given = [each["url"] for each in answer["examples"][0].values() if each]
        shown = await asyncio.gather(*(looks.get(url) for url in given))
        assert [each.status_code for each in shown] == [200] * len(given)


async def test_an_example_that_is_replaced_or_removed_is_gone(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    first = await put(effect_setup, "draw/examples/0/after", png(colour=1))
    second = await put(effect_setup, "draw/examples/0/after", png(colour=2))
    old, new = (each["examples"][0]["after"]["url"] for each in (first, second))
    assert old != new
    await effect_setup.plane.context.deferred.flush()
    keys = [each async for each in effect_setup.plane.store.keys("central/effects/")]
    assert [key.rpartition("/")[2] for key in keys] == [new.rpartition("/")[2]]
    gone = await effect_setup.fleet_setup.admin.delete("/api/admin/effects/draw/examples/0")
    assert gone.json()["examples"] == (await ada.get("effects/draw"))["examples"] == []
    await effect_setup.plane.context.deferred.flush()
    assert [each async for each in effect_setup.plane.store.keys("central/effects/")] == []


async def test_what_is_no_picture_is_no_example(effect_setup: EffectSetup) -> None:
    for content in (b"", b"<svg onload=alert(1)>", b"RIFF....WAVEfmt "):
        await put(effect_setup, "draw/examples/0/after", content, 422)
    await put(effect_setup, "nothing/examples/0/after", png(), 404)
    await put(effect_setup, "draw/examples/1/after", png(), 422)
    await put(effect_setup, "draw/examples/6/after", png(), 422)
    await put(effect_setup, "draw/examples/0/beside", png(), 422)


async def test_the_client_searches_and_sets_examples(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    await effect_setup.change(effect_setup.draw, tags=("fast",))
    admin_key = effect_setup.fleet_setup.admin.headers["authorization"].removeprefix("Bearer ")
    async with (
        Client(
            "http://test", admin_key, transport=effect_setup.fleet_setup.admin._transport
        ) as admin,
        Client("http://test", ada.key, transport=ada.client._transport) as client,
    ):
        await admin.admin.set_example("draw", png(), side="before")
        shown = await admin.admin.set_example("draw", png(colour=3))
        found = await client.effects(tag="fast")
        assert [each.slug for each in found] == ["draw"]
        assert await client.effects("nothing like it") == []
        effect = await client.effect("draw")
        assert effect == found[0]
        assert effect.examples == tuple(shown.examples)
        assert (await admin.admin.remove_example("draw")).examples == []

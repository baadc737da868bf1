"""Marks of files made by AI, from the terms of a workflow to the file that a customer gets."""

from typing import Any

import pytest
from tests.security.test_delivered_files import result_of
from tests.support.server.customers import Customer, EffectSetup, png
from tests.unit import saved_files
from tests.unit.test_delivery import MANIFEST, PRIVATE, SIGNED, shown_mark

PLAIN, SIGNED_PROMPT = png(), SIGNED["png"](PRIVATE["png"](), MANIFEST)


async def set_terms(setup: EffectSetup, ai_mark: str, workflow: str = "draw") -> None:
    path = f"/api/admin/workflows/{workflow}"
    changed = await setup.fleet_setup.admin.patch(path, json={"ai_mark": ai_mark})
    assert changed.json()["ai_mark"] == ai_mark


async def delivered(setup: EffectSetup, ada: Customer, data: bytes) -> bytes:
    job_id = await ada.job(setup.draw, properties={"width": 32})
    await setup.work(data)
    return await result_of(ada, job_id)


@pytest.mark.parametrize(
    ("ai_mark", "expected"),
    [
        ("auto", None),
        ("none", None),
        ("generated", "trainedAlgorithmicMedia"),
        ("edited", "compositeWithTrainedAlgorithmicMedia"),
    ],
)
async def test_a_result_gets_the_mark_of_its_workflow(
    effect_setup: EffectSetup, ada: Customer, ai_mark: str, expected: str | None
) -> None:
    await set_terms(effect_setup, ai_mark)
    assert shown_mark(await delivered(effect_setup, ada, PLAIN)) == expected


async def test_the_worker_is_told_the_mark(effect_setup: EffectSetup, ada: Customer) -> None:
    await set_terms(effect_setup, "generated")
    await ada.job(effect_setup.draw, properties={"width": 32})
    async with effect_setup.fleet_setup.worker() as worker:
        job = await worker.job()
    assert (job["strip_metadata"], job["ai_mark"]) == (True, "trainedAlgorithmicMedia")


async def test_kept_metadata_is_marked_too(effect_setup: EffectSetup, ada: Customer) -> None:
    await set_terms(effect_setup, "generated")
    await effect_setup.change(effect_setup.draw, keep_metadata=True)
    found = await delivered(effect_setup, ada, saved_files.png({"prompt": "kept"}))
    assert shown_mark(found) == "trainedAlgorithmicMedia"
    assert b"prompt\0kept" in found


async def test_results_of_operators_are_as_the_backend_wrote_them(
    effect_setup: EffectSetup,
) -> None:
    await set_terms(effect_setup, "generated", "invert")
    job_id = await effect_setup.fleet_setup.submit()
    await effect_setup.work(SIGNED_PROMPT)
    (output,) = (await effect_setup.fleet_setup.job(job_id))["outputs"]
    assert (await effect_setup.fleet_setup.admin.get(output["url"])).content == SIGNED_PROMPT


async def warnings(setup: EffectSetup) -> list[dict[str, Any]]:
    return await setup.fleet_setup.audited("remove_manifest")


async def test_operators_are_warned_once_that_a_manifest_is_removed(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    for _ in range(2):
        found = await delivered(effect_setup, ada, SIGNED_PROMPT)
        assert b"SECRET" not in found
        assert b"caBX" not in found
        effect_setup.plane.context.caches.lost_manifests.clear()  # as after a restart
    (warned,) = await warnings(effect_setup)
    assert warned["subject"] == "workflow:draw"


async def test_a_worker_that_removed_a_manifest_says_so(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    await ada.job(effect_setup.draw, properties={"width": 32})
    async with effect_setup.fleet_setup.worker() as worker:
        job = await worker.job()
        slot = job["outputs"][0]
        await worker.client.put(slot["url"], content=PLAIN, headers=slot["headers"])
        said = {
            "name": slot["name"],
            "size": len(PLAIN),
            "is_stripped": True,
            "lost_manifest": True,
        }
        assert (await worker.call_for(job, "complete", outputs=[said])).status_code == 200
    assert len(await warnings(effect_setup)) == 1


async def test_a_signed_result_without_a_prompt_stays_valid(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    signed = SIGNED["png"](PLAIN, MANIFEST)
    assert await delivered(effect_setup, ada, signed) == signed
    assert await warnings(effect_setup) == []

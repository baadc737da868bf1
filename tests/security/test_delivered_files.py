"""What a worker delivers: without the operator's prompt, under a key and a name that it can't choose."""

from typing import Any

import httpx
from tests.support.server.customers import Customer, EffectSetup, png
from tests.support.server.fleet import WorkerClient
from tests.unit import saved_files

SECRET = b"OPERATOR-SECRET-SYSTEM-PROMPT"
PICTURE = saved_files.png({"prompt": SECRET.decode()})


async def result_of(ada: Customer, job_id: str) -> bytes:
    job = await ada.get(f"ai-jobs/{job_id}")
    assert job["status"] == "completed"
    return (await ada.client.get(job["processed_file_url"])).content


async def test_a_customer_never_gets_the_prompt_inside_a_picture(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    await effect_setup.work(PICTURE)
    found = await result_of(ada, job_id)
    assert SECRET not in found
    assert found == saved_files.png({})


async def test_unless_the_effect_says_so(effect_setup: EffectSetup, ada: Customer) -> None:
    await effect_setup.change(effect_setup.draw, keep_metadata=True)
    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    await effect_setup.work(PICTURE)
    assert await result_of(ada, job_id) == PICTURE


async def test_an_effect_that_says_so_no_more_is_heard_before_the_next_delivery(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    await effect_setup.change(effect_setup.draw, keep_metadata=True)
    await ada.job(effect_setup.draw, properties={"width": 32})
    await effect_setup.work(PICTURE)
    await effect_setup.change(effect_setup.draw, keep_metadata=False)
    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    await effect_setup.work(PICTURE)
    assert SECRET not in await result_of(ada, job_id)


async def put(worker: WorkerClient, slot: dict[str, Any], data: bytes) -> httpx.Response:
    return await worker.client.put(slot["url"], content=data, headers=slot["headers"])


async def test_an_output_url_changes_nothing_once_the_job_is_completed(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    async with effect_setup.fleet_setup.worker("w") as worker:
        job = await worker.job()
        assert job["strip_metadata"] is True
        slot = job["outputs"][0]
        await put(worker, slot, png())
        said = {"name": slot["name"], "size": len(png()), "is_stripped": True}
        said |= {"filename": "../../a\r\nSet-Cookie: x\u202egnp.png"}
        done = await worker.call_for(job, "complete", outputs=[said])
        assert done.status_code == 200, done.text
        await put(worker, slot, png(colour=9))
        assert await result_of(ada, job_id) == png()
        again = await worker.call_for(job, "complete", outputs=[said])
        assert again.status_code == 200, again.text
    (output,) = (await ada.get(f"ai-jobs/{job_id}"))["outputs"]
    assert not set(output["filename"]) & set("/\r\n\u202e:")
    assert output["filename"].endswith(".png")
    await effect_setup.plane.context.deferred.flush()
    kept = [key async for key in effect_setup.plane.store.keys(f"tenants/{ada.tenant_id}/ai-jobs/")]
    assert len(kept) <= 2  # what was put too late is left, and swept away in a day


async def test_a_file_whose_prompt_cannot_be_removed_is_refused_until_metadata_are_kept(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    cut_off = b"\0\0\0\x10ftypisom\0\0\0\0\0\0\xff\xffmoov" + SECRET
    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    async with effect_setup.fleet_setup.worker("w") as worker:
        refused = await worker.deliver(await worker.job(), cut_off)
        assert refused.status_code == 422
        assert "output" in refused.text
        assert "keep_metadata" in refused.text
        assert "processed_file_url" not in {
            name for name, value in (await ada.get(f"ai-jobs/{job_id}")).items() if value
        }
    await effect_setup.change(effect_setup.draw, keep_metadata=True)
    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    await effect_setup.work(cut_off)
    assert await result_of(ada, job_id) == cut_off

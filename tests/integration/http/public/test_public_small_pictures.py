"""Small pictures for galleries: by a signed URL, made once, kept beside the picture, never instead of it."""

import asyncio
import io
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import client_of, plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on
from tests.support.server.tenants import AdjustableClock

from comfyfleet.protocol.small_picture import SIDE_PIXELS_MAX
from comfyfleet.server.media import small_pictures
from comfyfleet.server.media.model import small_key

GALLERY_PICTURES = 4
PICTURE_BYTES = 1024**2
# Of what the whole pictures would take.
GALLERY_SHARE_MAX = 0.05


def photo(width: int = 640, height: int = 560, *, seed: int = 1, kind: str = "PNG") -> bytes:
    """About 1 MB as a PNG file: noise does not pack."""
    noise = random.Random(seed).randbytes(width * height * 3)
    made = io.BytesIO()
    PIL.Image.frombytes("RGB", (width, height), noise).save(made, kind)
    return made.getvalue()


def smooth_photo(seed: int) -> bytes:
    """About 1 MB as a PNG file: a gradient with a little noise, as a rendering has."""
    y, x = np.mgrid[0:800, 0:800]
    grain = np.random.default_rng(seed).normal(0, 4, (800, 800, 3))
    plain = np.stack([x / 4, y / 4, (x + y) / 8], axis=-1)
    made = io.BytesIO()
    pixels = (plain + grain).clip(0, 255).astype(np.uint8)
    PIL.Image.fromarray(pixels).save(made, "PNG")
    return made.getvalue()


async def listed(ada: Customer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await ada.get("videos", urls=True))["videos"]
    return found


async def deliver(effect_setup: EffectSetup, data: bytes) -> None:
    async with effect_setup.fleet_setup.worker("w1") as worker:
        job = await worker.job()
        slot = job["outputs"][0]
        await worker.client.put(slot["url"], content=data, headers=slot["headers"])
        made = {"name": slot["name"], "size": len(data), "content_type": "image/png"}
        done = await worker.call_for(job, "complete", outputs=[made])
        assert done.status_code == 200, done.text


async def stored_keys(effect_setup: EffectSetup, ada: Customer) -> list[str]:
    await effect_setup.plane.context.deferred.flush()
    return [key async for key in effect_setup.plane.store.keys(f"tenants/{ada.tenant_id}/")]


async def test_a_list_names_small_pictures_that_are_made_once_and_cost_no_quota(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    await ada.video(photo())
    (seen,) = await listed(ada)
    used = (await ada.get("account"))["limits"]["used_storage_bytes"]
    async with client_of(effect_setup.plane, None) as nobody:
        small = await nobody.get(seen["original_small_url"])
        again = await nobody.get(seen["original_small_url"])
        unchanged = await nobody.get(
            seen["original_small_url"], headers={"if-none-match": small.headers["etag"]}
        )
    assert (small.status_code, small.headers["content-type"]) == (200, "image/webp")
    assert "sandbox" in small.headers["content-security-policy"]
    assert again.content == small.content
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    with PIL.Image.open(io.BytesIO(small.content)) as picture:
        assert max(picture.size) == SIDE_PIXELS_MAX
    keys = await stored_keys(effect_setup, ada)
    assert [key for key in keys if small_key(key) in keys], keys
    assert (await ada.get("account"))["limits"]["used_storage_bytes"] == used


async def test_a_gallery_takes_a_fraction_of_what_its_pictures_take(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    pictures = [smooth_photo(seed) for seed in range(GALLERY_PICTURES)]
    assert all(PICTURE_BYTES * 0.5 < len(each) < PICTURE_BYTES * 2 for each in pictures)
    for each in pictures:
        await ada.video(each)
    seen = await listed(ada)
    async with client_of(effect_setup.plane, None) as browser:
        whole = await asyncio.gather(*(browser.get(each["original_file_url"]) for each in seen))
        small = await asyncio.gather(*(browser.get(each["original_small_url"]) for each in seen))
    assert all(each.headers["content-type"] == "image/webp" for each in small)
    before, after = (sum(len(each.content) for each in some) for some in (whole, small))
    assert after < before * GALLERY_SHARE_MAX, (before, after)


async def test_results_of_a_media_have_small_pictures_too(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    video_id = await ada.video()
    job_id = await ada.job(effect_setup.invert, video_id=video_id)
    await deliver(effect_setup, photo())
    job = await ada.get(f"ai-jobs/{job_id}")
    urls = [job["outputs"][0]["small_url"]]
    urls.append((await ada.get(f"videos/{video_id}"))["results"][0]["small_url"])
    (seen,) = await listed(ada)
    urls.append(seen["processed_small_url"])
    assert len(set(urls)) == 1
    # What went in is a few bytes: it is small as it is.
    assert (seen["original_small_url"], bool(seen["original_file_url"])) == (None, True)
    small = await ada.client.get(urls[0])
    assert (small.status_code, small.headers["content-type"]) == (200, "image/webp")


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def moving() -> bytes:
    frames = [PIL.Image.open(io.BytesIO(photo(300, 300, seed=seed))) for seed in (1, 2)]
    made = io.BytesIO()
    frames[0].save(made, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    return made.getvalue()


@pytest.mark.parametrize(
    ("data", "kind"), [(cut(photo()), "png"), (moving(), "webp")], ids=["damaged", "moving"]
)
async def test_where_there_can_be_none_the_whole_picture_is_shown(
    effect_setup: EffectSetup, ada: Customer, data: bytes, kind: str
) -> None:
    await ada.video(data, content_type=f"image/{kind}", filename=f"cat.{kind}")
    (seen,) = await listed(ada)
    for _ in range(2):
        answer = await ada.client.get(seen["original_small_url"])
        assert answer.status_code == 302
        whole = await ada.client.get(answer.headers["location"])
        assert whole.content == data
    assert not [key for key in await stored_keys(effect_setup, ada) if key.endswith(".small.webp")]


async def test_a_url_is_good_for_one_small_picture_and_for_a_while(
    databases: Databases, tmp_path: Path
) -> None:
    ahead = AdjustableClock()
    async with plane_on(databases, tmp_path, clock=ahead) as plane, effect_setup_on(plane) as made:
        ada = await made.customer()
        await ada.video(photo(seed=1))
        await ada.video(photo(seed=2), filename="dog.png")
        one, other = (httpx.URL(each["original_small_url"]) for each in await listed(ada))
        swapped = one.copy_with(raw_path=other.raw_path.partition(b"?")[0] + b"?" + one.query)
        whole = httpx.URL(str(one).replace("/api/small/", "/api/objects/"))
        longer = one.copy_set_param("expires", "99999999999")
        async with client_of(plane, None) as stranger:
            assert (await stranger.get(one)).status_code == 200
            for wrong in (swapped, whole, longer, one.copy_remove_param("signature")):
                assert (await stranger.get(wrong)).status_code == 403, wrong
            ahead.by = timedelta(hours=1)
            assert (await stranger.get(one)).status_code == 403


async def test_a_list_that_is_read_again_names_the_same_url(
    databases: Databases, tmp_path: Path
) -> None:
    ahead = AdjustableClock()
    async with plane_on(databases, tmp_path, clock=ahead) as plane, effect_setup_on(plane) as made:
        ada = await made.customer()
        await ada.video(photo())
        urls = set()
        for minute in range(10):
            ahead.by = timedelta(minutes=minute)
            urls.add((await listed(ada))[0]["original_small_url"])
        assert len(urls) <= 2


async def test_without_pillow_lists_name_whole_pictures_only(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_pictures, "find_spec", lambda _: None)
    async with plane_on(databases, tmp_path) as plane, effect_setup_on(plane) as made:
        ada = await made.customer()
        await ada.video(photo())
        (seen,) = await listed(ada)
        assert (seen["original_small_url"], bool(seen["original_file_url"])) == (None, True)

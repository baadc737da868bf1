"""What files really are is found out after the job has ended."""

from datetime import timedelta
from pathlib import Path

from tests.support.server.tenants import PNG, AdjustableClock, TenantData

from comfyfleet.server.maintenance.sweeps import check_all_files
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File, output_key

EXAMPLES = Path(__file__).parents[3] / "examples"


async def seen(customer: TenantData, file: File) -> File:
    async with customer.pool.read() as tx:
        return await media.get_file(tx, customer.tenant_id, file.id)


async def test_what_a_file_is_and_how_large_is_kept_beside_it(ada: TenantData) -> None:
    right = await ada.file(metadata={"mine": 1})
    wrong = await ada.file(b"<html>no picture</html>")
    await check_all_files(ada.plane)
    found = await seen(ada, right)
    assert found.checked_at is not None
    assert found.metadata == {
        "mine": 1,
        "stored_bytes": len(PNG),
        "real_type": "image/png",
        "is_as_claimed": True,
        "width": 3,
        "height": 2,
    }
    found = await seen(ada, wrong)
    assert (found.metadata["real_type"], found.metadata["is_as_claimed"]) == (None, False)


async def test_a_film_that_a_worker_made_tells_how_long_it_is(ada: TenantData) -> None:
    film = next(iter(sorted((EXAMPLES / "inputs").glob("*.mp4"))))
    key = output_key(ada.tenant_id, ada.user_id, ada.user_id, "film.mp4")
    made = await ada.file(film.read_bytes(), path=key, mime_type="video/mp4")
    await check_all_files(ada.plane)
    learnt = (await seen(ada, made)).metadata
    assert learnt["real_type"] == "video/mp4"
    assert min(learnt["duration_seconds"], learnt["width"], learnt["height"]) > 0


async def test_an_object_that_is_gone_is_noted_and_stops_nothing(ada: TenantData) -> None:
    lost, there = await ada.file(), await ada.file()
    await ada.plane.store.delete(lost.path)
    await check_all_files(ada.plane)
    assert (await seen(ada, lost)).metadata == {"is_missing": True}
    assert (await seen(ada, there)).checked_at is not None


async def test_what_was_announced_and_never_came_goes_after_a_day(
    ada: TenantData, ahead: AdjustableClock
) -> None:
    never = await ada.file(None)
    unlinked = await ada.file(None)
    await ada.plane.store.put(unlinked.path, PNG, "image/png")
    operators = await ada.file(None, user_id=None)
    await ada.plane.store.put(operators.path, PNG, "image/png")
    ahead.by = timedelta(hours=23)
    await check_all_files(ada.plane)
    assert await ada.has(never) == (True, False)
    ahead.by = timedelta(hours=25)
    await check_all_files(ada.plane)
    assert await ada.has(never) == (False, False)
    assert await ada.has(unlinked) == (False, False)
    kept = await seen(ada, operators)
    assert await ada.has(kept) == (True, True)
    assert (kept.size, kept.path != operators.path) == (len(PNG), True)


async def test_operators_see_how_many_objects_have_no_row(ada: TenantData) -> None:
    await ada.file()
    for name in ("left.png", "also_left.png"):
        key = output_key(ada.tenant_id, ada.user_id, ada.user_id, name)
        await ada.plane.store.put(key, PNG, "image/png")
    shown = await ada.admin.get(f"{ada.path}/storage", params={"unnamed": True})
    assert shown.json()["unnamed_objects"] == 2
    assert shown.json()["is_complete"] is True

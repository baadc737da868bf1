"""How a folder is listed that may have millions of objects."""

from pathlib import Path

from comfyfleet.clock import utc_now
from comfyfleet.server.storage.local import LISTED_AT_ONCE, LocalStore

MANY = 3 * LISTED_AT_ONCE


def store_in(folder: Path) -> LocalStore:
    return LocalStore(folder, public_url="http://c", secret=b"s" * 32, clock=utc_now)


def filled(folder: Path, count: int) -> list[Path]:
    """As jobs do it: a folder for each."""
    made = [folder / f"objects/tenants/a/{number}/out.png" for number in range(count)]
    for path in made:
        path.parent.mkdir(parents=True)
        path.touch()
    return made


async def test_all_objects_are_listed_however_many_they_are(tmp_path: Path) -> None:
    store, made = store_in(tmp_path), filled(tmp_path, MANY)
    found = [key async for key in store.keys("tenants/a/")]
    assert sorted(found) == sorted(str(each.relative_to(tmp_path / "objects")) for each in made)


async def test_only_so_many_of_a_listing_are_held_at_once(tmp_path: Path) -> None:
    store, made = store_in(tmp_path), filled(tmp_path, MANY)
    found: list[str] = []
    async for key in store.keys("tenants/"):
        if not found:  # what was not read from the disk yet is not there any more
            for path in made:
                path.unlink()
        found.append(key)
    assert len(found) == LISTED_AT_ONCE


async def test_a_link_is_no_object(tmp_path: Path) -> None:
    store = store_in(tmp_path / "store")
    await store.put("tenants/a/one", b"1", "text/plain")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").touch()
    there = tmp_path / "store/objects/tenants/a"
    (there / "folder").symlink_to(tmp_path / "outside")
    (there / "file").symlink_to(tmp_path / "outside/secret")
    assert [each.key async for each in store.listed("tenants/a/")] == ["tenants/a/one"]

"""Inputs that stay in ComfyUI's input folder between jobs."""

from collections.abc import Sequence
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from tests.unit.worker.test_failures import JOB

from comfyfleet.api.values import Asset
from comfyfleet.api.worker import Job
from comfyfleet.comfy.backend import Uploaded
from comfyfleet.worker import input_cache
from comfyfleet.worker.input_cache import InputCache

ADA, BEN = uuid4(), uuid4()


class Backend:
    """ComfyUI's upload route. It stores a second file of the same name under another name."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.uploads: list[str] = []
        self.content = b"x" * 100

    async def upload(self, name: str, subfolder: str) -> Uploaded:
        folder = self.home / "input" / subfolder
        folder.mkdir(parents=True, exist_ok=True)
        self.uploads.append(name)
        if (folder / name).exists():
            name = f"{Path(name).stem} (1){Path(name).suffix}"
        (folder / name).write_bytes(self.content)
        return Uploaded(name, subfolder)

    @property
    def files(self) -> list[Path]:
        return sorted(each for each in (self.home / "input").rglob("*") if each.is_file())


class Setup:
    def __init__(self, folder: Path, **options: int) -> None:
        self.seconds = 0.0
        self.folder, self.options = folder, options
        self.backend = Backend(folder / "comfyui")
        self.file = folder / "asset"
        self.file.write_bytes(self.backend.content)
        self.cache = self.start()

    def start(self, jobs: Sequence[Job] = ()) -> InputCache:
        cache = InputCache(
            self.backend.home,
            self.folder / "state",
            "comfyfleet",
            clock=lambda: self.seconds,
            **self.options,
        )
        cache.open(jobs)
        return cache

    async def use(self, content_hash: str | None, tenant_id: UUID | None = ADA) -> str | None:
        asset = asset_of(content_hash)
        return await self.cache.provide(
            job_of(tenant_id, asset), asset, self.file, ".png", self.backend.upload
        )


def asset_of(content_hash: str | None) -> Asset:
    return Asset(name="photo", filename="photo.png", url="x:", content_hash=content_hash)


def job_of(tenant_id: UUID | None, asset: Asset) -> Job:
    return JOB.model_copy(update={"tenant_id": tenant_id, "assets": (asset,)})


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path, bytes_max=250)


async def test_equal_inputs_of_a_tenant_have_one_name_and_are_uploaded_once(setup: Setup) -> None:
    first, again = await setup.use("a"), await setup.use("a")
    assert first == again
    assert setup.backend.uploads == [first]
    assert setup.cache.value_of(str(first)) == f"{setup.cache.subfolder}/{first}"


async def test_other_tenants_and_workers_have_other_names(setup: Setup, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Setup(tmp_path / "other")
    names = {await setup.use("a"), await setup.use("a", BEN), await other.use("a")}
    assert len(names) == 3
    assert setup.cache.subfolder != other.cache.subfolder
    assert not any(name == "a.png" or str(ADA) in str(name) for name in names)


@pytest.mark.parametrize(("content_hash", "tenant_id"), [(None, ADA), ("a", None)])
async def test_inputs_without_a_hash_or_tenant_are_not_kept(
    setup: Setup, content_hash: str | None, tenant_id: UUID | None
) -> None:
    assert await setup.use(content_hash, tenant_id) is None
    assert setup.backend.files == []


async def test_the_files_used_longest_ago_are_removed_above_the_quota(setup: Setup) -> None:
    names = []
    for content_hash in "abc":
        names.append(str(await setup.use(content_hash)))
        setup.seconds += 1
    await setup.cache.release(names[:1])
    assert [path.name for path in setup.backend.files] == sorted(names[1:])
    await setup.cache.release(names[1:])
    assert len(setup.backend.files) == 2


async def test_a_file_in_use_stays(setup: Setup) -> None:
    names = [str(await setup.use(content_hash)) for content_hash in "abc"]
    setup.seconds += input_cache.UNUSED_SECONDS_MAX + 1
    await setup.cache.shrink()
    assert len(setup.backend.files) == 3
    await setup.use("a")
    await setup.cache.release([names[0]])
    await setup.cache.shrink()
    assert len(setup.backend.files) == 3


async def test_a_file_is_removed_a_day_after_its_last_use(setup: Setup) -> None:
    name = str(await setup.use("a"))
    setup.seconds += 1000
    await setup.cache.release([name])
    setup.seconds += input_cache.UNUSED_SECONDS_MAX
    await setup.cache.shrink()
    assert len(setup.backend.files) == 1
    setup.seconds += 1
    await setup.cache.shrink()
    assert setup.backend.files == []


async def test_a_part_of_a_file_is_replaced(setup: Setup) -> None:
    name = str(await setup.use("a"))
    setup.backend.files[0].write_bytes(b"part")
    assert await setup.use("a") == name
    assert [path.read_bytes() for path in setup.backend.files] == [setup.backend.content]


async def test_a_start_removes_all_files_except_those_of_running_jobs(setup: Setup) -> None:
    kept, _ = str(await setup.use("a")), await setup.use("b")
    job = job_of(ADA, asset_of("a"))
    setup.cache = setup.start([job])
    assert [path.name for path in setup.backend.files] == [kept]
    assert setup.cache.hold(job) == [kept]
    setup.seconds += input_cache.UNUSED_SECONDS_MAX + 1
    await setup.cache.shrink()
    assert len(setup.backend.files) == 1
    await setup.cache.release([kept])
    assert await setup.use("a") == kept
    assert setup.backend.uploads.count(kept) == 1
    setup.cache = setup.start()
    assert setup.backend.files == []


async def test_uploads_that_go_to_another_folder_are_not_kept(setup: Setup, tmp_path: Path) -> None:
    setup.backend.home = tmp_path / "elsewhere"
    assert await setup.use("a") is None
    assert await setup.use("a") is None
    assert len(setup.backend.uploads) == 1


async def test_the_secret_is_readable_by_its_user_only(setup: Setup, tmp_path: Path) -> None:
    secret = tmp_path / "state" / input_cache.SECRET_FILE
    assert secret.stat().st_mode & 0o777 == 0o600
    before = secret.read_bytes()
    setup.start()
    assert secret.read_bytes() == before
    assert len(before) == input_cache.SECRET_BYTES

"""A job's prompt and files on their way to the backend."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
from tests.support.backends.prompts import node
from tests.unit.worker.test_failures import JOB

from comfyfleet.api.values import Asset
from comfyfleet.comfy import Backend, NodeProblem, Submitted, Uploaded
from comfyfleet.errors import PromptRefused
from comfyfleet.worker.heartbeat import HeartbeatLoop
from comfyfleet.worker.job_files import BackendFiles
from comfyfleet.worker.journal import Journal, JournalEntry
from comfyfleet.worker.lease_runner import ActiveLease, LeaseDeps, upload_and_submit


class Picky:
    """A backend whose loader takes nothing but what lies in the folder of inputs itself."""

    def __init__(self) -> None:
        self.uploads: list[Uploaded] = []
        self.taken: list[Mapping[str, Any]] = []

    async def upload(self, path: Path, *, name: str, subfolder: str = "") -> Uploaded:
        self.uploads.append(Uploaded(name, subfolder))
        return self.uploads[-1]

    async def submit(self, prompt: Mapping[str, Any], *, prompt_id: str, **_: Any) -> Submitted:
        given = prompt["1"]["inputs"]["image"]
        if "/" in given:
            kind = "value_not_in_list"
            problem = NodeProblem("1", "", "Odd", kind, "Value not in list", received=given)
            raise PromptRefused("no", problems=(problem,))
        self.taken.append(prompt)
        return Submitted(prompt_id)


class Folder:
    def __init__(self, path: Path) -> None:
        self._path = path

    @asynccontextmanager
    async def hold(self, asset: Asset, renew: object) -> AsyncIterator[Path]:
        yield self._path


class Silent:
    """A heartbeat_loop that nobody listens to."""

    renew = None

    def set_filled_in(self, prompt: object) -> None:
        """Nobody is told."""


async def test_a_loader_that_lists_no_subfolders_gets_a_name_as_hard_to_guess(
    tmp_path: Path,
) -> None:
    given = tmp_path / "given"
    given.write_bytes(b"\x89PNG\r\n\x1a\n")
    asset = Asset(name="input", filename="x.m3u8", url="http://x", binding="1.image")
    job = JOB.model_copy(update={"prompt": {"1": node("Odd", image="")}, "assets": (asset,)})
    picky, journal = Picky(), Journal(tmp_path / "state")
    journal.open()
    backend = cast(Backend, picky)
    async with httpx.AsyncClient() as store:
        deps = LeaseDeps(backend, Folder(given), store, journal, BackendFiles(backend))
        lease = ActiveLease(JournalEntry(job))
        assert (
            await upload_and_submit(lease, cast(HeartbeatLoop, Silent()), deps) == lease.prompt_id
        )
    nested, flat = picky.uploads
    assert (nested.name, nested.subfolder) == ("input.png", lease.folder)
    assert (flat.name, flat.subfolder) == (f"{lease.folder.split('/')[1]}-input.png", "")
    assert picky.taken[0]["1"]["inputs"]["image"] == flat.name

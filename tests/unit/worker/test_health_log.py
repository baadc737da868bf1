"""What the log of a worker's health says is wrong, and where."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from comfyfleet.worker import health as health_module
from comfyfleet.worker.failures import DISK_FULL, BackendCondition, BackendFault
from comfyfleet.worker.health import BackendHealth


async def test_a_full_disk_is_logged_with_its_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unused: Any = None
    health = BackendHealth(
        unused,
        place="http://127.0.0.1:8188",
        folder=tmp_path,
        owned=None,
        on_change=lambda: None,
        on_recovery=unused,
    )
    health.note(DISK_FULL, "No space left on device")
    [record] = caplog.records
    assert record.getMessage() == (
        f"the disk is full ({tmp_path}): taking no jobs until there is space again"
    )


class Answering:
    async def queue_length(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        (DISK_FULL, "the disk with {folder} has enough space again"),
        (
            BackendFault("backend_down", BackendCondition.DOWN),
            "the backend at http://127.0.0.1:8188 works again",
        ),
    ],
)
def test_the_end_of_a_fault_names_what_failed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: BackendFault,
    end: str,
) -> None:
    monkeypatch.setattr(health_module, "FREE_BYTES_MIN", 0)
    monkeypatch.setattr(health_module, "FULL_SECONDS_FIRST", 0.0)

    async def fail_and_recover() -> None:
        is_over, probe = asyncio.Event(), Answering()

        async def on_recovery() -> None:
            is_over.set()

        health = BackendHealth(
            probe,  # type: ignore[arg-type]
            place="http://127.0.0.1:8188",
            folder=tmp_path,
            owned=None,
            on_change=lambda: None,
            on_recovery=on_recovery,
        )
        health.note(fault, "")
        watching = asyncio.create_task(health.watch(lambda: True))
        await is_over.wait()
        await asyncio.sleep(0)
        watching.cancel()

    asyncio.run(fail_and_recover())
    assert caplog.records[-1].getMessage() == end.format(folder=tmp_path)

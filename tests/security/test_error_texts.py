"""Texts of workers and of our own machines: they freeze nobody, and tell customers no secrets."""

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import EffectSetup, effect_setup_on

from comfyfleet import errors
from comfyfleet.server.http.errors import response_to_error
from comfyfleet.server.jobs.user_messages import to_user_message

SECRETS = ("/home", "127.0.0.1", "user:pw", "tiny_a", "sd15_a", "gpu-7", "Traceback")
# Each took from seconds to minutes; a second of processor time is a hundred times what it takes now.
SLOW = {
    "spaces": " " * 60_000 + "a",
    "lines": "\n" * 60_000 + "x",
    "dots": "a." * 30_000,
    "names": "E" * 60_000 + ": x",
    "error": "error" + " " * 60_000 + ":",
    "quotes": '"message"' * 8_000,
    "wide": {"a": [[]] * 100_000},
}


@pytest.fixture
async def effect_setup(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[EffectSetup]:
    async with (
        plane_on(sqlite_databases, tmp_path) as plane,
        effect_setup_on(plane) as effect_setup,
    ):
        yield effect_setup


@contextmanager
def processor_seconds_max(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("name", SLOW)
def test_an_error_text_of_any_shape_is_read_at_once(name: str) -> None:
    error: Any = SLOW[name]
    with processor_seconds_max(1):
        assert to_user_message(error).message


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: secret path /home/bob AKIA1234",
        "http://user:pw@127.0.0.1:8188/prompt?token=abc failed",
        "input ckpt_name: Value not in list; received 'tiny_a.safetensors'; allowed: ['sd15_a.safetensors']",
        'Traceback (most recent call last):\n  File "/home/x.py", line 1\nOSError: gpu-7 is down\n',
    ],
)
async def test_a_customer_reads_no_paths_hosts_models_or_tracebacks(
    effect_setup: EffectSetup, error: str
) -> None:
    ada = await effect_setup.customer()
    job_id = await ada.job(effect_setup.draw)
    await effect_setup.fail(error)
    found = await ada.client.get(f"/api/ai-jobs/{job_id}")
    assert not [each for each in SECRETS if each in found.text], found.text
    seen = await effect_setup.fleet_setup.admin.get(
        f"/api/admin/jobs/{job_id}", params={"tenant_id": str(ada.tenant_id)}
    )
    assert seen.json()["raw_error"] == error


async def test_why_names_no_worker_and_no_fleet(effect_setup: EffectSetup) -> None:
    ada = await effect_setup.customer()
    job_id = await ada.job(effect_setup.draw)
    waits = (await ada.get(f"ai-jobs/{job_id}/why"))["why"]
    async with effect_setup.fleet_setup.worker("gpu-7") as worker:
        await worker.job()
        runs = (await ada.get(f"ai-jobs/{job_id}/why"))["why"]
    assert waits == "No worker can run the job at the moment. It waits until one can."
    assert runs == "The job is being prepared."


@pytest.mark.parametrize(
    "error",
    [
        errors.Unavailable("Connect call failed ('127.0.0.1', 21432)"),
        errors.ServerUnavailable("http://127.0.0.1:8188 did not answer", url="http://127.0.0.1"),
    ],
)
def test_only_operators_are_told_which_machine_is_down(error: errors.FleetError) -> None:
    assert b"127.0.0.1" not in response_to_error(error, "/api/ai-jobs").body
    assert b"127.0.0.1" in response_to_error(error, "/api/admin/jobs").body

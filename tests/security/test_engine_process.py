"""The built-in engine under `up` and `run`: a process of its own, with a key and a memory limit."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import psutil
import pytest

from comfyfleet.cli.engine import start_engine_process

MEMORY = 512 * 1024**2
SECONDS_MAX = 60
SECRETS = {
    "COMFYFLEET_ADMIN_KEY": "secret",
    "COMFYFLEET_CENTRAL_DATABASE_URL": "secret",
    "COMFY_CLOUD_API_KEY": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    environ = {**os.environ, "COMFYFLEET_ENGINE_MEMORY_BYTES": str(MEMORY), **SECRETS}
    with start_engine_process(environ, tmp_path_factory.mktemp("engine")) as url:
        yield url


def without_key(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{parts.hostname}:{parts.port}"))


def engines(of: psutil.Process | None = None) -> list[psutil.Process]:
    children = (of or psutil.Process()).children(recursive=True)
    return [each for each in children if "comfyfleet.engine.child" in " ".join(each.cmdline())]


def until(found: Any) -> Any:
    """What is asked for, as soon as there is any."""
    deadline = time.monotonic() + SECONDS_MAX
    while not (answer := found()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer


def test_it_is_told_no_secret_but_its_own_key(url: str) -> None:
    assert get(url, "/system_stats").is_success
    told = [each.environ() for each in engines()]
    assert all("COMFYFLEET_ENGINE_KEY" in each for each in told)
    assert not any(SECRETS.keys() & each.keys() for each in told)
    assert {each["COMFYFLEET_ENGINE_MEMORY_BYTES"] for each in told} == {str(MEMORY)}


def get(url: str, path: str, **options: Any) -> httpx.Response:
    return httpx.get(f"{url}{path}", timeout=SECONDS_MAX, **options)


def outcome(url: str, prompt: dict[str, Any]) -> dict[str, Any]:
    sent = httpx.post(f"{url}/prompt", json={"prompt": prompt}, timeout=SECONDS_MAX)
    assert sent.status_code == 200, sent.text
    prompt_id = sent.json()["prompt_id"]
    found: dict[str, Any] = until(lambda: get(url, f"/history/{prompt_id}").json().get(prompt_id))
    return found


def test_nobody_is_let_in_without_the_key(url: str) -> None:
    bare = without_key(url)
    assert get(bare, "/history").status_code == 401
    assert get(bare, "/history", auth=("engine", "guess")).status_code == 401
    assert get(url, "/history").status_code == 200


def test_a_name_that_was_bound_to_this_machine_is_refused(url: str) -> None:
    port = urlsplit(url).port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example"):
        assert get(url, "/history", headers={"Host": host}).status_code == 403
    assert get(url, "/history", headers={"Host": f"localhost:{port}"}).status_code == 200
    assert get(url, "/history", headers={"Origin": "null"}).status_code == 403


def test_a_prompt_that_wants_too_much_memory_fails_and_the_engine_lives(url: str) -> None:
    size = {"width": 3000, "height": 3000, "batch_size": 1, "color": 0}
    drawn = {"class_type": "EmptyImage", "inputs": size}
    repeated = {"class_type": "RepeatImageBatch", "inputs": {"image": ["1", 0], "amount": 64}}
    shown = {"class_type": "PreviewImage", "inputs": {"images": ["2", 0]}}
    (before,) = engines()
    found = outcome(url, {"1": drawn, "2": repeated, "3": shown})
    assert found["status"]["status_str"] == "error"
    assert engines() == [before]
    rss = before.memory_info().rss
    assert rss < MEMORY + 300 * 1024**2


def test_the_limit_is_that_of_the_system(url: str) -> None:
    (engine,) = engines()
    soft, _ = engine.rlimit(psutil.RLIMIT_DATA)
    assert MEMORY < soft < MEMORY + 2 * 1024**3


def test_an_engine_that_was_killed_is_started_again_at_the_same_place(url: str) -> None:
    (engine,) = engines()
    engine.send_signal(signal.SIGKILL)
    engine.wait(SECONDS_MAX)
    assert get(url, "/history").status_code == 200
    (after,) = engines()
    assert after.pid != engine.pid


def test_it_does_not_outlive_who_started_it_however_that_one_ends(tmp_path: Path) -> None:
    program = """
        import os, sys, time
        from comfyfleet.cli.engine import start_engine_process
        with start_engine_process(os.environ) as url:
            print(url, flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        (engine,) = until(lambda: engines(psutil.Process(parent.pid)))
        assert get(url, "/history").status_code == 200
        parent.kill()
    engine.wait(SECONDS_MAX)
    assert not engine.is_running()

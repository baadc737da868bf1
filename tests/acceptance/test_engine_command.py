"""`comfyfleet engine` as a process of its own."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

COMFYFLEET = Path(sys.executable).parent / "comfyfleet"
STOP_SECONDS_MAX = 15


@contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command: list[str | Path] = [COMFYFLEET, "engine", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+:\d+", process.stdout.readline())
        assert found, process.communicate(timeout=STOP_SECONDS_MAX)
        yield process, found[0]
    finally:
        process.kill()
        process.communicate(timeout=STOP_SECONDS_MAX)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_its_url_runs_a_prompt_and_stops_in_order(
    tmp_path: Path, number: signal.Signals
) -> None:
    with started("--data", str(tmp_path)) as (process, url):
        prompt = {
            "9": {
                "class_type": "ComfyfleetSteps",
                "inputs": {"steps": 1000, "step_ms": 1000, "previews": False},
            }
        }
        assert httpx.post(f"{url}/prompt", json={"prompt": prompt}).status_code == 200
        process.send_signal(number)
        output, errors = process.communicate(timeout=STOP_SECONDS_MAX)
    assert (process.returncode, errors) == (0, "")
    assert output.endswith("Stopped\n")
    assert {path.name for path in tmp_path.iterdir()} == {"input", "output", "temp"}


def test_without_a_folder_nothing_stays() -> None:
    with started() as (process, url):
        assert httpx.get(f"{url}/prompt").status_code == 200
        assert process.stdout is not None
        folder = re.search(r"Files in (\S+)", process.stdout.readline())
        assert folder
        assert Path(folder[1]).is_dir()
        process.terminate()
        process.communicate(timeout=STOP_SECONDS_MAX)
    assert not Path(folder[1]).exists()


def test_a_port_that_is_taken_is_said_with_what_to_do() -> None:
    with started() as (_, url):
        command: list[str | Path] = [COMFYFLEET, "engine", "--port", url.rpartition(":")[2]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=STOP_SECONDS_MAX)
    assert done.returncode == 1
    assert "can't listen on" in done.stderr
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]

"""`bench/gpu.py`: what it refuses to start with, how it counts, and that it runs on the engine."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "either --comfyui FOLDER or --engine"),
        (("--engine", "--comfyui", "."), "either --comfyui FOLDER or --engine"),
        (("--comfyui", "nowhere"), "there is no main.py in it"),
        (("--engine", "--jobs", "0"), "--jobs must be 1 to 5000"),
        (("--engine", "--per-gpu", "99"), "--per-gpu must be 1 to 16"),
        (("--engine", "--scenarios", "queue,all"), "there is no scenario 'all'"),
    ],
)
def test_what_can_not_work_is_told_before_anything_is_started(
    gpu: Any, arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(arguments) == 2
    assert problem in capsys.readouterr().err


def test_two_checkpoints_are_needed_that_the_comfyui_has(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "main.py").touch()
    where = ("--comfyui", str(tmp_path))
    assert gpu.main((*where, "--checkpoints", "a", "a")) == 2
    assert "two or more" in capsys.readouterr().err


def test_a_comfyui_that_does_not_come_up_is_told_with_the_end_of_its_log(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "main.py").write_text("raise SystemExit('no CUDA')")
    where = ("--comfyui", str(tmp_path), "--folder", str(tmp_path / "logs"))
    assert gpu.main((*where, "--checkpoints", "a", "b")) == 2
    told = capsys.readouterr().err
    assert "no CUDA" in told
    assert "did not come up" in told


def test_switches_and_gaps_are_counted_server_by_server(gpu: Any) -> None:
    def spans(models: str, gap: float) -> list[Any]:
        return [
            gpu.Span(model, 10 + n * (1 + gap), 11 + n * (1 + gap), True)
            for n, model in enumerate(models)
        ]

    with gpu.GpuMeter(0) as meter:
        found = gpu.scenario_result([spans("aabb", 0.25), spans("aaaa", 0.25)], 8, meter)
    assert (found.runs, found.failed, found.switches) == (8, 0, 3)
    assert (found.seconds, found.gap_ms_median, found.run_seconds_after_switch) == (4.75, 250, 1)
    fleet, queue = (replace(found, seconds=each, switches=int(each)) for each in (2.0, 4.0))
    told = gpu.ratios({"queue": queue, "fleet": fleet})
    assert told == {"time fleet / queue": 0.5, "switches fleet / queue": 0.5}


@pytest.mark.slow
def test_it_runs_all_scenarios_on_the_engine(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    options = ("--engine", "--per-gpu", "2", "--jobs", "6", "--steps", "1", "--json", str(told))
    subprocess.run(
        [sys.executable, BENCH / "gpu.py", *options, "--folder", tmp_path / "work"],
        cwd=tmp_path,
        check=True,
        timeout=300,
    )
    whole = json.loads(told.read_text())
    assert list(whole["scenarios"]) == ["queue", "fleet", "queues", "fleets"]
    assert all(each["runs"] >= 6 for each in whole["scenarios"].values())
    assert len(whole["ratios"]) == 4

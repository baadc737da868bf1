"""Benches: what they judge by, what they need, and that they leave nothing behind."""

import importlib.util
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
BENCHMARKS = sorted(
    path.stem for path in BENCH.glob("*.py") if '"__main__"' in path.read_text(encoding="utf-8")
)
QUICK_SECONDS_MAX = 300  # for a busy machine; they take at most 20 s on a quiet one
# One part of graphs.py, which runs it in processes of its own with arguments.
PARTS = ("graph_fan_out",)

# Two of its modules can't be found, as without the extra.
WITHOUT_PEERS = """
import runpy, sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name in ("pgqueuer", "procrastinate"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nowhere())
sys.path.insert(0, sys.argv[1])
runpy.run_path(sys.argv[1] + "/queue.py", run_name="__main__")
"""

WAITS = """
import sys, time
sys.path.insert(0, sys.argv[1])
from support import exit_on_sigterm
exit_on_sigterm()
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    print("cleaned up", flush=True)
"""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    return bench_of("graphs", monkeypatch)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Any:
    return bench_of("web", monkeypatch)


def bench_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """By its file: other modules have the same name."""
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def figures(*, jobs: int, start: float, peak_mb: float, first: float = 2.0) -> dict[str, float]:
    steps = {"first": first, "last": first, "end": first}
    return {
        "jobs": jobs,
        "start": start,
        "total": start + jobs * first,
        "peak_mb": peak_mb,
        **steps,
    }


@pytest.mark.parametrize(("peak_mb", "is_well"), [(200, True), (400, False)])
def test_a_whole_fan_out_is_judged_by_its_memory_too(
    graphs: Any, monkeypatch: pytest.MonkeyPatch, peak_mb: float, is_well: bool
) -> None:
    found = {
        100: figures(jobs=100, start=50, peak_mb=100),
        1_000: figures(jobs=1_000, start=500, peak_mb=110),
        10_000: figures(jobs=10_000, start=5_000, peak_mb=peak_mb),
    }
    monkeypatch.setattr(graphs, "fan_out_of", found.__getitem__)
    monkeypatch.setattr(sys, "argv", ["graphs.py", "fanout"])
    assert graphs.fanout() is is_well


@pytest.mark.parametrize(("times_count", "status"), [(True, 1), (False, 0)])
def test_quickly_pages_are_not_judged_by_their_times(
    web: Any, times_count: bool, status: int
) -> None:
    slow = web.Verdict("usable", 2_000, 1_000, is_time=True)
    small = web.Verdict("script", 80, 100)
    assert web.judge([slow, small], times_count=times_count) == status
    large = web.Verdict("script", 120, 100)
    assert web.judge([small, large], times_count=False) == 1
    assert web.judge([web.Verdict("frames", 51, 50, is_at_least=True)], times_count=True) == 0


@pytest.mark.parametrize(
    ("options", "is_met", "status"),
    [
        ((), True, 0),
        ((), False, 0),
        (("--check",), True, 0),
        (("--check",), False, 1),
        (("--check", "--quick"), False, 0),
    ],
)
def test_a_missed_aim_fails_a_benchmark_only_with_check(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], is_met: bool, status: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["any.py", *options])
    assert bench_of("support", monkeypatch).exit_status(is_met=is_met) == status


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name not in PARTS])
def test_each_benchmark_runs_with_the_smallest_load(name: str, tmp_path: Path) -> None:
    if name == "web" and not shutil.which("chromium"):
        pytest.skip("there is no browser")
    command = [sys.executable, str(BENCH / f"{name}.py"), "--quick"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=QUICK_SECONDS_MAX
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout + ended.stderr


def test_make_bench_runs_every_benchmark_that_needs_no_gpu() -> None:
    makefile = (BENCH.parent / "Makefile").read_text(encoding="utf-8")
    listed = re.findall(r"bench/(\w+)\.py", makefile)
    assert sorted(listed) == [name for name in BENCHMARKS if name not in ("gpu", *PARTS)]


def test_without_the_other_queues_the_extra_that_has_them_is_named() -> None:
    command = [sys.executable, "-c", WITHOUT_PEERS, str(BENCH)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "pip install -e '.[bench]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_bench_that_is_told_to_end_cleans_up() -> None:
    command = [sys.executable, "-c", WAITS, str(BENCH)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout
        assert bench.stdout.readline() == "ready\n"
        bench.terminate()
        assert bench.stdout.read() == "cleaned up\n"
    assert bench.returncode == 128 + signal.SIGTERM

"""The gate: only real load may be forgiven, and only once."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"

PASSES = "def test_passes(): pass\n"
SKIPPED = "import pytest\n\ndef test_skipped(): pytest.skip('no reason')\n"
FAILS = "def test_fails(): assert False\n"
# Fails in its first run only.
FLAKY = """
from pathlib import Path

def test_flaky():
    mark = Path(__file__).with_suffix(".ran")
    if not mark.exists():
        mark.touch()
        assert False
"""
FAILS_THEN_SKIPS = """
from pathlib import Path
import pytest

def test_fails_then_skips():
    mark = Path(__file__).with_suffix(".ran")
    if mark.exists():
        pytest.skip("no browser")
    mark.touch()
    assert False
"""
BREAKS_OFF = """
import os

def test_breaks_off(): os._exit(3)
def test_after(): pass
"""
# Its measurement is above the limit in the first attempt, or in all.
CONFTEST_OF_STALLS = (Path(__file__).parents[1] / "security/stalls/conftest.py").read_text()
STALLS = """
from tests.support.server.loop_stalls import StallRecord

VALUES = {values}

def test_stalls():
    StallRecord.current.add("GET /quick", 20.0)
    StallRecord.current.add("GET /slow", VALUES.pop(0))
"""
STALLS_THEN_FAILS = """
from pathlib import Path
from tests.support.server.loop_stalls import StallRecord

def test_fails_beside_a_stall():
    Path(__file__).with_suffix(".ran").open("a").write("x")
    StallRecord.current.add("GET /slow", 150.0)
    assert False
"""
# An internal error of pytest, after the first failed test.
CONFTEST_THAT_BREAKS = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if item.name == "test_passes" and call.when == "call":
        raise RuntimeError("a plugin breaks")
    return report
"""


@pytest.fixture
def run_tests(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("run_tests", TOOLS / "run_tests.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gate(run_tests: Any, tmp_path: Path) -> Any:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return run_tests.Gate(tmp_path)


def write(folder: Path, **sources: str) -> None:
    for name, source in sources.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def passes(gate: Any, *arguments: str) -> bool:
    """Without the plugins of this run, whose options a nested pytest would not know."""
    is_green: bool = gate.passes("tests", ["-p", "no:cacheprovider", *arguments], [])
    return is_green


def test_a_test_that_passes_in_its_second_run_is_forgiven_and_listed(
    gate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, test_a=PASSES, test_b=FLAKY, test_c=SKIPPED)
    assert passes(gate)
    gate.report()
    assert capsys.readouterr().out.endswith("  test_b.py::test_flaky\n")
    assert "1 passed, 1 failed, 1 skipped of 3" in gate.lines[0]


def test_several_processes_are_counted_like_one(gate: Any, tmp_path: Path) -> None:
    write(tmp_path, test_a=PASSES, test_b=FLAKY, test_c=SKIPPED)
    assert passes(gate, "-n", "2")
    assert "1 passed, 1 failed, 1 skipped of 3" in gate.lines[0]
    assert gate.needed_rerun == ["test_b.py::test_flaky"]


def test_a_test_that_fails_twice_fails_the_gate(gate: Any, tmp_path: Path) -> None:
    write(tmp_path, test_a=PASSES, test_b=FAILS)
    assert not passes(gate)
    assert "test_b.py::test_fails failed twice" in gate.lines[0]


def test_a_failed_test_that_is_skipped_in_its_second_run_fails_the_gate(
    gate: Any, tmp_path: Path
) -> None:
    write(tmp_path, test_a=PASSES, test_b=FAILS_THEN_SKIPS)
    assert not passes(gate)
    assert "skipped in the second run" in gate.lines[0]
    assert gate.needed_rerun == []


@pytest.mark.parametrize(
    "folder",
    ["unit", "contract/queue", "contract/jobs", "contract/graphs", "contract/pipelines"],
)
def test_tests_that_look_for_races_get_no_second_run(
    gate: Any, tmp_path: Path, folder: str
) -> None:
    write(tmp_path / "tests" / folder, test_a=FLAKY)
    assert not passes(gate)
    assert "never run again" in gate.lines[0]


def test_more_than_five_failed_tests_are_not_load(gate: Any, tmp_path: Path) -> None:
    write(tmp_path, **{f"test_{number}": FLAKY for number in range(6)})
    assert not passes(gate)
    assert "6 tests failed" in gate.lines[0]


def test_five_are(gate: Any, tmp_path: Path) -> None:
    write(tmp_path, **{f"test_{number}": FLAKY for number in range(5)})
    assert passes(gate)
    assert len(gate.needed_rerun) == 5


@pytest.fixture
def stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(TOOLS.parent))
    write(tmp_path / "stalls", conftest=CONFTEST_OF_STALLS)
    return tmp_path / "stalls"


@pytest.mark.parametrize("values", ["[150.0, 50.0]", "[250.4, 120.0, 99.0]"])
def test_a_stall_above_the_limit_is_measured_up_to_three_times_and_listed(
    gate: Any, stalls: Path, capsys: pytest.CaptureFixture[str], values: str
) -> None:
    write(stalls, test_a=STALLS.format(values=values), test_b=PASSES)
    write(stalls.parent, test_c=PASSES)
    assert passes(gate)
    gate.report()
    assert "3 passed, 0 failed, 0 skipped of 3" in gate.lines[0]
    shown = {"[150.0, 50.0]": "150, 50", "[250.4, 120.0, 99.0]": "250, 120, 99"}[values]
    assert capsys.readouterr().out.endswith(
        "Measured again, because the first measurement was above the limit:\n"
        f"  stalls/test_a.py::test_stalls: GET /slow {shown} ms\n"
    )


def test_several_processes_list_what_was_measured_again(gate: Any, stalls: Path) -> None:
    write(stalls, test_a=STALLS.format(values="[150.0, 50.0]"), test_b=PASSES)
    assert passes(gate, "-n", "2")
    assert gate.measured_again == {"stalls/test_a.py::test_stalls": "GET /slow 150, 50 ms"}


def test_a_stall_above_the_limit_in_three_attempts_fails(
    gate: Any, stalls: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(stalls, test_a=STALLS.format(values="[150.0, 120.0, 100.0, 50.0]"))
    assert not passes(gate)
    assert "1 failed" in gate.lines[0]
    assert "didn't turn for 100 ms or more: GET /slow 150, 120, 100 ms" in capfd.readouterr().out


def test_a_test_that_fails_for_another_reason_is_not_measured_again(
    gate: Any, stalls: Path
) -> None:
    write(stalls, test_a=STALLS_THEN_FAILS)
    assert not passes(gate)
    assert (stalls / "test_a.ran").read_text() == "xx", "once, and once more by the gate"


@pytest.mark.parametrize("sources", [{"test_b": BREAKS_OFF}, {"conftest": CONFTEST_THAT_BREAKS}])
def test_a_run_that_breaks_off_after_a_flaky_test_fails_the_gate(
    gate: Any, tmp_path: Path, sources: dict[str, str]
) -> None:
    write(tmp_path, test_a=FLAKY, test_c=PASSES, test_d=FAILS, **sources)
    assert not passes(gate)
    assert gate.needed_rerun == []


def test_a_test_without_an_outcome_fails_the_gate(run_tests: Any) -> None:
    run = run_tests.Run(0, frozenset({"a", "b"}), {"a": "passed"})
    assert run_tests.problem_of(run) == "1 tests have no outcome, among them b"


def test_nothing_collected_fails_the_gate(gate: Any, tmp_path: Path) -> None:
    write(tmp_path, test_a="")
    assert not passes(gate)


def test_a_file_that_cannot_be_imported_fails_the_gate(gate: Any, tmp_path: Path) -> None:
    write(tmp_path, test_a=FLAKY, test_b="import nowhere_to_be_found\n")
    assert not passes(gate)
    assert "exit status 2" in gate.lines[0]

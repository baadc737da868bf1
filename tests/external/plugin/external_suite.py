"""A pytest plugin that runs in another project's test process.

It connects the suite's server fixtures to our servers, limits each test's time and writes a report. The interpreter is
the other project's, so this file imports only pytest and the standard library.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

CONFIG = json.loads(os.environ["EXTERNAL_SUITE"])
TEXT_CHARACTERS_MAX = 4000
STOP_SECONDS_MAX = 60.0
# From the best outcome of a phase to the worst: the worst is the outcome of the test.
OUTCOMES = ("passed", "skipped", "failed", "error")


class ServerProcess:
    """Stands for the process of a ComfyUI that a fixture starts. It returns when the servers respond."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.args = arguments
        self._process = RealPopen(
            [*CONFIG["launcher"], *arguments],
            cwd=CONFIG["launcher_folder"],
            env=CONFIG["launcher_environ"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("the servers did not start; their logs are beside the report")

    def kill(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(STOP_SECONDS_MAX)

    terminate = kill

    def poll(self) -> "int | None":
        return self._process.poll()

    def wait(self, timeout: "float | None" = None) -> int:
        return self._process.wait(timeout)


RealPopen = subprocess.Popen


class _Popen(RealPopen):  # type: ignore[type-arg]
    def __new__(cls, args: Any, *rest: Any, **options: Any) -> Any:
        is_comfyui = isinstance(args, list) and args[1:2] == ["main.py"]
        return (
            ServerProcess([str(word) for word in args[2:]]) if is_comfyui else super().__new__(cls)
        )


class Report:
    def __init__(self) -> None:
        self.collected: list[str] = []
        self.tests: dict[str, dict[str, Any]] = {}

    def add(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(
            report.nodeid, {"outcome": "passed", "seconds": 0.0, "text": "", "values": {}}
        )
        is_error = report.outcome == "failed" and report.when != "call"
        outcome = "error" if is_error else report.outcome
        if OUTCOMES.index(outcome) > OUTCOMES.index(test["outcome"]):
            test["outcome"] = outcome
            test["text"] = report.longreprtext[-TEXT_CHARACTERS_MAX:]
        if report.when == "call":
            test["seconds"] = report.duration
            test["values"] = dict(report.user_properties)

    def write(self) -> None:
        with open(CONFIG["report"], "w", encoding="utf-8") as file:
            json.dump({"collected": self.collected, "tests": self.tests}, file)


REPORT = Report()


def pytest_configure() -> None:
    subprocess.Popen = _Popen  # type: ignore[misc]


def pytest_unconfigure() -> None:
    subprocess.Popen = RealPopen  # type: ignore[misc]


def pytest_collection_finish(session: pytest.Session) -> None:
    REPORT.collected = [item.nodeid for item in session.items]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    REPORT.add(report)


def pytest_sessionfinish() -> None:
    REPORT.write()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Any:
    """Replaces the fixture that installs and starts a server by the address of a running one."""
    if fixturedef.argname != CONFIG["address_fixture"]:
        return None
    server = SimpleNamespace(url=CONFIG["url"])
    fixturedef.cached_result = (server, fixturedef.cache_key(request), None)
    return server


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Interrupts a test that waits for a message that never comes."""

    def stop(number: int, frame: "FrameType | None") -> None:
        raise TimeoutError(f"the test took more than {CONFIG['seconds_max']} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, CONFIG["seconds_max"])
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

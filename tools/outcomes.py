"""A pytest plugin that writes the collected tests and their outcomes to the file named by OUTCOMES.

The gate in run_tests.py compares the two, because an aborted run leaves tests without an outcome. A
test that was measured again within the run has only the outcome of its last attempt.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
# The report property with the values of a test whose first measurement was above its limit.
MEASURED_AGAIN = "measured again"


class Outcomes:
    """Collects node ids and outcomes in the process that prints the report."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._collected: set[str] = set()
        self._outcomes: dict[str, str] = {}
        self._measured_again: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._outcomes.get(report.nodeid)
        if report.failed:
            self._outcomes[report.nodeid] = FAILED
        elif report.skipped and before is None:
            self._outcomes[report.nodeid] = SKIPPED
        elif report.when == "call" and before is None:
            self._outcomes[report.nodeid] = PASSED
        for name, value in report.user_properties:
            if name == MEASURED_AGAIN:
                self._measured_again[report.nodeid] = str(value)

    def pytest_sessionfinish(self) -> None:
        record = {
            "collected": sorted(self._collected),
            "outcomes": self._outcomes,
            "measured_again": self._measured_again,
        }
        self._path.write_text(json.dumps(record), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    # The worker processes of pytest-xdist report to the main process, which collects the outcomes.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(os.environ["OUTCOMES"])))

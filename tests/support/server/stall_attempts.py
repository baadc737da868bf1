"""Runs a test up to three times if it fails only because loop stalls exceeded the limit.

The test has one outcome, that of its last attempt. It passes if each of its measurements was below the limit in at
least one attempt. Any other failure is final.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from _pytest.runner import runtestprotocol
from tests.support.server.loop_stalls import ATTEMPTS_MAX, StallRecord

RECORD = pytest.StashKey[StallRecord]()
# The gate lists the values of this property of a report at its end.
MEASURED_AGAIN = "measured again"


def run_with_attempts(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Replaces pytest's own protocol for one test."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    record = item.stash[RECORD] = StallRecord()
    for attempt in range(1, ATTEMPTS_MAX + 1):
        record.start_attempt()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if attempt == ATTEMPTS_MAX or not record.is_stalled or _fails_otherwise(reports):
            break
    for report in reports:
        if above_limit := record.above_limit():
            report.user_properties.append((MEASURED_AGAIN, above_limit))
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _fails_otherwise(reports: list[pytest.TestReport]) -> bool:
    return any(report.failed and report.when != "call" for report in reports)


@contextmanager
def measured(item: pytest.Item) -> Iterator[None]:
    """Collects the measurements of a test, and checks them once the test itself has passed."""
    record = StallRecord.current = item.stash[RECORD]
    try:
        yield
        record.check()
    finally:
        StallRecord.current = None

"""The tests of this folder measure CPU time: they run alone, and those above the limit are measured again."""

from collections.abc import Generator
from pathlib import Path

import pytest
from tests.support.server.stall_attempts import measured, run_with_attempts

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not item.path.is_relative_to(HERE):
        return None
    run_with_attempts(item, nextitem)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with measured(item):
        return (yield)

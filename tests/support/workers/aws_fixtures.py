"""Pytest fixtures for the simulator. They import boto3 inside, because it is slow to load."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.workers.aws import Aws


@pytest.fixture(scope="session")
def aws_url() -> Iterator[str]:
    from tests.support.workers.aws import simulated_aws

    with simulated_aws() as url:
        yield url


@pytest.fixture
def aws(aws_url: str, monkeypatch: pytest.MonkeyPatch) -> "Aws":
    """An empty simulator that all AWS clients of this process use."""
    from tests.support.workers.aws import Aws, aws_variables

    for name, value in aws_variables(aws_url).items():
        monkeypatch.setenv(name, value)
    return Aws(aws_url)

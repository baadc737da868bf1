"""Settings that are read from the environment."""

import pytest

from comfyfleet.errors import InvalidInput
from comfyfleet.settings import read_settings


def test_zero_keeps_for_ever_where_that_is_told() -> None:
    assert read_settings({"COMFYFLEET_AUDIT_KEEP_DAYS": "0"}).audit_keep_days == 0


def test_elsewhere_zero_is_refused() -> None:
    with pytest.raises(InvalidInput, match="above zero"):
        read_settings({"COMFYFLEET_LEASE_SECONDS": "0"})

"""Which errors of a driver mean that its connection was lost."""

from types import CodeType

import asyncpg
import pytest

from comfyfleet.errors import Unavailable
from comfyfleet.server.db.errors import is_caused_by_disconnect
from comfyfleet.server.db.outages import as_unavailable

# asyncpg asks its protocol for the time limit, also after the connection was cut off.
CALL: CodeType = compile("protocol._get_timeout(None)", "connection.py", "eval")


def error_in(module: str, protocol: object) -> AttributeError:
    """Returns the error of a call that this module makes."""
    with pytest.raises(AttributeError) as caught:
        eval(CALL, {"__name__": module, "protocol": protocol})  # noqa: S307
    return caught.value


def test_a_driver_that_was_cut_off_in_a_call_has_lost_its_connection() -> None:
    error = error_in("asyncpg.connection", None)
    assert is_caused_by_disconnect(error)
    assert isinstance(as_unavailable(error), Unavailable)


@pytest.mark.parametrize(
    ("module", "protocol"), [("comfyfleet.server.queue", None), ("asyncpg.connection", object())]
)
def test_another_missing_attribute_is_a_bug(module: str, protocol: object) -> None:
    assert as_unavailable(error_in(module, protocol)) is None


def test_a_group_is_an_outage_only_if_all_its_errors_are() -> None:
    lost = asyncpg.ConnectionDoesNotExistError("lost")
    assert as_unavailable(ExceptionGroup("relays", [lost, lost])) is not None
    assert as_unavailable(ExceptionGroup("relays", [lost, ValueError("bug")])) is None

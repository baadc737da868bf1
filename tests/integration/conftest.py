"""One control plane that the tests of `comfyfleet admin` share."""

from collections.abc import Iterator

import pytest
from tests.support.server.command_process import started
from tests.support.server.commands import NEGATIVE, Admin

KEY = r"export COMFYFLEET_URL=(\S+) COMFYFLEET_KEY=(\w{64})"


@pytest.fixture(scope="session")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    """It has no worker, and the workflow `negative`."""
    with started("up", "--port", "0", "--no-worker", folder=tmp_path_factory.mktemp("up")) as up:
        found = up.wait_for_line(KEY)
        admin = Admin(url=found[1], key=found[2])
        property_ = ("--property", "width:integer=2.width")
        registered = admin("workflows", "register", "negative", NEGATIVE, *property_)
        assert registered.code == 0, registered.err
        yield admin

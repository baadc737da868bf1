"""Rules that map an identity provider's claims to tenants and roles."""

import os
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on

from comfyfleet.clock import utc_now
from comfyfleet.errors import InvalidInput
from comfyfleet.server.app import open_control_plane
from comfyfleet.server.tenants.identities import rules_from
from comfyfleet.settings import Settings


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (Settings(oidc_tenants="hd:x=notauuid"), "'notauuid' must be the id of a tenant"),
        (Settings(oidc_roles="hd:x=boss"), "'boss' must be one of viewer, operator, owner"),
    ],
)
def test_a_rule_that_can_never_hold_names_what_is_expected(settings: Settings, wanted: str) -> None:
    with pytest.raises(InvalidInput, match=wanted) as refused:
        rules_from(settings)
    assert "=claim:value=" in refused.value.details["hint"]


async def test_a_wrong_rule_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    settings = Settings(oidc_roles="hd:x=boss")
    with pytest.raises(InvalidInput, match="COMFYFLEET_OIDC_ROLES"):
        async with open_control_plane(settings, tmp_path, utc_now):
            pass
    assert os.listdir(tmp_path) == []


async def test_a_rule_for_an_unknown_tenant_is_logged(
    databases: Databases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = "11111111-1111-1111-1111-111111111111"
    async with plane_on(databases, tmp_path, oidc_tenants=f"groups:studio={unknown}"):
        pass
    assert f"names tenant {unknown}, which doesn't exist" in caplog.text

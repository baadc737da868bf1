"""Rules that map an identity provider's claims to tenants and roles."""

import pytest

from comfyfleet.errors import InvalidInput
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

"""No table of a tenant is forgotten when the tenant is erased."""

from comfyfleet.server.db.tenant_tables import tenant_metadata
from comfyfleet.server.maintenance.store import GO_ALONG, KEPT, PRIVATE


def test_every_table_of_a_pool_is_emptied_or_kept_on_purpose() -> None:
    assert set(tenant_metadata.tables) == {*PRIVATE, *KEPT, *GO_ALONG}
    assert not KEPT & PRIVATE.keys()

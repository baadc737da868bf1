"""Changes of tenants by operators, each in one transaction with its audit entry."""

from datetime import datetime
from uuid import UUID

from comfyfleet.server.db import Database
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.server.tenants import service
from comfyfleet.server.tenants.model import Tenant


async def show_backends(
    central: Database, tenant_id: UUID, *, show: bool | None, operator: str, now: datetime
) -> Tenant:
    async with central.transaction() as tx:
        tenant = await service.set_show_backends(tx, tenant_id, show)
        details = {"show_backends": show}
        await record_audit(tx, operator, "show_backends", tenant.subject, now, tenant.id, **details)
    return tenant

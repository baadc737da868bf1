"""The audit log, on every database."""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

from comfyfleet.server.db import Database, Tx
from comfyfleet.server.notifications import service as notifications

NOW = datetime(2026, 11, 15, 8, 30, tzinfo=UTC)


async def record_some(tx: Tx, count: int, *, action: str = "lease") -> None:
    for number in range(count):
        at = NOW + timedelta(seconds=number)
        await notifications.record_audit(tx, "sweep", action, f"dispatch:{number}", at)


async def test_what_was_recorded_is_found_as_it_was(central: Database) -> None:
    tenant_id = uuid4()
    async with central.transaction() as tx:
        await notifications.record_audit(
            tx,
            "worker:gpu-7",
            "complete",
            "dispatch:12",
            NOW,
            tenant_id,
            seconds=1.5,
            outputs=["a.png"],
        )
        (entry,) = await notifications.find_audit_entries(tx, limit=10)
    assert (entry.at, entry.actor, entry.action) == (NOW, "worker:gpu-7", "complete")
    assert (entry.subject, entry.tenant_id) == ("dispatch:12", tenant_id)
    assert entry.details == {"seconds": 1.5, "outputs": ["a.png"]}


async def test_the_newest_come_first_and_the_next_page_follows(central: Database) -> None:
    async with central.transaction() as tx:
        await record_some(tx, 5)
        first = await notifications.find_audit_entries(tx, limit=2)
        second = await notifications.find_audit_entries(tx, limit=9, before_id=first[-1].id)
    assert [entry.subject for entry in first] == ["dispatch:4", "dispatch:3"]
    assert [entry.subject for entry in second] == ["dispatch:2", "dispatch:1", "dispatch:0"]


async def test_only_what_is_asked_for_is_found(central: Database) -> None:
    async with central.transaction() as tx:
        await record_some(tx, 2)
        await record_some(tx, 1, action="fail")
        failed = await notifications.find_audit_entries(tx, action="fail", limit=10)
        first = await notifications.find_audit_entries(
            tx, subject="dispatch:0", actor="sweep", limit=10
        )
        nobody = await notifications.find_audit_entries(tx, actor="admin", limit=10)
    assert [entry.action for entry in failed] == ["fail"]
    assert [entry.action for entry in first] == ["fail", "lease"]
    assert nobody == []


async def test_lines_are_found_by_tenant_and_by_time(central: Database) -> None:
    tenant_id = uuid4()
    async with central.transaction() as tx:
        await record_some(tx, 5)
        await notifications.record_audit(
            tx, "operator:ada", "retry", "dispatch:9", NOW + timedelta(hours=1), tenant_id
        )
        of_tenant = await notifications.find_audit_entries(tx, tenant_id=tenant_id, limit=10)
        late = await notifications.find_audit_entries(
            tx, since=NOW + timedelta(seconds=4), limit=10
        )
        early = await notifications.find_audit_entries(
            tx, until=NOW + timedelta(seconds=2), limit=10
        )
    assert [each.actor for each in of_tenant] == ["operator:ada"]
    assert [each.subject for each in late] == ["dispatch:9", "dispatch:4"]
    assert [each.subject for each in early] == ["dispatch:1", "dispatch:0"]


async def test_keys_and_secrets_are_left_out_however_deep(central: Database) -> None:
    details = {"secret": "a", "worker": [{"token": "b", "id": "gpu-7"}], "model_key": "sdxl"}
    async with central.transaction() as tx:
        await notifications.record_audit(tx, "admin", "rotate", "fleet:a/b", NOW, **details)
        (entry,) = await notifications.find_audit_entries(tx, limit=1)
    assert entry.details == {
        "secret": "(left out)",
        "worker": [{"token": "(left out)", "id": "gpu-7"}],
        "model_key": "sdxl",
    }

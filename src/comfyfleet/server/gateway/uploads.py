"""Limits the concurrent uploads per user, and counts incoming bytes against the tenant's quota.

Incoming files are stored next to the objects, not in the system's temporary folder.
"""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID
from weakref import WeakValueDictionary

from starlette.types import Message, Receive

from comfyfleet.errors import StorageFull
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.media import service as media
from comfyfleet.server.tenants.model import Caller
from comfyfleet.server.turns import FairTurns

UPLOADS_AT_ONCE_MAX, UPLOADS_WAITING_MAX = 3, 20
# Size allowance in bytes for the form around a file. When the file is stored, the quota is checked
# again without the form.
FORM_BYTES = 64 * 1024


class ArrivingUploads:
    """The uploads that this process is currently receiving."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[UUID, FairTurns] = WeakValueDictionary()
        self._bytes_of_tenant: Counter[UUID] = Counter()

    @asynccontextmanager
    async def open(
        self, plane: ControlPlane, caller: Caller, *, declared: int
    ) -> AsyncIterator["ArrivingUpload"]:
        """Reserves storage for an upload until it is stored.

        If the user has too many concurrent uploads, the upload waits before its body is read.
        `declared` is the length that the client announced, or 0. Raises TooManyCalls if too many
        uploads are waiting, and StorageFull if the quota is exceeded.
        """
        turns = self._turns.get(caller.user_id)
        if turns is None:
            turns = FairTurns(UPLOADS_AT_ONCE_MAX, waiting_each_max=UPLOADS_WAITING_MAX)
            self._turns[caller.user_id] = turns
        async with turns.turn(caller.user_id):
            upload = ArrivingUpload(self._bytes_of_tenant, caller.tenant.id)
            try:
                own = caller.tenant.max_storage_bytes
                quota = plane.settings.max_storage_bytes_per_tenant if own is None else own
                async with plane.context.tenant(caller.tenant.id) as tx:
                    used = await media.used_bytes(tx, caller.tenant.id)
                upload.begin(quota=quota, used=used, declared=declared)
                yield upload
            finally:
                upload.end()


class ArrivingUpload:
    def __init__(self, bytes_of_tenant: Counter[UUID], tenant_id: UUID) -> None:
        self._bytes_of_tenant = bytes_of_tenant
        self._tenant_id = tenant_id
        self._reserved = self._received = self._quota = self._used = 0

    def begin(self, *, quota: int, used: int, declared: int) -> None:
        self._quota, self._used = quota, used
        self._reserve(declared)

    def end(self) -> None:
        self._bytes_of_tenant[self._tenant_id] -= self._reserved
        if self._bytes_of_tenant[self._tenant_id] <= 0:
            del self._bytes_of_tenant[self._tenant_id]

    def counting(self, receive: Receive) -> Receive:
        """Wraps `receive` so that bytes beyond the quota raise StorageFull."""

        async def receive_counted() -> Message:
            message = await receive()
            self._received += len(message.get("body", b""))
            if self._received > self._reserved:
                self._reserve(self._received - self._reserved)
            return message

        return receive_counted

    def _reserve(self, size: int) -> None:
        arriving = self._bytes_of_tenant[self._tenant_id] + size
        if self._used + arriving - FORM_BYTES > self._quota:
            raise StorageFull(
                f"{arriving:,} more bytes would exceed the quota of {self._quota:,} bytes; "
                f"{self._used:,} bytes are already used",
                quota_bytes=self._quota,
                used_bytes=self._used,
            )
        self._reserved += size
        self._bytes_of_tenant[self._tenant_id] = arriving

"""A worker's key: given at register, dead at once when revoked, replaced when a new one is used."""

from typing import Annotated, TypeAlias

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.types import Scope

from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Worker
from comfyfleet.http.access import POLL
from comfyfleet.http.callers import SECRET_HEADER, caller_of
from comfyfleet.http.given import plane_of
from comfyfleet.jobs.polling import ReadWithKey
from comfyfleet.kernel.errors import Forbidden, Unauthenticated
from comfyfleet.kernel.keys import hashed
from comfyfleet.plane import Plane

_bearer = HTTPBearer(auto_error=False, scheme_name="worker key")


async def worker_calling(request: Request) -> Worker:
    """Asked before the request's body is read."""
    bearer = await _bearer(request)
    if bearer is None:
        raise Unauthenticated(
            "a worker's key is needed", hint="Send Authorization: Bearer KEY, as register gave it."
        )
    plane = plane_of(request)
    worker = await _authenticated(request, plane, bearer.credentials)
    key_hash = hashed(bearer.credentials)
    if worker.key_hash == key_hash:
        return worker
    async with plane.central.begin() as tx:
        worker = await fleets.take_next_key(tx, worker, key_hash)
    # What still waits with the key before is sent away, here and elsewhere.
    plane.queue.order([worker.worker_id])
    return worker


async def _authenticated(request: Request, plane: Plane, key: str) -> Worker:
    """For a poll, what it is decided by is read along with the key."""
    async with plane.central.look() as tx:
        if request.scope["path"] != POLL:
            return await fleets.authenticate(tx, key)
        as_of = plane.queue.dismissals
        worker, standing = await fleets.authenticate_with_standing(tx, key)
    request.state.read_with_key = ReadWithKey(standing, as_of)
    return worker


def read_with_key(scope: Scope) -> ReadWithKey | None:
    found: ReadWithKey | None = scope["state"].get("read_with_key")
    return found


async def stranger_joining(request: Request) -> None:
    """The secret of some fleet, before the body is read that says of which."""
    async with plane_of(request).central.look() as tx:
        await fleets.check_known_secret(tx, request.headers.get(SECRET_HEADER, ""))


async def calling(
    request: Request, _described: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Worker:
    return caller_of(request, Worker)


CallingWorker: TypeAlias = Annotated[Worker, Depends(calling)]


def require_self(worker: Worker, worker_id: str) -> None:
    if worker.worker_id != worker_id:
        raise Forbidden(f"this key is not the key of the worker {worker_id}")

"""A worker's key: given at register, dead at once when revoked."""

from typing import Annotated, TypeAlias

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Worker
from comfyfleet.http.callers import SECRET_HEADER, caller_of
from comfyfleet.http.given import plane_of
from comfyfleet.kernel.errors import Forbidden, Unauthenticated

_bearer = HTTPBearer(auto_error=False, scheme_name="worker key")


async def worker_calling(request: Request) -> Worker:
    """Asked before the request's body is read."""
    bearer = await _bearer(request)
    if bearer is None:
        raise Unauthenticated(
            "a worker's key is needed", hint="Send Authorization: Bearer KEY, as register gave it."
        )
    async with plane_of(request).central.look() as tx:
        return await fleets.authenticate(tx, bearer.credentials)


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

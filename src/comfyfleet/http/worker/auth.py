"""A worker's key: given at register, dead at once when revoked."""

from typing import Annotated, TypeAlias

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Worker
from comfyfleet.http.given import GivenPlane
from comfyfleet.kernel.errors import Forbidden, Unauthenticated

_bearer = HTTPBearer(auto_error=False, scheme_name="worker key")


async def calling(
    plane: GivenPlane, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Worker:
    if bearer is None:
        raise Unauthenticated(
            "a worker's key is needed", hint="Send Authorization: Bearer KEY, as register gave it."
        )
    async with plane.central.look() as tx:
        return await fleets.authenticate(tx, bearer.credentials)


CallingWorker: TypeAlias = Annotated[Worker, Depends(calling)]


def require_self(worker: Worker, worker_id: str) -> None:
    if worker.worker_id != worker_id:
        raise Forbidden(f"this key is not the key of the worker {worker_id}")

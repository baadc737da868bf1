"""Is the process alive, and can it work?"""

import asyncio
import logging
from collections.abc import Awaitable, Mapping

from fastapi import APIRouter, Response

from comfyfleet import __version__
from comfyfleet.db.migrating import require_newest
from comfyfleet.http.given import GivenPlane
from comfyfleet.kernel.errors import FleetError
from comfyfleet.plane import Plane

router = APIRouter(tags=["health"])
logger = logging.getLogger(__name__)
CHECK_SECONDS_MAX = 5.0
FINE = "ok"
STORE, CENTRAL = NEEDED = ("store", "central")  # without them nothing works


@router.get("/healthz")
async def alive() -> dict[str, str]:
    return {"status": FINE, "version": __version__}


@router.get("/readyz")
async def ready(plane: GivenPlane, response: Response) -> dict[str, object]:
    """503 until the central database, its schema and the store are there.

    A pool that is down holds up the jobs of its own tenants only: then it is 200 and `degraded`, or a
    load balancer would take every control plane away. Why is in the log: anybody may ask.
    """
    parts = _parts(plane)
    found = dict(
        zip(parts, await asyncio.gather(*(map(_checked, parts, parts.values()))), strict=True)
    )
    is_ready = all(found[name] == FINE for name in NEEDED)
    response.status_code = 200 if is_ready else 503
    return {"status": _status(found, is_ready=is_ready), "checks": found}


def _status(found: Mapping[str, str], *, is_ready: bool) -> str:
    if not is_ready:
        return "not ready"
    return "ready" if set(found.values()) == {FINE} else "degraded"


def _parts(plane: Plane) -> Mapping[str, Awaitable[object]]:
    return {
        STORE: plane.store.check(),
        CENTRAL: require_newest(plane.central, "central"),
        **{f"pool {name}": require_newest(pool, "tenant") for name, pool in plane.pools.items()},
    }


async def _checked(name: str, check: Awaitable[object]) -> str:
    try:
        await asyncio.wait_for(check, CHECK_SECONDS_MAX)
    except TimeoutError:
        logger.warning("not ready: %s did not answer in %g s", name, CHECK_SECONDS_MAX)
        return "timeout"
    except FleetError as error:
        logger.warning("not ready: %s: %s", name, error.message)
        return error.code
    except Exception:
        logger.exception("not ready: %s", name)
        return "error"
    return FINE

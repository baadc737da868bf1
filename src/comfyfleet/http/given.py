"""What an endpoint may ask for: the control plane, and the time."""

from datetime import datetime
from typing import Annotated, TypeAlias

from fastapi import Depends, Request

from comfyfleet.plane import Plane


def plane_of(request: Request) -> Plane:
    plane: Plane = request.app.state.plane
    return plane


def now_of(request: Request) -> datetime:
    return plane_of(request).clock()


# `async def endpoint(plane: GivenPlane, now: GivenNow)`. The endpoint opens its transactions
# itself: a dependency that yields one would commit only after the answer was sent.
GivenPlane: TypeAlias = Annotated[Plane, Depends(plane_of)]
GivenNow: TypeAlias = Annotated[datetime, Depends(now_of)]

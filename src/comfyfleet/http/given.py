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


# Coroutines that wait for nothing: the framework runs a plain function in a thread, and waits for it.
async def _plane(request: Request) -> Plane:
    return plane_of(request)


async def _now(request: Request) -> datetime:
    return now_of(request)


# `async def endpoint(plane: GivenPlane, now: GivenNow)`. The endpoint opens its transactions
# itself: a dependency that yields one would commit only after the answer was sent.
GivenPlane: TypeAlias = Annotated[Plane, Depends(_plane)]
GivenNow: TypeAlias = Annotated[datetime, Depends(_now)]

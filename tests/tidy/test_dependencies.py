"""The framework runs plain functions in threads: each costs a request more than its whole body does."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import APIRouter
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from comfyfleet.server.http import admin, app, health, public, worker

ROUTERS: list[APIRouter] = [
    worker.router,
    health.router,
    app.router,
    *public.ROUTERS,
    *admin.ROUTERS,
]


def called_by(dependant: Dependant) -> Iterator[Callable[..., Any]]:
    if dependant.call:
        yield dependant.call
    for each in dependant.dependencies:
        yield from called_by(each)


def is_coroutine(called: Callable[..., Any]) -> bool:
    function = called if inspect.isroutine(called) else type(called).__call__
    return inspect.iscoroutinefunction(function)


@pytest.mark.parametrize("router", ROUTERS)
def test_no_endpoint_and_no_dependency_is_a_plain_function(router: APIRouter) -> None:
    routes = [each for each in router.routes if isinstance(each, APIRoute)]
    assert routes
    for route in routes:
        plain = [each for each in called_by(route.dependant) if not is_coroutine(each)]
        assert plain == [], f"{route.path} would hop to a thread"

"""Serves frequently called routes without the overhead of FastAPI's dependency resolution."""

import email.message
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple, get_type_hints
from uuid import UUID

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.errors import HANDLED_ERRORS, response_to_any_error
from comfyfleet.server.http.request_body import (
    WorkerRoute,
    caller_gone,
    parse,
    parse_tolerantly,
    read_json,
)

BODY = ("body",)
MISSING = {"type": "missing", "loc": BODY, "msg": "Field required", "input": None}
# Matches a path that ends with an id in canonical form. FastAPI handles ids in other forms.
_WITH_ID = re.compile("(.*/)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ID_CHARACTERS = 36
# Matches the only query that is handled here, which is a whole number of seconds to wait. FastAPI
# handles all others.
_WAIT = re.compile(rb"wait=([1-5]?[0-9]|60)")
_PARAMETER = re.compile(r"\{\w+\}$")


class _Call(NamedTuple):
    plane: ControlPlane
    scope: Scope
    body: Any
    response: Response  # carries status and headers, like FastAPI's `Response` parameter


# Values for an endpoint's parameters, by parameter name. All other parameters must have defaults.
_PARAMETER_SOURCES: Mapping[str, Callable[[_Call], Any]] = {
    "plane": lambda call: call.plane,
    "now": lambda call: call.plane.clock(),
    "worker": lambda call: call.scope["state"]["caller"],
    "caller": lambda call: call.scope["state"]["caller"],
    "body": lambda call: call.body,
    "response": lambda call: call.response,
    "job_id": lambda call: UUID(call.scope["path"][-_ID_CHARACTERS:]),
    "idempotency_header": lambda call: _text(call.scope, b"idempotency-key"),
    "if_none_match": lambda call: _header(call.scope, b"if-none-match").decode("latin-1"),
    "wait": lambda call: float(call.scope["query_string"].removeprefix(b"wait=") or 0),
}


class DirectRoute:
    """A declared route, whose endpoint returns a model or a Response."""

    def __init__(self, declared: APIRoute) -> None:
        self.path = declared.path  # the route's name in metrics and logs
        self._body = declared.body_field
        self._parse = parse_tolerantly if isinstance(declared, WorkerRoute) else parse
        self._status = declared.status_code or 200
        self._endpoint: Callable[..., Awaitable[Any]] = declared.endpoint
        names = signature(declared.endpoint).parameters
        self._parameters = [
            (name, _PARAMETER_SOURCES[name]) for name in names if name in _PARAMETER_SOURCES
        ]
        self.takes_wait = "wait" in names
        self._require = _requirement(declared.endpoint)

    async def answer(self, plane: ControlPlane, scope: Scope, receive: Receive) -> Response:
        body = await _body_of(scope, receive, self._parse) if self._body else None
        if self._require is not None:
            await self._require(scope["state"]["caller"])
        response = Response(status_code=self._status)
        call = _Call(plane, scope, self._parsed(body), response)
        result = await self._endpoint(**{name: read(call) for name, read in self._parameters})
        return result if isinstance(result, Response) else _fill_response(response, result)

    def _parsed(self, body: Any) -> Any:
        if self._body is None:
            return None
        if isinstance(body, bytes) and not body:
            raise RequestValidationError([MISSING])
        value, problems = self._body.validate(body, {}, loc=BODY)
        if problems:
            raise RequestValidationError(problems)
        return value


def _requirement(endpoint: Callable[..., Any]) -> Callable[[Any], Awaitable[Any]] | None:
    """Returns the dependency that checks the caller's scope. It is part of the declared type of the
    `caller` parameter."""
    declared = get_type_hints(endpoint, include_extras=True).get("caller")
    return None if declared is None else declared.__metadata__[0].dependency


class DirectRoutes:
    """Middleware that serves direct routes before FastAPI, after authentication and body limits."""

    def __init__(self, app: ASGIApp, plane: ControlPlane, declared: Iterable[APIRoute]) -> None:
        self._app = app
        self._plane = plane
        self._routes = {
            (method, _PARAMETER.sub("", route.path)): DirectRoute(route)
            for route in declared
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._route(scope) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        try:
            response = await route.answer(self._plane, scope, receive)
            # This is inside the `try`, because a long poll's response may fail while it is being
            # sent.
            await response(scope, receive, send)
        except HANDLED_ERRORS as error:
            response = response_to_any_error(error, route.path, self._plane.meters)
            await response(scope, receive, send)

    def _route(self, scope: Scope) -> DirectRoute | None:
        path, query = scope["path"], scope["query_string"]
        if path.endswith("/") or (query and not _WAIT.fullmatch(query)):
            return None
        match = _WITH_ID.fullmatch(path)
        route = self._routes.get((scope["method"], match[1] if match else path))
        return route if route is None or route.takes_wait or not query else None


def _fill_response(response: Response, answer: BaseModel) -> Response:
    response.body = answer.__pydantic_serializer__.to_json(answer)
    response.headers["content-length"] = str(len(response.body))
    response.headers["content-type"] = "application/json"
    return response


def json_response(answer: BaseModel) -> Response:
    """Serializes a model to a JSON response without validating it again."""
    return Response(answer.__pydantic_serializer__.to_json(answer), media_type="application/json")


async def _body_of(scope: Scope, receive: Receive, parse: Callable[[bytes], Any]) -> Any:
    """Reads the body, and parses it if its content type is JSON.

    Other bodies are returned as bytes, which no model accepts.
    """
    try:
        body = await _read(receive)
        if not body or not _is_json(_header(scope, b"content-type")):
            return body
        return await read_json(body, parse)
    except json.JSONDecodeError as error:
        problem = {"type": "json_invalid", "loc": (*BODY, error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([problem]) from error
    except HTTPException:
        raise
    except Exception as error:
        raise HTTPException(400, "There was an error parsing the body") from error


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise caller_gone()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _text(scope: Scope, header: bytes) -> str | None:
    text = next((value for name, value in scope["headers"] if name == header), None)
    return None if text is None else text.decode("latin-1")


def _header(scope: Scope, header: bytes) -> bytes:
    return next((value for name, value in scope["headers"] if name == header), b"")


@lru_cache(maxsize=100)
def _is_json(content_type: bytes) -> bool:
    if not content_type:
        return False
    message = email.message.Message()
    message["content-type"] = content_type.decode("latin-1")
    subtype = message.get_content_subtype()
    is_json = subtype == "json" or subtype.endswith("+json")
    return message.get_content_maintype() == "application" and is_json

"""Routes that are called all day, without the framework's way to them: a body, and a call.

They are declared like all others: the declaration describes them in the API's document, and says which
body they take. The answers are the same either way, those to mistakes too.
"""

import email.message
import json
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from comfyfleet.http.errors import ANSWERED, answer_to_any
from comfyfleet.http.json_body import caller_gone, parse_tolerantly, read_json
from comfyfleet.plane import Plane

BODY = ("body",)
MISSING = {"type": "missing", "loc": BODY, "msg": "Field required", "input": None}


class DirectRoute:
    """One declared route: `async def endpoint(plane, worker, said)`, answered by a model or a Response."""

    def __init__(self, declared: APIRoute) -> None:
        if declared.body_field is None:
            raise ValueError(f"{declared.path} takes no body")
        self.path = declared.path  # as metrics and the log name it
        self._body = declared.body_field
        self._endpoint: Callable[..., Awaitable[Any]] = declared.endpoint

    async def answer(self, plane: Plane, scope: Scope, receive: Receive) -> Response:
        said = self._parsed(await _body_of(scope, receive))
        found = await self._endpoint(plane=plane, worker=scope["state"]["caller"], said=said)
        return found if isinstance(found, Response) else as_json(found)

    def _parsed(self, body: Any) -> Any:
        if isinstance(body, bytes) and not body:
            raise RequestValidationError([MISSING])
        said, problems = self._body.validate(body, {}, loc=BODY)
        if problems:
            raise RequestValidationError(problems)
        return said


class DirectRoutes:
    """Stands before the framework, behind whatever knows the caller and bounds the body."""

    def __init__(self, app: ASGIApp, plane: Plane, declared: Iterable[APIRoute]) -> None:
        self._app = app
        self._plane = plane
        self._routes = {each.path: DirectRoute(each) for each in declared}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if route is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        try:
            response = await route.answer(self._plane, scope, receive)
            # One that is made while it is waited for may fail, too.
            await response(scope, receive, send)
        except ANSWERED as error:
            response = answer_to_any(error, route.path, self._plane.meters)
            await response(scope, receive, send)


def as_json(answer: BaseModel) -> Response:
    """What we made ourselves is not validated again."""
    return Response(answer.__pydantic_serializer__.to_json(answer), media_type="application/json")


async def _body_of(scope: Scope, receive: Receive) -> Any:
    """Parsed, if it says that it is JSON; else its bytes, which no model takes."""
    try:
        body = await _read(receive)
        if not body or not _is_json(_content_type(scope)):
            return body
        return await read_json(body, parse_tolerantly)
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


def _content_type(scope: Scope) -> bytes:
    return next((value for name, value in scope["headers"] if name == b"content-type"), b"")


@lru_cache(maxsize=100)
def _is_json(content_type: bytes) -> bool:
    if not content_type:
        return False
    message = email.message.Message()
    message["content-type"] = content_type.decode("latin-1")
    subtype = message.get_content_subtype()
    is_json = subtype == "json" or subtype.endswith("+json")
    return message.get_content_maintype() == "application" and is_json

"""Answers in the form that ComfyUI's web server gives them."""

import json
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response

JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
NOTHING = "application/octet-stream"


def json_reply(body: Any, status: int = 200) -> Response:
    # ASCII with escapes: a lone surrogate that came in as one can go out again.
    text = json.dumps(body, separators=(",", ":"))
    return Response(text, status, {"content-type": JSON})


def empty(status: int = 200) -> Response:
    return Response(b"", status, {"content-type": NOTHING})


def text_reply(text: str, status: int = 200) -> Response:
    return Response(text, status, {"content-type": TEXT})


def trouble() -> Response:
    return text_reply("500 Internal Server Error\n\nServer got itself in trouble", 500)


def too_large(limit_bytes: int) -> Response:
    return text_reply(f"Maximum request body size {limit_bytes} exceeded", 413)


def not_allowed(methods: Iterable[str]) -> Response:
    """ComfyUI's static files match every path, but only for reading."""
    allowed = ",".join(sorted({"GET", "HEAD", *methods}))
    headers = {"content-type": TEXT, "allow": allowed}
    return Response("405: Method Not Allowed", 405, headers)

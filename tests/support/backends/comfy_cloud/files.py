"""Uploads that are named by their content, and downloads by redirect."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import PIL.Image
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response
from tests.support.backends.comfy_cloud.cloud import CloudAccount, StandInCloud

from comfyfleet.engine.file_routes import (
    path_reply,
    reply_with_file,
    resolve_view,
    save_bytes,
    save_mask,
)
from comfyfleet.protocol.files import ViewRefused, file_headers
from comfyfleet.protocol.http import json_reply, open_form
from comfyfleet.protocol.payloads import UnforeseenInput

UPLOAD_BYTES_MAX = 50 * 1024 * 1024
EDGE_PIXELS_MAX = 16_384
PIXELS_MAX = 64_000_000
KEY_AT_STORAGE = (
    "<?xml version='1.0' encoding='UTF-8'?><Error><Code>InvalidArgument</Code>"
    "<Message>Only one auth mechanism allowed</Message></Error>"
)


def refusal(status: int, code: str, message: str) -> Response:
    return json_reply({"code": code, "message": message}, status)


async def post_image(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    async with open_form(request) as form:
        return await _keep(cloud, form, save_bytes)


async def post_mask(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    async with open_form(request) as form:
        return await _keep(cloud, form, partial(save_mask, cloud.engine.folders, form))


async def _keep(
    cloud: StandInCloud, form: FormData, save: Callable[[BinaryIO, Path], None]
) -> Response:
    image = form.get("image")
    if not isinstance(image, UploadFile) or not image.filename:
        return refusal(400, "BAD_REQUEST", "image must be a file")
    if (image.size or 0) > UPLOAD_BYTES_MAX:
        return refusal(400, "FILE_TOO_LARGE", f"at most {UPLOAD_BYTES_MAX} bytes are accepted")
    folder = cloud.engine.folders.input
    name = await run_in_threadpool(_store, folder, image.file, image.filename, save)
    return json_reply({"name": name, "subfolder": "", "type": "input"})


def _store(
    folder: Path, upload: BinaryIO, name: str, save: Callable[[BinaryIO, Path], None]
) -> str:
    """The same bytes get the same name, whoever uploads them and under whatever name."""
    extension = os.path.splitext(name)[1].lower()
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        path = Path(scratch, f"upload{extension}")
        save(upload, path)
        if not path.exists():
            raise UnforeseenInput("the original of the mask can't be found")
        _check_size(path)
        with path.open("rb") as file:
            kept = f"{hashlib.file_digest(file, 'sha256').hexdigest()}{extension}"
        path.replace(folder / kept)
    return kept


def _check_size(path: Path) -> None:
    try:
        with PIL.Image.open(path) as picture:
            width, height = picture.size
    except OSError:
        return
    if max(width, height) > EDGE_PIXELS_MAX or width * height > PIXELS_MAX:
        raise UnforeseenInput(f"a picture of {width}x{height} is too large")


async def get_view(cloud: StandInCloud, account: CloudAccount, request: Request) -> Response:
    query = dict(request.query_params)
    if not query.get("filename"):
        return refusal(400, "BAD_REQUEST", "filename is missing")
    try:
        parent, name = resolve_view(cloud.engine.folders, query)
    except ViewRefused:
        return refusal(400, "BAD_REQUEST", "no such place")
    path = parent / name
    if not path.is_file():
        return refusal(404, "NOT_FOUND", "no such file")
    if query.get("channel"):
        return await reply_with_file(path, query, request)
    return Response(status_code=302, headers={"location": _signed_url(cloud, path, request)})


def _signed_url(cloud: StandInCloud, path: Path, request: Request) -> str:
    """A URL on another host, like real storage: a client must not send the key there."""
    root = cloud.engine.data.root
    kind, _, name = path.relative_to(root).as_posix().partition("/")
    own = urlsplit(str(request.base_url))
    host = "localhost" if own.hostname == "127.0.0.1" else "127.0.0.1"
    port = f":{own.port}" if own.port else ""
    return f"{own.scheme}://{host}{port}{cloud.signer.path(kind, name, cloud.clock())}"


async def get_stored(cloud: StandInCloud, request: Request) -> Response:
    if any(name in request.headers for name in ("x-api-key", "authorization")):
        return Response(KEY_AT_STORAGE, 400, {"content-type": "application/xml; charset=UTF-8"})
    kind, name = request.path_params["kind"], request.path_params["name"]
    if not cloud.signer.is_valid(kind, name, request.query_params, cloud.clock()):
        return Response(status_code=403)
    path = cloud.engine.data.root / kind / name
    if not path.is_file():
        return Response(status_code=404)
    return path_reply(path, request, file_headers(path.name))

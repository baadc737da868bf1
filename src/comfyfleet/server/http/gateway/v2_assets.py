"""The assets of Comfy API v2, which are uploads and outputs addressed by id or content hash."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from comfyfleet.errors import FleetError, NotFound
from comfyfleet.protocol.http import Route, json_reply
from comfyfleet.server.gateway import assets
from comfyfleet.server.gateway.assets import NewAsset, UserAsset
from comfyfleet.server.gateway.v2_model import ASSETS_PATH, asset_body, guessed_type
from comfyfleet.server.http.gateway.app import GatewayCall
from comfyfleet.server.http.gateway.files import opened_upload
from comfyfleet.server.http.gateway.v2 import in_v2, read_object, reader_of
from comfyfleet.server.http.gateway.v2_errors import InvalidRequest
from comfyfleet.server.http.objects import object_response
from comfyfleet.server.http.tallies import open_download
from comfyfleet.server.storage import LocalStore
from comfyfleet.server.storage.model import checked_content_type

EXPIRES_SECONDS_MIN, EXPIRES_SECONDS_MAX = 60, 604_800


@in_v2
async def post_asset(call: GatewayCall, request: Request) -> Response:
    async with opened_upload(call, request) as form, saved_upload(call, form) as (upload, local):
        new = _parse_upload(form, upload)
        stored = await assets.store_asset(call.plane, call.caller, local, new)
    return _created(call, request, stored)


@contextlib.asynccontextmanager
async def saved_upload(call: GatewayCall, form: FormData) -> AsyncIterator[tuple[UploadFile, Path]]:
    """Yields the form's `file` part and the path of a local copy of its content."""
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise InvalidRequest("the form must contain a part named 'file'", field="file")
    with call.plane.arriving.opened() as folder:
        local = folder / "upload"
        await asyncio.to_thread(_save, upload.file, local)
        yield upload, local


def _save(source: BinaryIO, to: Path) -> None:
    with to.open("wb") as file:
        shutil.copyfileobj(source, file)


def _parse_upload(form: FormData, upload: UploadFile) -> NewAsset:
    path = assets.check_path(_field(form, "file_path") or upload.filename or "")
    declared_type = _field(form, "content_type") or upload.content_type
    expected = _field(form, "expected_hash")
    seconds = _field(form, "expires_in")
    return NewAsset(
        path=path,
        content_type=_content_type(path, declared_type),
        expected_hash=None if expected is None else assets.parse_hash(expected),
        tags=_tags([tag for tag in form.getlist("tags") if isinstance(tag, str)]),
        expires_in=None if seconds is None else _seconds(seconds),
    )


def _field(form: FormData, name: str) -> str | None:
    value = form.get(name)
    return value.strip() or None if isinstance(value, str) else None


def _content_type(path: str, declared: str | None) -> str:
    try:
        return checked_content_type(guessed_type(path, declared))
    except FleetError as error:
        raise InvalidRequest(error.message, field="content_type") from error


def _tags(tags: list[str]) -> tuple[str, ...]:
    if len(tags) > assets.TAGS_MAX or any(len(tag) > assets.TAG_CHARACTERS_MAX for tag in tags):
        raise InvalidRequest(
            f"an asset can have at most {assets.TAGS_MAX} tags"
            f" of up to {assets.TAG_CHARACTERS_MAX} characters",
            field="tags",
        )
    return tuple(tags)


def _seconds(value: Any) -> int:
    text = str(value)
    is_whole = text.isdecimal() and len(text) < 10 and not isinstance(value, bool)
    if not is_whole or not EXPIRES_SECONDS_MIN <= int(text) <= EXPIRES_SECONDS_MAX:
        raise InvalidRequest(
            f"'expires_in' must be between {EXPIRES_SECONDS_MIN} and {EXPIRES_SECONDS_MAX} seconds",
            field="expires_in",
        )
    return int(text)


def _created(call: GatewayCall, request: Request, asset: UserAsset) -> Response:
    body = asset_body(asset.file, asset.path, reader_of(call, request), created_new=asset.is_new)
    return json_reply(body, 201 if asset.is_new else 200)


@in_v2
async def post_from_hash(call: GatewayCall, request: Request) -> Response:
    body = await read_object(request)
    digest = assets.parse_hash(body.get("hash"))
    path, tags, seconds = body.get("file_path"), body.get("tags"), body.get("expires_in")
    if path is not None and not isinstance(path, str):
        raise InvalidRequest("'file_path' must be a string", field="file_path")
    listed = tags if isinstance(tags, list) else []
    new = NewAsset(
        path=assets.check_path(path) if path else "",
        content_type="",
        tags=_tags([tag for tag in listed if isinstance(tag, str)]),
        expires_in=None if seconds is None else _seconds(seconds),
    )
    return _created(call, request, await assets.mint_asset(call.plane, call.caller, digest, new))


@in_v2
async def head_by_hash(call: GatewayCall, request: Request) -> Response:
    """Returns 200 if the caller has an asset with this content hash, and otherwise 404."""
    digest = assets.parse_hash(request.path_params["hash"])
    if not await assets.has_bytes(call.plane, call.caller, digest):
        raise NotFound("you have no asset with this hash")
    return Response(status_code=200)


@in_v2
async def get_asset(call: GatewayCall, request: Request) -> Response:
    asset = await assets.find_asset(call.plane, call.caller, request.path_params["id"])
    reader = reader_of(call, request)
    return json_reply(asset_body(asset.file, asset.path, reader, prompt_id=asset.prompt_id))


@in_v2
async def delete_asset(call: GatewayCall, request: Request) -> Response:
    await assets.delete_asset(call.plane, call.caller, request.path_params["id"])
    return Response(status_code=204)


@in_v2
async def get_content(call: GatewayCall, request: Request) -> Response:
    """Returns an asset's content from a local store, or redirects to a temporary URL in the
    bucket."""
    file = (await assets.find_asset(call.plane, call.caller, request.path_params["id"])).file
    store = call.plane.store
    if isinstance(store, LocalStore):
        download = await open_download(request, store, file.path)
        return object_response(download, request.headers, content_type=file.mime_type)
    url = await store.url_to_get(file.path, seconds=call.plane.settings.url_seconds)
    return RedirectResponse(url, 302)


_ONE = f"{ASSETS_PATH}/{{id}}"
ROUTES = (
    Route("POST", ASSETS_PATH, post_asset, prefixes=("",)),
    Route("POST", f"{ASSETS_PATH}/from-hash", post_from_hash, prefixes=("",)),
    Route("GET", f"{ASSETS_PATH}/by-hash/{{hash}}", head_by_hash, prefixes=("",)),
    Route("GET", _ONE, get_asset, prefixes=("",)),
    Route("DELETE", _ONE, delete_asset, prefixes=("",)),
    Route("GET", f"{_ONE}/content", get_content, prefixes=("",)),
)

"""ComfyUI's routes for uploading files and viewing uploads and outputs."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import Response

from comfyfleet.errors import InvalidInput, NotFound
from comfyfleet.protocol.files import (
    FileReply,
    FileStamp,
    OutsideFolder,
    UploadForm,
    ViewedFile,
    ViewRefused,
    disposition_of,
    file_headers,
    parse_original,
    parse_upload,
    parse_view,
    path_inside,
    plan_reply,
)
from comfyfleet.protocol.http import (
    Route,
    empty_reply,
    json_reply,
    open_form,
    text_reply,
    too_large_reply,
)
from comfyfleet.protocol.payloads import UnforeseenInput
from comfyfleet.server.gateway import files
from comfyfleet.server.http.gateway.app import CONTENT_POLICY, GatewayCall
from comfyfleet.server.http.request_body import content_length
from comfyfleet.server.http.tallies import counted_chunks, downloads_of, uploads_of
from comfyfleet.server.media.model import File
from comfyfleet.server.run_log.model import UserFile
from comfyfleet.server.storage.outage import system_scratch

# Larger images are sent unchanged, because creating a preview would cost more than it saves.
SHOWN_BYTES_MAX = 100 * 1024**2
NEEDS_PILLOW = "Converting images requires Pillow. Install comfyfleet[engine]."
TRUE = ("true", "1")
PICTURE_MODULE = "comfyfleet.protocol.picture_process"
PREVIEW_CHARACTERS_MAX = 200


def has_pillow() -> bool:
    return find_spec("PIL") is not None


async def post_image(call: GatewayCall, request: Request) -> Response:
    async with opened_upload(call, request) as form:
        return await _store(call, form, is_mask=False)


async def post_mask(call: GatewayCall, request: Request) -> Response:
    async with opened_upload(call, request) as form:
        return await _store(call, form, is_mask=True)


@contextlib.asynccontextmanager
async def opened_upload(call: GatewayCall, request: Request) -> AsyncIterator[FormData]:
    """Opens the form of an upload. The upload counts toward the quota while it is received."""
    declared = content_length(request.scope)
    async with call.gateway.uploads.open(call.plane, call.caller, declared=declared) as upload:
        caller = call.caller
        slot = uploads_of(request).begin(f"tenants/{caller.tenant.id}/arriving/{caller.user_id}")
        try:
            with call.plane.arriving.watched():
                await asyncio.to_thread(call.plane.arriving.prepare)
                counted = Request(request.scope, upload.counting(request.receive))
                async with open_form(counted, call.plane.arriving.root) as form:
                    yield form
        finally:
            slot.release()


async def _store(call: GatewayCall, form: FormData, *, is_mask: bool) -> Response:
    upload = parse_upload(form)
    if upload is None:
        return empty_reply(400)
    most = call.plane.settings.max_upload_bytes
    if (upload.image.size or 0) > most:
        return too_large_reply(most)
    try:
        named = UserFile(upload.folder, files.upload_path(upload.subfolder, upload.name))
    except InvalidInput:
        return empty_reply(400)
    await files.require_folder(call.plane, call.caller, named, upload.subfolder)
    original = parse_original(form) if is_mask else None
    if is_mask and not has_pillow():
        return text_reply(NEEDS_PILLOW, 501)
    with call.plane.arriving.opened() as folder:
        local = folder / "upload"
        await asyncio.to_thread(_save, upload.image.file, local)
        if is_mask:
            stored = await _store_masked(call, local, named, original, upload)
        else:
            stored = await files.store_upload(
                call.plane, call.caller, local, named, overwrites=upload.overwrites
            )
    return _upload_reply(upload, named, stored)


def _upload_reply(upload: UploadForm, named: UserFile, stored: UserFile) -> Response:
    """Returns the file's name as sent by the client, or with a number if the name was taken."""
    folder, slash, _ = upload.name.rpartition("/")
    name = upload.name if stored.path == named.path else f"{folder}{slash}{stored.filename}"
    return json_reply({"name": name, "subfolder": upload.subfolder, "type": upload.folder})


def _save(source: BinaryIO, to: Path) -> None:
    with to.open("wb") as file:
        shutil.copyfileobj(source, file)


async def _store_masked(
    call: GatewayCall,
    mask: Path,
    named: UserFile,
    original: ViewedFile | None,
    upload: UploadForm,
) -> UserFile:
    """Stores an image with a mask.

    If the original doesn't exist, nothing is stored, but a name is returned anyway, as in ComfyUI.
    """
    file = await _find_viewed(call, original) if original else None
    if file is None:
        return (await files.choose_name(call.plane, call.caller, named, "")).named
    if max(file.size or 0, upload.image.size or 0) > SHOWN_BYTES_MAX:
        raise UnforeseenInput("the image is too large to add a mask")
    source = mask.with_name("original")
    combined = mask.with_name(f"combined{Path(named.filename).suffix}")
    async with call.plane.pictures.turn(str(call.caller.tenant.id)):
        await files.fetch(call.plane, file, source)
        pixels = str(call.plane.settings.max_picture_pixels)
        words = str(mask), str(source), str(combined), pixels
        if await call.plane.pictures.run(PICTURE_MODULE, "mask", *words) is None:
            raise UnforeseenInput("the mask can't be added to the image")
    return await files.store_upload(
        call.plane,
        call.caller,
        combined,
        named,
        overwrites=upload.overwrites,
        compared=mask,
    )


async def _find_viewed(call: GatewayCall, viewed: ViewedFile) -> File | None:
    try:
        path = path_inside(viewed.subfolder, viewed.name)
        return await files.find_file(call.plane, call.caller, viewed.folder, path)
    except (OutsideFolder, NotFound):
        return None


async def get_view(call: GatewayCall, request: Request) -> Response:
    query = request.query_params
    if "filename" not in query:
        return empty_reply(404)
    try:
        viewed = parse_view(query)
        path = _path(viewed)
        file = await files.find_file(call.plane, call.caller, viewed.folder, path)
        return await _reply_with(call, file, viewed.base, request)
    except ViewRefused as refused:
        return empty_reply(refused.status)
    except NotFound:
        return empty_reply(404)


def _path(viewed: ViewedFile) -> str:
    try:
        subfolder = path_inside(viewed.subfolder)
    except OutsideFolder as error:
        raise ViewRefused(403) from error
    return f"{subfolder}/{viewed.base}" if subfolder else viewed.base


async def _reply_with(call: GatewayCall, file: File, name: str, request: Request) -> Response:
    query = request.query_params
    if query.get("redirect") in TRUE:
        return await _redirect(call, file, name)
    if "preview" in query or query.get("channel") in ("rgb", "a"):
        shown = await _shown_picture(call, file, name, query)
        if shown is not None:
            return shown
    stamp = FileStamp(file.size or 0, int(file.created_at.timestamp() * 1_000_000) * 1000)
    plan = plan_reply(request.headers, stamp)
    chunks = None
    if request.method != "HEAD" and plan.length > 0:
        slot = downloads_of(request).begin(file.path)
        chunks = counted_chunks(
            await files.read_part(call.plane, file, plan.start, plan.length), slot
        )
    headers = {**file_headers(name), "content-security-policy": CONTENT_POLICY}
    return FileReply(plan, stamp, headers, chunks)


async def _redirect(call: GatewayCall, file: File, name: str) -> Response:
    """Redirects to the file's URL in the store, so that its content doesn't pass through the
    control plane."""
    seconds = call.plane.settings.url_seconds
    url = await call.plane.store.url_to_get(file.path, seconds=seconds, filename=name)
    return Response(status_code=302, headers={"location": url, "cache-control": "no-store"})


async def _shown_picture(
    call: GatewayCall, file: File, name: str, query: Mapping[str, str]
) -> Response | None:
    """Returns a preview or one channel of an image, or None if the original file must be sent."""
    is_large = (file.size or 0) > SHOWN_BYTES_MAX
    if is_large or not has_pillow():
        return None if "preview" in query else text_reply(NEEDS_PILLOW, 413 if is_large else 501)
    # Waits before copying the file, so that waiting requests don't use disk space.
    async with call.plane.pictures.turn(str(call.caller.tenant.id)):
        with system_scratch().opened() as folder:
            local, shown = folder / "picture", folder / "shown"
            await files.fetch(call.plane, file, local)
            pixels = str(call.plane.settings.max_picture_pixels)
            options = (
                query.get("preview", "")[:PREVIEW_CHARACTERS_MAX],
                query.get("channel", "")[:10],
            )
            words = (
                str(local),
                str(shown),
                pixels,
                "preview" if "preview" in query else "",
                *options,
            )
            kind = await call.plane.pictures.run(PICTURE_MODULE, "show", *words)
            if kind is None:
                raise UnforeseenInput(f"{name} can't be converted to an image")
            content = await asyncio.to_thread(shown.read_bytes)
    headers = {"content-type": kind, "content-disposition": disposition_of(name)}
    return Response(content, headers={**headers, "content-security-policy": CONTENT_POLICY})


ROUTES = (
    Route("POST", "/upload/image", post_image),
    Route("POST", "/upload/mask", post_mask),
    Route("GET", "/view", get_view),
)

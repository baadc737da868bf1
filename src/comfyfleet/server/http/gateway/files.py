"""ComfyUI's routes of files: uploads, and views of what was uploaded or made."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from comfyfleet.errors import NotFound
from comfyfleet.protocol.http import Route, empty_reply, json_reply, open_form
from comfyfleet.server.gateway import files
from comfyfleet.server.http.gateway.app import GatewayCall
from comfyfleet.server.run_log.model import FOLDERS, UserFile


async def post_image(call: GatewayCall, request: Request) -> Response:
    async with open_form(request) as form:
        upload = form.get("image")
        if not isinstance(upload, UploadFile):
            return empty_reply(400)
        if not upload.filename:
            return empty_reply(400)
        folder = str(form.get("type") or "input")
        subfolder = files.clean_path(str(form.get("subfolder") or ""))
        path = files.clean_path(f"{subfolder}/{upload.filename}" if subfolder else upload.filename)
        if folder not in FOLDERS or not path:
            return empty_reply(400)
        overwrites = str(form.get("overwrite") or "").lower() in ("true", "1")
        named = UserFile(folder, path)
        content_type = upload.content_type or "application/octet-stream"
        with tempfile.TemporaryDirectory() as scratch:
            local = Path(scratch) / "upload"
            await asyncio.to_thread(_save, upload.file, local)
            kept = await files.store_upload(
                call.plane, call.caller, local, named, content_type, overwrites=overwrites
            )
    return json_reply({"name": kept.filename, "subfolder": kept.subfolder, "type": kept.folder})


def _save(source: BinaryIO, to: Path) -> None:
    with to.open("wb") as file:
        shutil.copyfileobj(source, file)


async def get_view(call: GatewayCall, request: Request) -> Response:
    query = request.query_params
    if "filename" not in query:
        return empty_reply(404)
    folder, name = files.split_annotation(query["filename"], query.get("type", "output"))
    if not name or name.startswith("/") or ".." in name or folder not in FOLDERS:
        return empty_reply(400)
    subfolder = query.get("subfolder", "")
    if ".." in subfolder.replace("\\", "/").split("/") or subfolder.startswith("/"):
        return empty_reply(403)
    base = name.replace("\\", "/").rpartition("/")[2]
    path = f"{subfolder}/{base}" if subfolder else base
    try:
        file = await files.find_file(call.plane, call.caller, folder, path)
    except NotFound:
        return empty_reply(404)
    headers = {"content-disposition": f'filename="{base}"', "x-content-type-options": "nosniff"}
    if file.size is not None:
        headers["content-length"] = str(file.size)
    chunks: AsyncIterator[bytes] = call.plane.store.chunks(file.path)
    return StreamingResponse(chunks, media_type=file.mime_type, headers=headers)


ROUTES = (
    Route("POST", "/upload/image", post_image),
    Route("GET", "/view", get_view),
)

"""Uploads of API v2, which wants nothing twice."""

import asyncio
import mimetypes
from pathlib import Path

import httpx

from comfyfleet.comfy.backend import Uploaded
from comfyfleet.comfy.calls import Call, Calls
from comfyfleet.comfy.cloud.assets import Asset, content_hash, parse_asset
from comfyfleet.comfy.cloud.complaints import complaint_in
from comfyfleet.comfy.cloud.patience import ask
from comfyfleet.comfy.shapes import cut, parse_json, unexpected
from comfyfleet.kernel.errors import InvalidInput, LimitExceeded
from comfyfleet.opened_files import opened

KNOWN = Call("POST", "/assets/from-hash")
DEFAULT_TYPE = "application/octet-stream"


async def upload_asset(calls: Calls, path: Path, name: str | None) -> Uploaded:
    """The name that comes back stands for the asset; what a loader gets is made of it at submit."""
    file_path = Path(name or path.name).name
    try:
        told_hash = await asyncio.to_thread(content_hash, path)
    except OSError as error:
        raise InvalidInput(f"{path} can't be read: {error.strerror}") from error
    asset = await _known(calls, told_hash, file_path)
    if asset is None:
        asset = await _sent(calls, path, told_hash, file_path)
    return Uploaded(asset.value)


async def _known(calls: Calls, told_hash: str, file_path: str) -> Asset | None:
    """Whatever the server has against it: the bytes can be sent all the same."""
    body = {"hash": told_hash, "file_path": file_path}
    call = Call("POST", "/assets/from-hash", json=body)
    response = await ask(calls, call)
    if response.status_code not in (200, 201):
        return None
    return _read(calls, call, response, file_path)


async def _sent(calls: Calls, path: Path, told_hash: str, file_path: str) -> Asset:
    content_type = mimetypes.guess_type(file_path)[0] or DEFAULT_TYPE
    fields = {"content_type": content_type, "file_path": file_path, "expected_hash": told_hash}
    with await opened(path) as file:
        call = Call("POST", "/assets", files={"file": (file_path, file)}, data=fields)
        response = await ask(calls, call)
    complaint = complaint_in(response.content)
    if response.status_code == 413:
        raise LimitExceeded(f"{file_path} is larger than the server takes: {complaint.message}")
    if response.status_code in (400, 409, 422):
        raise InvalidInput(f"the server does not take {file_path}: {complaint.message}")
    return _read(calls, call, response, file_path)


def _read(calls: Calls, call: Call, response: httpx.Response, file_path: str) -> Asset:
    with calls.reading(call.operation):
        if response.status_code not in (200, 201):
            raise unexpected(
                f"{call.operation} was answered {response.status_code}", cut(response.text)
            )
        return parse_asset(parse_json(response.content, "an asset"), file_path)

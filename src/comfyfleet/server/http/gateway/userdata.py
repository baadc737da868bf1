"""ComfyUI's routes for the users, settings and files that the editor stores on its server."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from comfyfleet.errors import Conflict, InvalidInput, LimitExceeded, NotFound
from comfyfleet.protocol.files import (
    FileReply,
    FileStamp,
    OutsideFolder,
    file_headers,
    path_inside,
    plan_reply,
)
from comfyfleet.protocol.http import JSON, Route, empty_reply, json_reply, json_text, text_reply
from comfyfleet.protocol.payloads import MalformedBody
from comfyfleet.server.gateway import userdata
from comfyfleet.server.gateway.model import UserdataEntry
from comfyfleet.server.http.gateway.app import CONTENT_POLICY, GatewayCall, read_json


async def get_users(call: GatewayCall, request: Request) -> Response:
    migrated = await userdata.has_any(call.plane, call.caller)
    return json_reply({"storage": "server", "migrated": migrated})


async def post_users(call: GatewayCall, request: Request) -> Response:
    return json_reply({"error": "Users can only be created by an operator."}, 400)


async def get_settings(call: GatewayCall, request: Request) -> Response:
    return json_reply(await userdata.read_settings(call.plane, call.caller))


async def get_setting(call: GatewayCall, request: Request) -> Response:
    settings = await userdata.read_settings(call.plane, call.caller)
    return json_reply(settings.get(request.path_params["id"]))


async def post_settings(call: GatewayCall, request: Request) -> Response:
    body = await read_json(request)
    if not isinstance(body, dict):
        raise MalformedBody("settings must be an object")
    await userdata.change_settings(call.plane, call.caller, body)
    return empty_reply()


async def post_setting(call: GatewayCall, request: Request) -> Response:
    value = await read_json(request)
    changes = {request.path_params["id"]: value}
    await userdata.change_settings(call.plane, call.caller, changes)
    return empty_reply()


async def list_files(call: GatewayCall, request: Request) -> Response:
    query = request.query_params
    if not query.get("dir"):
        return text_reply("Directory not provided", 400)
    try:
        folder = path_inside("", unquote(query["dir"]))
    except OutsideFolder:
        return text_reply("Invalid directory", 403)
    entries = await userdata.list_files(call.plane, call.caller, folder)
    if not entries:
        return text_reply("Directory not found", 404)
    return await _listing(call, lambda: _entries(entries, folder, query))


def _entries(
    files: Iterable[UserdataEntry], folder: str, query: Mapping[str, str]
) -> Iterator[Any]:
    for file in files:
        entry = file._replace(path=_relative(file.path, folder))
        if _is_true(query, "recurse") or "/" not in entry.path:
            yield _listed(entry, query)


def _relative(path: str, folder: str) -> str:
    return path[len(folder) + 1 :] if folder else path


def _listed(entry: UserdataEntry, query: Mapping[str, str]) -> Any:
    if _is_true(query, "full_info"):
        return _info(entry)
    return [entry.path, *entry.path.split("/")] if _is_true(query, "split") else entry.path


def _info(entry: UserdataEntry) -> dict[str, Any]:
    return {
        "path": entry.path,
        "size": entry.size,
        "modified": int(entry.modified_at.timestamp() * 1000),
        "created": int(entry.created_at.timestamp() * 1000),
    }


async def list_tree(call: GatewayCall, request: Request) -> Response:
    path = request.query_params.get("path", "")
    try:
        folder = path_inside("", unquote(path))
    except OutsideFolder:
        return text_reply("Invalid path requested", 400)
    entries = await userdata.list_files(call.plane, call.caller, folder)
    if not entries:
        return await _no_tree(call, path, folder)
    return await _listing(call, lambda: _tree(entries, folder))


LISTED_MAX, LISTED_BYTES_MAX = 10_000, 4 * 1024**2
RENDERED_AT_ONCE = 500


async def _listing(call: GatewayCall, entries: Callable[[], Iterable[Any]]) -> Response:
    """Renders a list as JSON, in parts and in a thread. Raises LimitExceeded if it is too long."""
    text = await call.gateway.listings.run(call.caller.tenant.id, lambda: _rendered(entries()))
    return Response(text, 200, {"content-type": JSON})


def _rendered(entries: Iterable[Any]) -> bytes:
    parts: list[str] = []
    count = size = 0
    remaining = iter(entries)
    while some := list(islice(remaining, RENDERED_AT_ONCE)):
        parts.append(json_text(some)[1:-1])
        count, size = count + len(some), size + len(parts[-1])
        if count > LISTED_MAX or size > LISTED_BYTES_MAX:
            raise LimitExceeded(
                f"a list can have at most {LISTED_MAX:,} entries and {LISTED_BYTES_MAX:,} bytes;"
                " list a subfolder instead"
            )
    return f"[{','.join(parts)}]".encode()


def _tree(files: Iterable[UserdataEntry], folder: str) -> list[dict[str, Any]]:
    entries = [*_folders(files, folder), *_files(files)]
    return sorted(entries, key=_folders_first)


async def _no_tree(call: GatewayCall, path: str, folder: str) -> Response:
    if not path:
        return json_reply([])
    try:
        await userdata.read(call.plane, call.caller, folder)
    except NotFound:
        return text_reply("Requested path not found", 404)
    return text_reply("Requested path is not a directory", 400)


def _folders(entries: Iterable[UserdataEntry], folder: str) -> Iterator[dict[str, Any]]:
    """Yields each folder once, even if it contains several files."""
    seen = {"", folder}
    for entry in entries:
        path = entry.path.rpartition("/")[0]
        while path not in seen:
            seen.add(path)
            if len(seen) > LISTED_MAX + 2:
                return
            yield {"name": path.rpartition("/")[2], "path": path, "type": "directory"}
            path = path.rpartition("/")[0]


def _files(entries: Iterable[UserdataEntry]) -> Iterator[dict[str, Any]]:
    for path, size, _, modified_at in entries:
        named = {"name": path.rpartition("/")[2], "path": path, "type": "file"}
        yield {**named, "size": size, "modified": modified_at.timestamp()}


def _folders_first(entry: Mapping[str, Any]) -> tuple[bool, str]:
    return entry["type"] != "directory", entry["name"].lower()


async def get_file(call: GatewayCall, request: Request) -> Response:
    try:
        path = _path(request, "file")
        entry, data = await userdata.read(call.plane, call.caller, path)
    except OutsideFolder:
        return empty_reply(403)
    except (InvalidInput, NotFound):
        return empty_reply(404)
    stamp = FileStamp(entry.size, int(entry.modified_at.timestamp() * 1_000_000) * 1000)
    plan = plan_reply(request.headers, stamp)
    # A user's file must never be displayed in the editor's origin.
    headers = {
        **file_headers(path.rpartition("/")[2]),
        "content-disposition": "attachment",
        "content-security-policy": CONTENT_POLICY,
    }
    has_body = request.method != "HEAD" and plan.length > 0
    body = _once(data[plan.start : plan.start + plan.length]) if has_body else None
    return FileReply(plan, stamp, headers, body)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def post_file(call: GatewayCall, request: Request) -> Response:
    try:
        path = _path(request, "file")
        entry = await userdata.write(
            call.plane, call.caller, path, await request.body(), overwrites=_overwrites(request)
        )
    except OutsideFolder:
        return empty_reply(403)
    except Conflict:
        return text_reply("File already exists", 409)
    except userdata.PathTooDeep as error:
        return text_reply(error.message, 400)
    except InvalidInput:
        return empty_reply(400)
    return json_reply(_path_or_info(entry, request))


async def delete_file(call: GatewayCall, request: Request) -> Response:
    try:
        await userdata.delete(call.plane, call.caller, _path(request, "file"))
    except OutsideFolder:
        return empty_reply(403)
    except (InvalidInput, NotFound):
        return empty_reply(404)
    return empty_reply(204)


async def move_file(call: GatewayCall, request: Request) -> Response:
    try:
        source, target = _path(request, "file"), _path(request, "dest")
        entry = await userdata.move(
            call.plane, call.caller, source, target, overwrites=_overwrites(request)
        )
    except OutsideFolder:
        return empty_reply(403)
    except NotFound:
        return empty_reply(404)
    except Conflict:
        return text_reply("File already exists", 409)
    except userdata.PathTooDeep as error:
        return text_reply(error.message, 400)
    except InvalidInput:
        return empty_reply(400)
    return json_reply(_path_or_info(entry, request))


def _path(request: Request, name: str) -> str:
    return userdata.checked_path(unquote(request.path_params[name]))


def _path_or_info(entry: UserdataEntry, request: Request) -> Any:
    return _info(entry) if _is_true(request.query_params, "full_info") else entry.path


def _overwrites(request: Request) -> bool:
    return request.query_params.get("overwrite") != "false"


def _is_true(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "").lower() == "true"


ROUTES = (
    Route("GET", "/users", get_users),
    Route("POST", "/users", post_users),
    Route("GET", "/settings", get_settings),
    Route("POST", "/settings", post_settings),
    Route("GET", "/settings/{id}", get_setting),
    Route("POST", "/settings/{id}", post_setting),
    Route("GET", "/userdata", list_files),
    Route("GET", "/v2/userdata", list_tree),
    Route("POST", "/userdata/{file:path}/move/{dest:path}", move_file),
    Route("GET", "/userdata/{file:path}", get_file),
    Route("POST", "/userdata/{file:path}", post_file),
    Route("DELETE", "/userdata/{file:path}", delete_file),
)

"""The little that an editor keeps on the server: settings, and files such as workflows."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from comfyfleet.engine.door import Route
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.file_reply import FileReply
from comfyfleet.engine.replies import empty, json_reply, text_reply
from comfyfleet.engine.requests import read_json
from comfyfleet.engine.routes.files import file_headers
from comfyfleet.engine.trouble import MalformedBody
from comfyfleet.engine.uploads import OutsideFolder, place

SETTINGS = "comfy.settings.json"


async def get_users(engine: Engine, request: Request) -> Response:
    return json_reply({"storage": "server", "migrated": engine.data.user.exists()})


async def get_settings(engine: Engine, request: Request) -> Response:
    return json_reply(_settings(engine))


async def get_setting(engine: Engine, request: Request) -> Response:
    return json_reply(_settings(engine).get(request.path_params["id"]))


async def post_settings(engine: Engine, request: Request) -> Response:
    body = await read_json(request)
    if not isinstance(body, dict):
        raise MalformedBody("settings are an object")
    _save_settings(engine, {**_settings(engine), **body})
    return empty()


async def post_setting(engine: Engine, request: Request) -> Response:
    value = await read_json(request)
    _save_settings(engine, {**_settings(engine), request.path_params["id"]: value})
    return empty()


def _settings(engine: Engine) -> dict[str, Any]:
    try:
        found = json.loads((engine.data.user / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _save_settings(engine: Engine, settings: Mapping[str, Any]) -> None:
    engine.data.user.mkdir(parents=True, exist_ok=True)
    (engine.data.user / SETTINGS).write_text(json.dumps(settings, indent=4), encoding="utf-8")


async def list_files(engine: Engine, request: Request) -> Response:
    query = request.query_params
    if not query.get("dir"):
        return text_reply("Directory not provided", 400)
    try:
        folder = _user_path(engine, query["dir"])
    except OutsideFolder:
        return text_reply("Invalid directory", 403)
    if not folder.exists():
        return text_reply("Directory not found", 404)
    pattern = "**/*" if _is_true(query, "recurse") else "*"
    files = [path for path in sorted(folder.glob(pattern)) if path.is_file()]
    return json_reply([_listed(path, folder, query) for path in files])


def _listed(path: Path, folder: Path, query: Mapping[str, str]) -> Any:
    name = path.relative_to(folder).as_posix()
    if _is_true(query, "full_info"):
        return _file_info(path, folder)
    return [name, *name.split("/")] if _is_true(query, "split") else name


def _file_info(path: Path, folder: Path) -> dict[str, Any]:
    found = path.stat()
    return {
        "path": path.relative_to(folder).as_posix(),
        "size": found.st_size,
        "modified": int(found.st_mtime * 1000),
        "created": int(found.st_ctime * 1000),
    }


async def list_tree(engine: Engine, request: Request) -> Response:
    wanted = request.query_params.get("path", "")
    try:
        folder = _user_path(engine, wanted)
    except OutsideFolder:
        return text_reply("Invalid path requested", 400)
    if not folder.exists():
        return text_reply("Requested path not found", 404) if wanted else json_reply([])
    if not folder.is_dir():
        return text_reply("Requested path is not a directory", 400)
    entries = sorted(_tree(folder, engine.data.user), key=_folders_first)
    return json_reply(entries)


def _tree(folder: Path, base: Path) -> Iterator[dict[str, Any]]:
    for path in folder.rglob("*"):
        entry = {"name": path.name, "path": path.relative_to(base).as_posix()}
        if path.is_dir():
            yield {**entry, "type": "directory"}
        else:
            found = path.stat()
            yield {**entry, "type": "file", "size": found.st_size, "modified": found.st_mtime}


def _folders_first(entry: Mapping[str, Any]) -> tuple[bool, str]:
    return entry["type"] != "directory", entry["name"].lower()


async def get_file(engine: Engine, request: Request) -> Response:
    try:
        path = _user_path(engine, request.path_params["file"])
    except OutsideFolder:
        return empty(403)
    if not path.is_file():
        return empty(404)
    # Whatever it is, it is not for showing in the editor's own origin.
    headers = {**file_headers(path.name), "content-disposition": "attachment"}
    return FileReply(path, request.headers, headers)


async def post_file(engine: Engine, request: Request) -> Response:
    try:
        path = _user_path(engine, request.path_params["file"])
    except OutsideFolder:
        return empty(403)
    if _must_not_exist(request) and path.exists():
        return text_reply("File already exists", 409)
    body = await request.body()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    except OSError:
        return empty(400)
    return json_reply(_told(path, engine, request))


async def delete_file(engine: Engine, request: Request) -> Response:
    try:
        path = _user_path(engine, request.path_params["file"])
    except OutsideFolder:
        return empty(403)
    if not path.is_file():
        return empty(404)
    path.unlink()
    return empty(204)


async def move_file(engine: Engine, request: Request) -> Response:
    try:
        source = _user_path(engine, request.path_params["file"])
        target = _user_path(engine, request.path_params["dest"])
    except OutsideFolder:
        return empty(403)
    if not source.is_file():
        return empty(404)
    if _must_not_exist(request) and target.exists():
        return text_reply("File already exists", 409)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(source, target)
    return json_reply(_told(target, engine, request))


def _user_path(engine: Engine, name: str) -> Path:
    return place(engine.data.user, "", unquote(name))


def _told(path: Path, engine: Engine, request: Request) -> Any:
    if _is_true(request.query_params, "full_info"):
        return _file_info(path, engine.data.user)
    return os.path.relpath(path, engine.data.user)


def _must_not_exist(request: Request) -> bool:
    return request.query_params.get("overwrite") == "false"


def _is_true(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "").lower() == "true"


ROUTES = (
    Route("GET", "/users", get_users),
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

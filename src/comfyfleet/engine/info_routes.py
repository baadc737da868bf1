"""Routes for the server's version, features, nodes and machine data, for the editor's `/internal`
routes, and for the data that an editor stores on the server: settings, and files such as
workflows."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.file_routes import path_reply, upload_path
from comfyfleet.engine.node import FolderName
from comfyfleet.protocol.files import OutsideFolder, file_headers
from comfyfleet.protocol.http import (
    Route,
    empty_reply,
    json_reply,
    read_json,
    text_reply,
)
from comfyfleet.protocol.payloads import MalformedBody
from comfyfleet.protocol.server_info import (
    ALONE,
    ASSET_ROUTES,
    FEATURES,
    LOG_ROUTES,
    MODEL_FOLDERS,
    MODEL_FOLDERS_DESCRIBED,
    constant_reply,
    describe_system,
    not_found,
)

PAGE = (
    "<!doctype html><title>comfyfleet engine</title>"
    "<p>A built-in CPU backend that speaks ComfyUI's protocol. It has no editor of its own."
)


async def get_root(engine: Engine, request: Request) -> Response:
    return Response(PAGE, headers={"content-type": "text/html; charset=utf-8"})


async def get_object_info(engine: Engine, request: Request) -> Response:
    described = {name: kind.describe(engine.folders) for name, kind in engine.nodes.items()}
    return json_reply(described)


async def get_object_info_of(engine: Engine, request: Request) -> Response:
    name = request.path_params["node_class"]
    kind = engine.nodes.get(name)
    return json_reply({} if kind is None else {name: kind.describe(engine.folders)})


async def get_system_stats(engine: Engine, request: Request) -> Response:
    total, free = _memory_bytes()
    device = {"name": "cpu", "type": "cpu", "index": None}
    figures = {
        "vram_total": total,
        "vram_free": free,
        "torch_vram_total": total,
        "torch_vram_free": free,
    }
    system = describe_system(["comfyfleet engine"], total, free)
    return json_reply({"system": system, "devices": [{**device, **figures}]})


def _memory_bytes() -> tuple[int, int]:
    """Returns the total and available memory in bytes. A value is 0 if the system doesn't report
    it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return kilobytes["MemTotal"] * 1024, kilobytes["MemAvailable"] * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return _physical_memory_bytes(), 0


def _physical_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


async def get_models_in(engine: Engine, request: Request) -> Response:
    return json_reply([]) if request.path_params["folder"] in MODEL_FOLDERS else empty_reply(404)


async def get_metadata(engine: Engine, request: Request) -> Response:
    return empty_reply(404)


INFO_ROUTES = (
    Route("GET", "/", get_root),
    Route("GET", "/object_info", get_object_info),
    Route("GET", "/object_info/{node_class}", get_object_info_of),
    Route("GET", "/system_stats", get_system_stats),
    Route("GET", "/features", constant_reply(FEATURES)),
    Route("GET", "/embeddings", constant_reply([])),
    Route("GET", "/models", constant_reply(MODEL_FOLDERS)),
    Route("GET", "/models/{folder}", get_models_in),
    Route("GET", "/experiment/models", constant_reply(MODEL_FOLDERS_DESCRIBED)),
    Route("GET", "/experiment/models/{folder}", get_models_in),
    Route("GET", "/view_metadata/{folder}", get_metadata),
    Route("GET", "/extensions", constant_reply([])),
    Route("GET", "/i18n", constant_reply({})),
    Route("GET", "/workflow_templates", constant_reply({})),
    Route("GET", "/global_subgraphs", constant_reply({})),
    Route("GET", "/global_subgraphs/{id}", constant_reply(None)),
    Route("GET", "/node_replacements", constant_reply({})),
    *ASSET_ROUTES,
)


async def get_folder_paths(engine: Engine, request: Request) -> Response:
    return json_reply({name: [] for name in MODEL_FOLDERS})


async def get_files(engine: Engine, request: Request) -> Response:
    kind = request.path_params["kind"]
    for folder in get_args(FolderName):
        if folder == kind:
            names = _newest_first(engine.folders.of(folder))
            return json_reply([f"{name} [{kind}]" for name in names])
    return json_reply({"error": "Invalid directory type"}, 400)


def _newest_first(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        files = [entry for entry in entries if entry.is_file() and not entry.name.startswith(".")]
        return [e.name for e in sorted(files, key=lambda entry: -entry.stat().st_mtime)]


INTERNAL_ROUTES = (
    *LOG_ROUTES,
    Route("GET", "/internal/folder_paths", get_folder_paths, ALONE),
    Route("GET", "/internal/files/{kind}", get_files, ALONE),
    Route("GET", "/internal/{rest:path}", not_found, ALONE),
)


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
        raise MalformedBody("settings must be a JSON object")
    _save_settings(engine, {**_settings(engine), **body})
    return empty_reply()


async def post_setting(engine: Engine, request: Request) -> Response:
    value = await read_json(request)
    _save_settings(engine, {**_settings(engine), request.path_params["id"]: value})
    return empty_reply()


def _settings(engine: Engine) -> dict[str, Any]:
    try:
        settings = json.loads((engine.data.user / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


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
    status = path.stat()
    return {
        "path": path.relative_to(folder).as_posix(),
        "size": status.st_size,
        "modified": int(status.st_mtime * 1000),
        "created": int(status.st_ctime * 1000),
    }


async def list_tree(engine: Engine, request: Request) -> Response:
    requested = request.query_params.get("path", "")
    try:
        folder = _user_path(engine, requested)
    except OutsideFolder:
        return text_reply("Invalid path requested", 400)
    if not folder.exists():
        return text_reply("Requested path not found", 404) if requested else json_reply([])
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
            status = path.stat()
            yield {**entry, "type": "file", "size": status.st_size, "modified": status.st_mtime}


def _folders_first(entry: Mapping[str, Any]) -> tuple[bool, str]:
    return entry["type"] != "directory", entry["name"].lower()


async def get_file(engine: Engine, request: Request) -> Response:
    try:
        path = _user_path(engine, request.path_params["file"])
    except OutsideFolder:
        return empty_reply(403)
    if not path.is_file():
        return empty_reply(404)
    # User files are always sent as attachments, because they must not be displayed in the editor's
    # own origin.
    headers = {**file_headers(path.name), "content-disposition": "attachment"}
    return path_reply(path, request, headers)


async def post_file(engine: Engine, request: Request) -> Response:
    try:
        path = _user_path(engine, request.path_params["file"])
    except OutsideFolder:
        return empty_reply(403)
    if _must_not_exist(request) and path.exists():
        return text_reply("File already exists", 409)
    body = await request.body()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    except OSError:
        return empty_reply(400)
    return json_reply(_path_or_info(path, engine, request))


async def delete_file(engine: Engine, request: Request) -> Response:
    try:
        path = _user_path(engine, request.path_params["file"])
    except OutsideFolder:
        return empty_reply(403)
    if not path.is_file():
        return empty_reply(404)
    path.unlink()
    return empty_reply(204)


async def move_file(engine: Engine, request: Request) -> Response:
    try:
        source = _user_path(engine, request.path_params["file"])
        target = _user_path(engine, request.path_params["dest"])
    except OutsideFolder:
        return empty_reply(403)
    if not source.is_file():
        return empty_reply(404)
    if _must_not_exist(request) and target.exists():
        return text_reply("File already exists", 409)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(source, target)
    return json_reply(_path_or_info(target, engine, request))


def _user_path(engine: Engine, name: str) -> Path:
    return upload_path(engine.data.user, "", unquote(name))


def _path_or_info(path: Path, engine: Engine, request: Request) -> Any:
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

"""What ComfyUI's own editor asks for behind the scenes. Under `/internal` only."""

import os
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from comfyfleet.engine.door import Route
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.features import MODEL_FOLDERS
from comfyfleet.engine.replies import empty, json_reply, text_reply
from comfyfleet.engine.requests import read_json
from comfyfleet.engine.routes.files import FOLDERS
from comfyfleet.engine.trouble import MalformedBody

TERMINAL_COLUMNS, TERMINAL_ROWS = 80, 24
ALONE = ("",)


async def get_logs(engine: Engine, request: Request) -> Response:
    return json_reply("")


async def get_raw_logs(engine: Engine, request: Request) -> Response:
    size = {"cols": TERMINAL_COLUMNS, "rows": TERMINAL_ROWS}
    return json_reply({"entries": [], "size": size})


async def subscribe_logs(engine: Engine, request: Request) -> Response:
    body = await read_json(request)
    if not isinstance(body, dict) or not {"clientId", "enabled"} <= body.keys():
        raise MalformedBody("clientId and enabled are expected")
    return empty()


async def get_folder_paths(engine: Engine, request: Request) -> Response:
    return json_reply({name: [] for name in MODEL_FOLDERS})


async def get_files(engine: Engine, request: Request) -> Response:
    kind = request.path_params["kind"]
    for folder in FOLDERS:
        if folder == kind:
            names = _newest_first(engine.folders.of(folder))
            return json_reply([f"{name} [{kind}]" for name in names])
    return json_reply({"error": "Invalid directory type"}, 400)


def _newest_first(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        files = [entry for entry in entries if entry.is_file() and not entry.name.startswith(".")]
        return [e.name for e in sorted(files, key=lambda entry: -entry.stat().st_mtime)]


async def not_found(engine: Engine, request: Request) -> Response:
    return text_reply("404: Not Found", 404)


ROUTES = (
    Route("GET", "/internal/logs", get_logs, ALONE),
    Route("GET", "/internal/logs/raw", get_raw_logs, ALONE),
    Route("PATCH", "/internal/logs/subscribe", subscribe_logs, ALONE),
    Route("GET", "/internal/folder_paths", get_folder_paths, ALONE),
    Route("GET", "/internal/files/{kind}", get_files, ALONE),
    Route("GET", "/internal/{rest:path}", not_found, ALONE),
)

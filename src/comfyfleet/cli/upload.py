"""Parses values (`--set NAME=VALUE`) and files (`--file NAME=PATH`) for jobs, uploads the files,
and downloads results."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from comfyfleet.cli.context import InjectedContext, require_file
from comfyfleet.cli.control_plane import API_DEFAULTS, PUBLIC_BASE, ApiOptions, ApiSession, connect
from comfyfleet.cli.tables import print_json
from comfyfleet.errors import FleetError, InvalidInput
from comfyfleet.workflow.embedded import parse_json

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
MEDIA = ("image", "video", "audio")


def parse_values(
    texts: Sequence[str], properties: Sequence[Mapping[str, Any]], slug: str
) -> dict[str, Any]:
    """Parses strings of the form `name=value`. The control plane checks the values itself."""
    known = {str(prop["name"]): prop for prop in properties}
    values = {}
    for text in texts:
        name, value = _split(text, "--set", "name=value")
        if name not in known:
            raise _unknown(name, known, slug)
        values[name] = _read(name, value, str(known[name].get("type")))
    return values


def parse_files(
    texts: Iterable[str], properties: Sequence[Mapping[str, Any]], slug: str
) -> dict[str, Path]:
    """Parses strings of the form `name=path`. All files must exist before anything is sent."""
    known = {str(prop["name"]): prop for prop in properties if prop.get("type") in MEDIA}
    files = {}
    for text in texts:
        name, path = _split(text, "--file", "input=PATH")
        if name not in known:
            raise _unknown(name, known, slug)
        files[name] = require_file(Path(path))
    return files


def _split(text: str, option: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise InvalidInput(f"{option} {text!r} is invalid; use {option} {form}")
    return name.strip(), value


def _read(name: str, text: str, kind: str) -> Any:
    if kind in ("text", ""):
        return text
    if kind in MEDIA:
        raise InvalidInput(f"{name} requires a file: --file {name}=PATH", field=name)
    if kind == "boolean":
        return _truth(name, text)
    if kind in ("number", "integer", "seed"):
        return _number(name, text)
    return text


def _truth(name: str, text: str) -> bool:
    if text.lower() not in TRUE + FALSE:
        raise InvalidInput(f"{name} must be true or false, not {text!r}", field=name)
    return text.lower() in TRUE


def _number(name: str, text: str) -> int | float:
    try:
        value = parse_json(text.encode(), what=name)
    except FleetError:
        value = None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{name} must be a number, not {text!r}", field=name)
    return value


def _unknown(name: str, known: Mapping[str, Any], slug: str) -> InvalidInput:
    available = ", ".join(known) or "none"
    return InvalidInput(
        f"workflow {slug} has no property {name}; available properties: {available}",
        hint=f"Show the properties with: comfyfleet admin workflows show {slug}",
        field=name,
    )


def upload(plane: ApiSession, path: Path, *route: str, **fields: Any) -> str:
    """Announces a file at a route of the API, uploads it, and returns its id. The key isn't sent to
    the storage server."""
    from comfyfleet.client.files import upload_source, upload_to

    calls = plane.client.calls
    return str(plane.run(upload_to(calls, plane.route(route), upload_source(path), **fields)))


def variables_from(plane: ApiSession, texts: Sequence[str]) -> dict[str, Any]:
    """Parses strings of the form `name=value`, as JSON or text. Uploads `@FILE` values after
    checking that all files exist."""
    values = dict(_split(text, "--set", "name=value") for text in texts)
    files = {
        name: require_file(Path(value[1:])) for name, value in values.items() if value[:1] == "@"
    }
    uploaded = {name: upload(plane, path, "videos", "uploads") for name, path in files.items()}
    return {name: uploaded.get(name) or _json_or_text(value) for name, value in values.items()}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def upload_command(
    files: Annotated[tuple[Path, ...], Parameter(metavar="FILE", help="Files to upload.")],
    /,
    *,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """See help_texts.UPLOAD."""
    if not files:
        raise InvalidInput("specify a file to upload")
    for file in files:
        require_file(file)
    with connect(options, context, base=PUBLIC_BASE) as plane:
        for file in files:
            media = plane.run(plane.client.upload(file))
            if options.as_json:
                print_json(media, context)
            else:
                context.print_line(str(media.id))


def download(plane: ApiSession, url: str, path: Path) -> None:
    """Downloads a file, and replaces the existing one only when it is complete."""
    from comfyfleet.client.files import download_file

    plane.run(download_file(plane.client.calls, url, path))

"""Files uploaded to a control plane, and downloaded from it. The key goes to neither place."""

from pathlib import Path
from typing import Any

from comfyfleet.cli.control_plane import ApiSession
from comfyfleet.client.files import download_file, upload_source, upload_to


def upload(plane: ApiSession, path: Path, *route: str, **fields: Any) -> str:
    """Returns the file's id; `route` is where files are announced."""
    calls = plane.client.calls
    return str(plane.run(upload_to(calls, plane.route(route), upload_source(path), **fields)))


def download(plane: ApiSession, url: str, path: Path) -> None:
    """Replaces what is there, once the file is whole."""
    plane.run(download_file(plane.client.calls, url, path))

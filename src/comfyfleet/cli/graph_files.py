"""Saves the files among the outputs of a graph run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfyfleet.cli.admin.client import Control
from comfyfleet.cli.world import World
from comfyfleet.client.graph_model import GraphRun
from comfyfleet.client.jobs import free_path


def save_files(plane: Control, seen: Mapping[str, Any], folder: Path, world: World) -> list[Path]:
    """Each once, several with their number in front so that a folder keeps their order."""
    files = GraphRun.model_validate(seen).files
    width = len(str(len(files)))
    saved: list[Path] = []
    for number, file in enumerate(files, start=1):
        folder.mkdir(parents=True, exist_ok=True)
        front = f"{number:0{width}}_" if len(files) > 1 else ""
        path = free_path(folder, front + file.filename)
        part = path.with_name(f"{path.name}.part")
        plane.download(file.url, part)
        part.replace(path)
        saved.append(path)
        world.print_line(str(path))
    return saved

"""Files of jobs on a backend: which a prompt may name, and how they are removed."""

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfyfleet.agent.jobfiles import FileInputs, file_inputs, flat_name, foreign_files, refuse
from comfyfleet.comfy import Backend

FOLDERS = ("input", "output", "temp")


class BackendFiles:
    """`home`: the folder that holds the backend's folders, if this machine has it."""

    def __init__(self, backend: Backend, home: Path | None = None) -> None:
        self.known = FileInputs()
        self._backend = backend
        self._home = home

    def learn(self, object_info: Mapping[str, Any]) -> None:
        self.known = file_inputs(object_info)

    async def check(self, prompt: Mapping[str, Any], own: frozenset[str]) -> None:
        """Raises InvalidInput if a prompt names a file that is not its job's.

        The node types are asked for again first: a file may have come since.
        """
        if not any(foreign_files(prompt, self.known, own)):
            return
        described = await self._backend.describe()
        await asyncio.to_thread(self.learn, described.object_info)
        for found in foreign_files(prompt, self.known, own):
            raise refuse(*found)

    def remove(self, folder: str) -> None:
        """All files of a job. Blocks."""
        if self._home is None:
            return
        for each in FOLDERS:
            shutil.rmtree(self._home / each / folder, ignore_errors=True)
        for path in (self._home / "input").glob(flat_name(folder, "*")):
            path.unlink(missing_ok=True)

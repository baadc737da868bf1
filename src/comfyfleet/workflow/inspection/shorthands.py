"""Which inputs the shorthands of the command line would set, so that they can be shown beside them."""

import contextlib
from collections.abc import Mapping
from typing import Any

from comfyfleet.kernel.errors import LimitExceeded
from comfyfleet.workflow.inspection.view import is_node
from comfyfleet.workflow.model import ObjectInfo
from comfyfleet.workflow.setting import SHORTHANDS
from comfyfleet.workflow.setting.entries import read_entry
from comfyfleet.workflow.setting.flow import Flow
from comfyfleet.workflow.setting.shorthandtable import Several

Shorthands = Mapping[tuple[str, str], tuple[str, ...]]  # by node id and input


def shorthands_of(prompt: Mapping[str, Any], object_info: ObjectInfo) -> Shorthands:
    entries = {
        key: read_entry(key, raw, object_info) for key, raw in prompt.items() if is_node(raw)
    }
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    # Where it gives up searching it would not set anything either.
    with contextlib.suppress(LimitExceeded):
        flow = Flow(entries)
        for shorthand in SHORTHANDS:
            places = shorthand.find(flow)
            if shorthand.several is Several.LEAVE and len(places) > 1:
                continue  # it would set none of them
            for place in places:
                key = (place.node_id, place.input)
                found[key] = (*found.get(key, ()), shorthand.name)
    return found
